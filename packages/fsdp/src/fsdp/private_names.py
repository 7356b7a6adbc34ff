"""The private names of FSDP2 that torch and others read of sharded modules, in one place.

Note: who reads which name. A sharded module is an instance of torch's FSDPModule; whoever has one
may call the methods of `fsdp.module.FSDPModule`, which are public.

    ======================================  ====================================================
    reader                                  names
    ======================================  ====================================================
    torch's pipeline stages before 2.15     ``fully_shard.state(module)``; its ``_state_ctx``
    (pipelining/stage.py)                   with ``all_states``, each of which has
                                            ``_fsdp_param_groups`` (2.11: ``_fsdp_param_group``)
                                            with ``post_backward``; of the root
                                            ``_root_post_backward_final_callback``
    torch's pipeline schedules since 2.15   ``module._get_fsdp_state()._comm_ctx``, by its id:
    (pipelining/schedules.py)               whether stages share a communication context
    torch's composable functions            ``fully_shard`` in the registry of a module, by
    (_composable/contract.py,               which ``replicate`` of a model leaves the module
    replicate.py)                           alone, and torch's own fully_shard refuses it
    DCP's state dicts                       none: `_get_module_fsdp_state_if_fully_sharded_module`
    (checkpoint/state_dict.py)              knows FSDP1 alone, so DTensors are saved as they are
    accelerate, transformers                none: they call methods of FSDPModule
    ======================================  ====================================================

tests/test_private_names.py reads the sources of the installed readers, and fails where one reads
another name. torch/distributed/_tools/fsdp2_mem_tracker.py replaces methods of FSDP2's classes, and
does not work with this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard as torch_fully_shard

__all__ = ["STATE", "ModuleNames", "StateNames", "is_replicated", "register_state"]

STATE = "_fsdp_state"  # attribute of a module: its FSDPState


def register_state(module: nn.Module, state: object) -> None:
    """Enters a sharded module where torch's composable functions look, as FSDP2 does."""
    function = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]
    module.__dict__.setdefault(STATE_KEY, {})[function] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})[function.__name__] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Returns whether torch's ``replicate`` manages a module, and so all modules below it."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


class ModuleNames:
    """The names of a sharded module."""

    def _get_fsdp_state(self) -> Any:
        state = cast(nn.Module, self).__dict__.get(STATE)
        if state is None:
            raise AssertionError(f"fsdp: No FSDP state found on {type(self).__name__}")
        return state


class _State(Protocol):
    """What `StateNames` needs of an `FSDPState`."""

    @property
    def context(self) -> Any: ...

    @property
    def groups(self) -> Sequence[Any]: ...

    def end_backward(self, *, reduced: bool = False) -> None: ...


class StateNames:
    """The names of an `FSDPState`."""

    @property
    def _state_ctx(self: _State) -> Any:
        return self.context

    @property
    def _comm_ctx(self: _State) -> object:
        return self.context.streams  # which `share_comm_ctx` makes one object

    @property
    def _fsdp_param_groups(self: _State) -> list[_ParamGroups]:
        return [_ParamGroups(self.context, [group]) for group in self.groups]

    @property
    def _fsdp_param_group(self: _State) -> _ParamGroups | None:
        return _ParamGroups(self.context, self.groups) if self.groups else None

    def _root_post_backward_final_callback(self: _State) -> None:
        self.end_backward(reduced=True)


class _ParamGroups:
    """Groups as a pipeline stage sees them."""

    def __init__(self, context: Any, groups: Sequence[Any]) -> None:
        self._context, self._groups = context, groups

    def post_backward(self) -> None:
        """Reduces the gradients that all microbatches have accumulated."""
        for group in self._groups:
            self._context.post_backward(group)
