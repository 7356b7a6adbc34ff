"""The entries that say how modules run, wherever their tensors are placed."""

from __future__ import annotations

import operator
from typing import Any, Self, SupportsIndex

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from plan_api.ops.low_precision.recipes import Recipe, check_recipe
from plan_api.spec.arguments import Axes
from plan_api.spec.entry import EntryKind
from plan_api.spec.entry_list import EntryList
from plan_api.spec.module_policies import RecomputePolicy, check_backend, check_recompute
from plan_api.spec.param_values import ParamValues, ValueOption
from plan_api.spec.policies import PolicyValue, checked_dtype

__all__ = ["PolicyEntries"]


class PolicyEntries(EntryList):
    """Calls on a plan that name modules and say how they run."""

    def fully_shard(
        self,
        path: str,
        mesh: Axes,
        granularity: ValueOption = None,
        reshard_after_forward: bool | int | None = None,
        *,
        flat: bool = False,
        replicate: int = 1,
        placements: str | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        quantize: ValueOption = None,
        send_dtype: torch.dtype | None = None,
    ) -> Self:
        """Applies the fsdp package to modules, after all other parameters are placed.

        Parameters that the plan shards along the same axes, such as experts, are left out. In
        static mode modules compute with plain tensors that it has gathered.

        Args:
            path: of modules.
            mesh: the axes: one to shard on, or two, of which the first replicates (HSDP).
            granularity: the runs of elements that sharding keeps on one rank: a value of the
                package, such as ``fsdp.Rows(32)``, for all parameters; or values by patterns of
                the parameters' full names; or a function of a parameter, as fsdp's
                ``shard_placement_fn``, which is called when the plan is lowered. None is fsdp's
                default, and that of parameters that no pattern matches.
            reshard_after_forward: whether parameters are gathered again in backward; None: all but
                those of the root. A number of ranks: between forward and backward they are sharded
                over as many neighbouring ranks only.
            flat: whether several axes are flattened into one to shard on.
            replicate: the number of replicas on one axis, or on axes that ``flat`` makes one, each
                on neighbouring ranks (HSDP where the batch is sharded along this axis once).
            placements: of parameters, gradients and optimizer state, as the package names them:
                "zero1", "zero2", "hfsdp"; None: all are sharded.
            mp_policy: torch's: dtypes of parameters while modules run, of reductions and outputs.
                None: those of the parameters.
            offload_policy: torch's: ``CPUOffloadPolicy()`` keeps shards and gradients on the host.
                None: they are on the mesh's device.
            quantize: in which form parameters are gathered, such as ``fsdp.Tiles()``: a value,
                values by patterns, or a function, as for ``granularity``. None: as they are.
            send_dtype: the dtype in which ranks send the terms of gradients, which are added in
                ``reduce_dtype`` of ``mp_policy``: ``torch.bfloat16``, or a float8 dtype. None: the
                dtype in which they are added.

        Raises:
            ValueError: as `shard`; or the path names a tensor; or a policy or value is none of
                torch's or the package's, or has an object that a plan cannot store.
                `parallelize` refuses values that parameters cannot have, patterns that match no
                parameter or one that another matches, policies of modules whose parameters the
                plan itself shards along these axes, placements that the package does not have on
                them, a ``send_dtype`` in which it sends nothing, and parameters with phases along
                them.
        """
        what = f"fully_shard({path!r})"
        options: dict[str, Any] = {
            "granularity": ParamValues.of(what, "granularity", granularity),
            "reshard_after_forward": _checked_reshard(what, reshard_after_forward),
        }
        options |= {"flat": True} if flat else {}
        if isinstance(replicate, SupportsIndex):
            replicate = operator.index(replicate)
        options |= {"replicate": replicate} if replicate != 1 else {}
        options |= {"placements": placements} if placements is not None else {}
        for name, policy in (("mp_policy", mp_policy), ("offload_policy", offload_policy)):
            if policy is not None:
                options[name] = PolicyValue.of(what, name, policy)
        if quantize is not None:
            options["quantize"] = ParamValues.of(what, "quantize", quantize)
        if send_dtype is not None:
            options["send_dtype"] = checked_dtype(what, "send_dtype", send_dtype)
        return self._add(EntryKind.FULLY_SHARD, path, mesh, None, options=options)

    def eager(self, path: str) -> Self:
        """Keeps modules on DTensors in static mode; in Eager, where all are, it has no effect.

        For modules whose own code redistributes between operators, where there is no hook. Their
        inputs have the placements that the plan gives (`annotate`, or the ``src`` of `redistribute`
        on the module's ``<in>``), and are replicated otherwise.

        Args:
            path: of modules, with all modules inside them.

        Raises:
            ValueError: the path names a tensor.
        """
        return self._add(EntryKind.EAGER, path, (), None)

    def recompute(self, path: str, policy: RecomputePolicy = "full") -> Self:
        r"""Recomputes activations of modules in backward, instead of storing them.

        torch.utils.checkpoint runs the ``forward`` of these modules, without reentrant autograd, in
        both modes. Hooks of these modules run once, before and after it: what the plan
        redistributes at their inputs and outputs is not sent again, what it redistributes inside of
        them is. Losses and gradients keep their bits, dropout included.

        Args:
            path: of modules; one of every two layers is ``r"layers\.\d*[02468]"``.
            policy: ``"full"`` stores the inputs of a module only. ``"selective-op"`` also stores
                the results of matrix products and of fused attention, which have the most FLOPs per
                byte, and recomputes all other operators. ``"keep-dispatch"`` also stores the rows
                that ranks receive where modules inside dispatch tokens (`dispatch`), so that
                backward sends them no second time.

        Raises:
            ValueError: the path names a tensor, or there is no such policy. `parallelize` refuses
                modules inside of others that are recomputed, two policies of one module,
                ``"selective-op"`` for parameters that are gathered again in backward, and
                ``"keep-dispatch"`` for modules inside of which no tokens are dispatched.
        """
        check_recompute(f"recompute({path!r})", policy)
        return self._add(EntryKind.RECOMPUTE, path, (), None, options={"policy": policy})

    def compile(self, path: str, backend: str = "inductor") -> Self:
        """Compiles the ``forward`` of modules by torch.compile, each as one graph.

        It is done after everything else is installed, recomputation included, which is part of the
        graph. Hooks of these modules, such as those of `fully_shard`, run outside of the graph;
        those of modules inside of them are in it. A graph break is an error of the first step,
        which names the entry. `Installed.check`, and with it the first step of static mode,
        compares the modes without compiled code. The process ignores two warnings of Dynamo, about
        what it does itself, from then on.

        Args:
            path: of modules, such as the layers, which share graphs.
            backend: the name of a backend of torch.compile: ``"inductor"``, or ``"aot_eager"``,
                which has the bits of eager torch.

        Raises:
            ValueError: the path names a tensor, or torch has no such backend. `parallelize` refuses
                modules inside of others that are compiled, two backends of one module, and modules
                whose code or hooks cannot be in one graph.
        """
        check_backend(f"compile({path!r})", backend)
        return self._add(EntryKind.COMPILE, path, (), None, options={"backend": backend})

    def precision(self, path: str, recipe: Recipe) -> Self:
        r"""Makes linear layers and experts compute their products from operands in low precision.

        Forward and both products of backward quantize their operands as the recipe says; gradients
        and parameters, which optimizers and checkpoints have, stay as they are. fully_shard gathers
        weights of linear layers quantized, and so are sequences in front of linear layers that
        tensor parallelism shards on their output features. Where ranks of tensor parallelism share
        a scale, the largest magnitude is reduced over them, in one all-reduce of each pass that
        needs any. Scales of tokens are those of this rank's tokens; each expert has its own.

        Args:
            path: of linear layers, and of modules of experts of transformers, whose parameters have
                three dims; a pattern may match other modules, which stay as they are, such as
                ``r"(?!lm_head$).*"``, which names all linear layers and experts but the head.
            recipe: `Float8Tensorwise`, `Float8Rowwise`, `Float8Block` or `MXFP8`.

        Raises:
            ValueError: the path names a tensor, or the recipe is none. `parallelize` refuses a path
                without linear layers or experts, two recipes of one layer, features that blocks do
                not divide, on each rank, experts that are compiled or compute otherwise than by
                linear layers and grouped products, and, with ``products="kernel"``, a device
                without kernels.
        """
        check_recipe(f"precision({path!r})", recipe)
        return self._add(EntryKind.PRECISION, path, (), None, options={"recipe": recipe})


def _checked_reshard(what: str, reshard: object) -> bool | int | None:
    if reshard is None or isinstance(reshard, bool):
        return reshard
    if not isinstance(reshard, SupportsIndex) or operator.index(reshard) < 1:
        raise ValueError(
            f"{what}: reshard_after_forward: expected True, False, None or a number of ranks, got "
            f"{reshard!r}"
        )
    return operator.index(reshard)
