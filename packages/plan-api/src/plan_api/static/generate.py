"""A plan for static mode, found out by a step of Eager (veScale, section 6.2)."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from plan_api.api import installed, parallelize
from plan_api.lowering.ir import Lowered
from plan_api.lowering.lower import lower
from plan_api.plan import Plan
from plan_api.spec.path import generalize_numbers
from plan_api.static.check import unsupported
from plan_api.static.compare import StaticError
from plan_api.static.fake import Faker
from plan_api.static.hints import hint
from plan_api.static.lines import Said, lines_of, sizes_of, written
from plan_api.static.record import Record, record
from plan_api.static.stays import around, widened
from plan_api.static.twin import twin_of

__all__ = ["generate_static"]

_log = logging.getLogger("plan_api")

_RUNS = 4  # until what is said of gradients has settled
_FAKE = (
    "which operators make DTensor move tensors is seen in steps that send: leave fake=True out to "
    "be told, with the entries that avoid it"
)


def generate_static(
    plan: Plan,
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    fake: bool = False,
    use: Sequence[str] | None = None,
) -> Plan:
    """Makes a plan for static mode of one for Eager, by running steps of Eager.

    What is made says of each tensor that the plan moves what it is before, and of gradients; where
    a gradient would go on as a sum it is reduced where that begins, as Megatron-LM does it. It is
    an ordinary plan, and the same in Eager. It is tried: a static step has to give Eager's bits.

    A module that cannot run on local tensors, as one whose own code moves tensors between two
    operators, stays on DTensors (`Plan.eager`), and so do those like it; the smallest that does.
    That is logged as a warning, with the operator, how its tensors are placed, and, where there are
    some that send no more, the lines to paste into the plan so that nothing has to stay; they have
    been tried. With ``fake`` the warning has no operators: nothing is sent that would show them.

    Args:
        plan: for Eager.
        model: unmodified, or parallelized; it is not changed.
        example_inputs: of one step, as tuple of arguments or dict of keywords; all ranks of the
            mesh give the same.
        fake: runs on FakeTensors, which take no memory, and sends nothing; model and inputs may be
            on ``meta``. Only shapes tell then whether static mode goes wrong; numbers are left to
            the guard of `parallelize`.
        use: the optional packages to use while it runs, as of `parallelize`, whose patches it
            installs.

    Returns:
        a plan that `parallelize(model, plan, mode="static")` takes.

    Raises:
        ValueError: the plan has options that static mode does not support (fully_shard, phases,
            context parallelism, factories that shard), or the model does not take these inputs,
            said before anything is run or sent; or nothing smaller than the whole model could stay
            on DTensors: names module, operator and placements, as the warning would.
    """
    args, kwargs = _arguments(model, example_inputs)
    problems = [str(one) for one in unsupported(lower(plan, model))]
    if problems:
        raise ValueError("generate_static: the plan is none for it:\n" + "\n".join(problems))
    if fake:
        faker = Faker(plan.mesh.device_type)
        model = twin_of(model, faker.of)
        args, kwargs = faker.inputs(args, kwargs)
    staying: dict[str, str] = {}  # by pattern of modules, what goes wrong otherwise

    def found(asked: Plan) -> Plan:
        made, lowered, seen = _settled(asked, model, args, kwargs, use)
        return _tried(made, sizes_of(lowered, seen), model, args, kwargs, use)

    def why(pattern: str) -> str:
        if fake:
            return _FAKE
        others = [one for one in staying if pattern and one != pattern]
        works = functools.partial(_works, found, others)
        return hint(plan, model, pattern, args, kwargs, use, works)

    while True:
        try:
            made = found(_with_eager(plan, staying))
        except StaticError as error:
            wider = around(error.site, model, staying)
            if wider is None:
                raise ValueError(
                    f"generate_static: {error.site or 'the model'} cannot run on local tensors: "
                    f"{error}\n{why('')}"
                ) from error
            staying = widened(staying, wider, "\n".join(str(error).splitlines()[:2]))
            continue
        for pattern, reason in staying.items():
            _log.warning(
                "generate_static: %s stays on DTensors: on local tensors %s\n%s",
                pattern, reason, why(pattern),
            )  # fmt: skip
        return made


def _with_eager(plan: Plan, patterns: Iterable[str]) -> Plan:
    """A copy of a plan, under which these modules stay on DTensors."""
    asked = plan | Plan(plan.mesh)
    for pattern in patterns:
        asked.eager(pattern)
    return asked


def _works(found: Callable[[Plan], Plan], others: Sequence[str], asked: Plan) -> bool:
    """Whether a plan for static mode is found when no more than these modules stay."""
    try:
        found(_with_eager(asked, others))
    except (ValueError, RuntimeError, IndexError):  # of static mode, or of Eager under that plan
        return False
    return True


def _arguments(model: nn.Module, example_inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """By place and by name, as the model's forward takes them."""
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), example_inputs
    elif isinstance(example_inputs, (tuple, list)):
        args, kwargs = tuple(example_inputs), {}
    else:
        raise ValueError(
            f"generate_static: example_inputs is a {type(example_inputs).__name__}: give a tuple "
            f"of arguments, or a dict of keywords"
        )
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"generate_static: forward of {type(model).__name__} does not take these "
            f"example_inputs: {error}"
        ) from error
    return args, kwargs


def _settled(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    use: Sequence[str] | None,
) -> tuple[Plan, Lowered, Record]:
    """The plan with what steps of Eager show, until they show nothing new."""
    made = plan
    for _ in range(_RUNS):
        eager = parallelize(twin_of(model), made, src_data_rank=None, use=use)
        lowered = installed(eager).lowered
        installed(eager).remove()
        seen = record(eager, lowered, plan.mesh, args, kwargs)
        before, made = made, written(plan, lines_of(eager, lowered, seen), model)
        if made.entries == before.entries:
            break
    return made, lowered, seen


def _tried(
    plan: Plan,
    sizes: list[Said],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    use: Sequence[str] | None,
) -> Plan:
    """The plan, with lines of sizes that code says as of the whole, where it goes wrong without.

    Raises:
        StaticError: static mode does something else all the same.
    """
    used: list[Said] = []
    while True:
        static = twin_of(model)
        with_sizes = plan | written(Plan(plan.mesh), used, model)
        try:
            parallelize(
                static, with_sizes, mode="static", guard_steps=0, src_data_rank=None, use=use
            )
            found = installed(static).check(*args, **kwargs)
        except StaticError as error:
            more = _next(sizes, used, error.site)
            if not more:
                raise
            used += more
            continue
        if found:
            bits = f"static mode is Eager up to rounding only: {found[0]}"
            raise StaticError(bits, found[0].site)
        return with_sizes


def _next(sizes: list[Said], used: list[Said], site: str) -> list[Said]:
    """Lines not yet used of the module where it went wrong, or the next one above it."""
    parts = site.split(".") if site else []
    for count in range(len(parts), -1, -1):
        pattern = generalize_numbers(".".join(parts[:count]))
        more = [one for one in sizes if generalize_numbers(one.path) == pattern and one not in used]
        if more:
            return more
    return []
