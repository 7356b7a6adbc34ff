"""Generates a plan for static mode from steps of Eager (veScale, section 6.2)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from plan_api.installation import installed
from plan_api.lowering.ir import Lowered
from plan_api.lowering.lower import lower
from plan_api.plan import Plan
from plan_api.spec.path import generalize_numbers
from plan_api.static.comparison import StaticError
from plan_api.static.eager_fallback import smallest_fallback, widen_fallbacks
from plan_api.static.generation.communication import planned_communication
from plan_api.static.generation.entries import (
    GeneratedEntry,
    generate_entries,
    generate_size_entries,
    plan_with_entries,
    split_policies,
)
from plan_api.static.generation.example_step import ExampleStep
from plan_api.static.generation.suggestions import suggest_entries
from plan_api.static.generation.trace import EagerTrace
from plan_api.static.validate import context_parallel_sites, unsupported_options

__all__ = ["generate_static"]

_log = logging.getLogger("plan_api")

_MOST_STEPS = 4  # until the placements of gradients no longer change
_NO_SUGGESTIONS = (
    "with fake=True nothing is sent, which would show the operators that make DTensor redistribute "
    "tensors; leave it out to see them, with the entries that avoid it"
)


def generate_static(
    plan: Plan,
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    fake: bool = False,
    communication: Literal["planned", "as written"] = "planned",
    use: Sequence[str] | None = None,
) -> Plan:
    """Generates a plan for static mode from a plan for Eager, by running steps of Eager.

    The generated plan adds, for each tensor that the plan redistributes, its current placement,
    and the placements of gradients; a gradient that becomes Partial is reduced where it does, as in
    Megatron-LM; once, where several modules share it (`plan_communication`). It is an ordinary
    plan, with the same effect in Eager. It is validated: a static step has to compute Eager's bits.
    Entries of `Plan.sequence` and `Plan.context` stay in it; where a mask describes batches, call
    it within `attention_mask`.
    fully_shard is not applied for that: modules compute the same with it.

    A module that cannot run on local tensors, such as one whose own code needs a redistribution
    between two operators, runs on DTensors (`Plan.eager`), with all modules of the same pattern;
    the smallest such module is chosen. That is logged as a warning, with the operator, the
    placements of its tensors, and, where some send no more, the lines to paste into the plan so
    that the module runs on local tensors; they have been validated. With ``fake`` the warning has
    no operators, as nothing is sent that would show them.

    Args:
        plan: for Eager.
        model: unmodified, or parallelized without fully_shard; it is not changed.
        example_inputs: of one step, as a tuple of arguments or a dict of keyword arguments; the
            same on all ranks of the mesh.
        fake: whether to run on FakeTensors, which take no memory, and to send nothing; model and
            inputs may be on ``meta``. Static mode is then validated by shapes only; values are
            left to the guard of `parallelize`.
        communication: ``"planned"``: with the redistributions that `plan_communication` adds.
            ``"as written"``: without them; each gradient is reduced at the module where it becomes
            Partial.
        use: the optional packages to use while it runs; see `parallelize`, whose patches it
            installs.

    Returns:
        a plan that `parallelize(model, plan, mode="static")` takes.

    Raises:
        ValueError: ``communication`` has no such value; the plan has options that static mode does
            not support (phases beside fully_shard, context parallelism with ``fake``), the model
            does not take these inputs, or fully_shard has been applied to it; raised before
            anything is run or sent. Or no module smaller than the model could run on DTensors;
            names module, operator and placements, as the warning would.
    """
    if communication not in ("planned", "as written"):
        raise ValueError(
            f"generate_static: communication={communication!r} must be 'planned' or 'as written'"
        )
    step = ExampleStep.checked("generate_static", plan, model, example_inputs, fake, use)
    _check_supported(lower(plan, model), plan, fake=fake)
    plan, policies = split_policies(plan)
    if communication == "planned":
        plan = planned_communication(plan, step)
    fallbacks: dict[str, str] = {}  # patterns of modules that run on DTensors, and the reason

    def generate(changed: Plan) -> Plan:
        generated, lowered, trace = _generate(changed, step)
        sizes = generate_size_entries(lowered, trace)
        return _validated(generated, sizes, step)

    def suggest(pattern: str) -> str:
        if fake:
            return _NO_SUGGESTIONS
        others = [fallback for fallback in fallbacks if pattern and fallback != pattern]
        runs_locally = functools.partial(_can_generate, generate, others)
        return suggest_entries(plan, step, pattern, runs_locally)

    while True:
        try:
            generated = generate(_with_fallbacks(plan, fallbacks))
        except StaticError as error:
            wider = smallest_fallback(error.site, model, fallbacks)
            if wider is None:
                raise ValueError(
                    f"generate_static: {error.site or 'the model'} cannot run on local tensors: "
                    f"{error}\n{suggest('')}"
                ) from error
            reason = "\n".join(str(error).splitlines()[:2])
            fallbacks = widen_fallbacks(fallbacks, wider, reason)
            continue
        for pattern, reason in fallbacks.items():
            _log.warning(
                "generate_static: %s runs on DTensors: on local tensors %s\n%s",
                pattern, reason, suggest(pattern),
            )  # fmt: skip
        return generated | policies


def _check_supported(lowered: Lowered, plan: Plan, *, fake: bool) -> None:
    """Refuses a plan that static mode, or a step on FakeTensors, does not support."""
    problems = [str(problem) for problem in unsupported_options(lowered, plan.mesh)]
    if fake:
        problems += (
            f"{site}: expected fake=False with context parallelism, whose ranks send keys and "
            f"values, which are real in any step; leave fake out, on a smaller model if this one "
            f"takes too much memory"
            for site in context_parallel_sites(lowered)
        )
    if problems:
        lines = "\n".join(problems)
        raise ValueError(f"generate_static: static mode does not support this plan:\n{lines}")


def _with_fallbacks(plan: Plan, patterns: Iterable[str]) -> Plan:
    """Returns a copy of a plan under which these modules run on DTensors."""
    changed = plan | Plan(plan.mesh)
    for pattern in patterns:
        changed.eager(pattern)
    return changed


def _can_generate(
    generate: Callable[[Plan], Plan], fallbacks: Sequence[str], changed: Plan
) -> bool:
    """Whether a plan for static mode can be generated with these fallbacks only."""
    try:
        generate(_with_fallbacks(changed, fallbacks))
    except (ValueError, RuntimeError, IndexError):  # of static mode, or of Eager under that plan
        return False
    return True


def _generate(plan: Plan, step: ExampleStep) -> tuple[Plan, Lowered, EagerTrace]:
    """Adds to a plan what steps of Eager show, until they show nothing new."""
    generated = plan
    for _ in range(_MOST_STEPS):
        lowered, trace = step.trace(generated)
        before = generated
        generated = plan_with_entries(
            plan, generate_entries(step.model, lowered, trace), step.model
        )
        if generated.entries == before.entries:
            break
    return generated, lowered, trace


def _validated(plan: Plan, sizes: list[GeneratedEntry], step: ExampleStep) -> Plan:
    """Validates a plan against Eager, and adds entries for sizes in the code where it fails.

    Raises:
        StaticError: static mode computes something else with these entries too.
    """
    added: list[GeneratedEntry] = []
    while True:
        with_sizes = plan | plan_with_entries(Plan(plan.mesh), added, step.model)
        try:
            static = step.parallelized(with_sizes, "static")
            differences = [
                difference
                for difference in installed(static).check(*step.args, **step.kwargs)
                if difference.only_rounding
            ]
        except StaticError as error:
            more = _next_sizes(sizes, added, error.site)
            if not more:
                raise
            added += more
            continue
        if differences:
            raise StaticError(
                f"static mode equals Eager up to rounding only: {differences[0]}",
                differences[0].site,
            )
        return with_sizes


def _next_sizes(
    sizes: list[GeneratedEntry], added: list[GeneratedEntry], site: str
) -> list[GeneratedEntry]:
    """Returns entries not yet added of the module that failed, or of the next one above it."""
    parts = site.split(".") if site else []
    for count in range(len(parts), -1, -1):
        pattern = generalize_numbers(".".join(parts[:count]))
        more = [
            size for size in sizes if generalize_numbers(size.path) == pattern and size not in added
        ]
        if more:
            return more
    return []
