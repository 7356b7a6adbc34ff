"""Compiles modules by torch.compile, each as one graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from plan_api.lowering.ir import ModulePolicy
from plan_api.lowering.model_names import is_inside
from plan_api.runtime.error_context import append_message
from plan_api.runtime.hooks import SiteCoverage
from plan_api.runtime.policies.replaced_forward import ReplacedForward, forward_of

__all__ = ["install_compile"]

_WARNINGS_OF_DYNAMO = (
    # It reads the `grad` of a module's inputs.
    r"The \.grad attribute of a Tensor that is not a leaf",
    # It makes one for each autograd function that it traces.
    r"<class 'torch\.autograd\.function\.Function'> should not be instantiated",
)


def install_compile(
    model: nn.Module,
    compiled: Mapping[str, ModulePolicy],
    recomputed: Collection[str],
    coverage: SiteCoverage,
) -> Iterator[ReplacedForward]:
    """Makes modules run compiled; hooks of these modules run outside of the graphs.

    Args:
        model: on which everything else is installed.
        compiled: backends, by module path.
        recomputed: paths of the modules whose activations are recomputed.
        coverage: records which sites run.
    """
    if compiled:
        for message in _WARNINGS_OF_DYNAMO:
            warnings.filterwarnings("ignore", message=message)
    for path, policy in compiled.items():
        module = model.get_submodule(path)
        recomputes = any(is_inside(inner, path) for inner in recomputed)
        graph = torch.compile(forward_of(module), backend=policy.value, fullgraph=True)
        if recomputes:
            graph = _with_side_effects(graph)
        yield ReplacedForward(module, _compiled(module, graph, path, policy, coverage))


def _with_side_effects(graph: Callable[..., Any]) -> Callable[..., Any]:
    """Lets hooks inside of what is recomputed enter modes of functions, and leave them.

    Dynamo refuses side effects there, as the recomputation of a graph does not repeat them. Those
    of hooks need not be repeated: they end with the module.
    """

    @functools.wraps(graph)
    def called(*args: Any, **kwargs: Any) -> Any:
        option = {"skip_fwd_side_effects_in_bwd_under_checkpoint": True}
        with torch._dynamo.config.patch(option):
            return graph(*args, **kwargs)

    return called


def _compiled(
    module: nn.Module,
    graph: Callable[..., Any],
    path: str,
    policy: ModulePolicy,
    coverage: SiteCoverage,
) -> Callable[..., Any]:
    forward, has_run = forward_of(module), False

    @functools.wraps(forward)
    def compiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if not has_run:
            has_run = True
            coverage.record_inside(path)
        try:
            return graph(module, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            append_message(
                error,
                f"in {path or 'the model'}, for {policy.description}: expected one graph; compile "
                f"modules inside of it, or leave it out",
            )
            raise

    compiled.uncompiled = forward  # type: ignore[attr-defined]
    return compiled
