"""Applies a plan to a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from plan_api.installation import apply_plan
from plan_api.options import ParallelizeOptions
from plan_api.plan import Plan
from plan_api.static.generation.communication import plan_communication
from plan_api.static.generation.entries import split_policies
from plan_api.static.generation.example_step import ExampleStep

__all__ = ["parallelize"]

_log = logging.getLogger("plan_api")


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    strict: bool = False,
    mode: Literal["eager", "static"] = "eager",
    guard_steps: int | None = None,
    src_data_rank: int | None = 0,
    bucket_mb: float | None = None,
    use: Sequence[str] | None = None,
    overlap: str | None = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> nn.Module:
    """Parallelizes a model for one device on the plan's mesh, in place (veScale, section 4).

    Its parameters and buffers become DTensors under their names, tied ones stay tied, and hooks
    redistribute inputs and outputs. Gradients are reduced when backward has accumulated them, with
    ZeRO-1 at its end: in buckets of fused-comm if it is in use, otherwise one by one.

    It patches torch for the whole process, until `uninstall`:

    - DTensor's strategies for fused attention on CPU
      (``_scaled_dot_product_flash_attention_for_cpu`` and its backward), for which torch has none;
    - ``torch.nn.functional.scaled_dot_product_attention``, which runs on the local tensors of
      DTensors where it has a mask or dropout, or torch's math backend computes it;
    - ``batch_norm``, ``group_norm``, ``cross_entropy`` with label smoothing, and ``mse_loss`` and
      ``l1_loss`` with weights, of ``torch.nn.functional``, which do so for shards;
    - DTensor's handlers of ``_log_softmax``, ``nll_loss``, ``mse_loss``, ``smooth_l1_loss``,
      ``huber_loss``, ``binary_cross_entropy``, ``soft_margin_loss`` and their backward;
    - from torch 2.14 on, DTensor's strategy for ``convolution_backward``, which is removed;
    - in static mode, a hook before and after the step of every optimizer, and the functions of
      ``torch.nn.init``, which take the parameter where they get a module's local tensor;
    - the patches of ``dist_rng.install()`` and ``dtensor_rules.enable()``, if they are in use.

    Args:
        model: unmodified.
        plan: see `Plan`.
        strict: whether an entry that overrides another is an error; otherwise it is logged.
        mode: ``"eager"``: operators run on DTensors, which have placements. ``"static"``: they run
            on local tensors, and the plan has the placements where these are redistributed
            (veScale, section 6.2); parameters are DTensors to optimizers and checkpoints only.
        guard_steps: in static mode, the number of first calls with gradients that are validated
            against Eager before they run (`Installed.check`); differences above rounding are an
            error, other collectives a warning. Each takes a step of Eager, and the memory of both
            modes; with fully_shard also that of all unsharded parameters and their gradients;
            None: 1.
        src_data_rank: the rank along each axis of the mesh whose parameters all ranks get; None:
            each rank shards its own, without communication, for models that are the same on all
            ranks. Parameters on ``meta`` have no values to send, and those of `deferred_init` have
            to be the same on all ranks.
        bucket_mb: megabytes (2**20 bytes) of a bucket of gradients, as `GradReducer` of fused-comm
            takes it; None: 25 if fused-comm is in use.
        use: the optional packages to use: ``"dist-rng"`` (random numbers are those of one device)
            and ``"dtensor-rules"`` (operators cost less) are enabled for the process,
            ``"fused-comm"`` reduces gradients in buckets. None: those that are installed. ``()``:
            none; a package that the script itself has enabled stays enabled.
        overlap: the axis of the mesh along which communication is split, and sent while products
            of Linears are computed (asynchronous tensor parallelism), usually ``"tp"``: gathers in
            front of Linears that are sharded on their output features, reductions behind those that
            are sharded on their input features, and the same in backward. `explain` lists the
            sites. Only rows are split, and sums over ranks keep gloo's order, so on a CPU results
            have the bits of the unsplit order. ``guard_steps`` then compares collectives along the
            other axes only. None: communication is waited for at once.
        example_inputs: of one step, as a tuple of arguments or a dict of keyword arguments, the
            same on all ranks, as `plan_communication` takes them: the redistributions that it adds
            to the plan are installed as well, and are in ``installed(model).plan``, which
            `explain` prints. It runs a few steps of Eager on FakeTensors, and in static mode one
            of both modes, so that what static mode cannot run is an error here, and not of the
            first step. None: the plan is installed as written.

    Returns:
        the model.

    Raises:
        ValueError: an option has no such value, or would have no effect (``guard_steps`` above 0
            in Eager, ``bucket_mb`` without fused-comm or without gradients to reduce, ``overlap``
            along an axis without communication beside products, or with compiled modules), or names
            a package that is not installed; the plan does not fit the model or the mode, or it or
            an option differs between ranks (then on every rank); this rank is not in the plan's
            mesh; or the model has been parallelized already. Before that nothing is changed, and
            only a comparison between ranks is communicated.
    """
    options = ParallelizeOptions.checked(
        plan.mesh, mode, guard_steps, src_data_rank, bucket_mb, use, overlap
    )
    if example_inputs is not None:
        plan = plan_communication(plan, model, example_inputs, use=use)
        if mode == "static":
            step = ExampleStep.checked("parallelize", plan, model, example_inputs, True, use)
            step.check_static(split_policies(plan)[0])
    overrides = apply_plan(model, plan, options, strict=strict).overrides
    if overrides:
        text = "\n".join(map(str, overrides))
        _log.warning("entries of the plan override others:\n%s", text)
    return model
