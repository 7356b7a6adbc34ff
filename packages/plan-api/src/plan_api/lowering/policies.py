"""The modules that a plan recomputes and compiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from torch import nn

from plan_api.lowering.ir import FullyShard, HookPoint, ModulePolicy, Op, OpKind, Schedule
from plan_api.lowering.model_names import is_inside
from plan_api.spec.entry import EntryKind
from plan_api.spec.path import generalize_numbers, path_code
from plan_api.spec.plan_entries import PlanEntries

__all__ = ["check_compiled", "check_recomputed", "resolve_policies"]


def resolve_policies(
    plan: PlanEntries, model: nn.Module, kind: EntryKind
) -> dict[str, ModulePolicy]:
    """Finds the modules that entries of one kind name.

    Args:
        plan: any, whose entries name modules of the model.
        model: any; it is not changed.
        kind: RECOMPUTE or COMPILE.

    Returns:
        the policy or the backend of each module, by its first name.

    Raises:
        ValueError: two entries say otherwise for one module, or for a module and one inside of it;
            or a module has no forward.
    """
    first_names = {module: name for name, module in model.named_modules()}
    found: dict[str, ModulePolicy] = {}
    for entry in plan.entries:
        if entry.kind is not kind:
            continue
        (value,) = dict(entry.options).values()
        policy = ModulePolicy(value, str(entry), entry.line)
        for name, module in model.named_modules(remove_duplicate=False):
            if not entry.path.matches(name):
                continue
            _check_forward(policy, name, module)
            earlier = found.setdefault(first_names[module], policy)
            if earlier.value != value:
                raise ValueError(
                    f"{policy.description}: expected one {kind.value}() entry for {_name(name)}, "
                    f"got another: {earlier.description}; leave one of them out"
                )
    for inner, outer in permutations(found, 2):
        if is_inside(inner, outer):
            raise ValueError(
                f"{found[inner].description}: expected modules outside of others that have a "
                f"{kind.value}() entry, got {inner}, which is inside of {_name(outer)}: "
                f"{found[outer].description}; leave one of them out"
            )
    return found


def check_recomputed(
    recomputed: Mapping[str, ModulePolicy], schedules: Mapping[str, Schedule], ops: Sequence[Op]
) -> None:
    """Refuses policies that modules cannot have, or that would do nothing.

    A selective policy for parameters that are gathered again in backward: torch.utils.checkpoint
    finds results of forward by the order of operators, which those of the gathers change. And to
    keep what is dispatched where nothing is; a module's own tokens are dispatched before it runs.

    Args:
        recomputed: policies, by module path.
        schedules: of parameters, by their first names.
        ops: of the plan.

    Raises:
        ValueError: names the entry, and the parameter and the entries with its phases.
    """
    dispatching = {op.path for op in ops if op.kind is OpKind.DISPATCH}
    for path, policy in recomputed.items():
        inside = [one for one in dispatching if one != path and is_inside(one, path)]
        if policy.value == "keep-dispatch" and not inside:
            raise ValueError(
                f"{policy.description}: expected modules inside of which tokens are dispatched, "
                f"got {_name(path)}, where none are; use recompute({_pattern(path)})"
            )
        if policy.value != "selective-op":
            continue
        for name, schedule in schedules.items():
            gathered = schedule.has_phases and not schedule.keeps_unsharded
            if gathered and is_inside(name, path):
                raise ValueError(
                    f"{policy.description}: expected parameters that stay gathered for backward, "
                    f"got {name}, which is gathered again there, as {', '.join(schedule.lines)} "
                    f"says; use recompute({_pattern(path)}), or fully_shard() instead of phases"
                )


def check_compiled(
    compiled: Mapping[str, ModulePolicy],
    recomputed: Mapping[str, ModulePolicy],
    fully_sharded: Mapping[str, FullyShard],
    schedules: Mapping[str, Schedule],
    ops: Sequence[Op],
) -> None:
    """Refuses to compile what cannot be in one graph.

    Args:
        compiled: backends, by module path.
        recomputed: policies of recomputation, by module path.
        fully_sharded: modules that fsdp is applied to, by path.
        schedules: of parameters, by their first names.
        ops: of the plan.

    Raises:
        ValueError: names both entries and the module.
    """
    for path, policy in compiled.items():
        reasons = (
            *_of_other_policies(path, recomputed, fully_sharded),
            *_of_phases(path, schedules),
            *_of_operations(path, ops),
        )
        for reason in reasons:
            raise ValueError(
                f"{policy.description}: expected modules that run as one graph, got {_name(path)}, "
                f"{reason}; compile other modules, or leave one of the entries out"
            )


def _of_other_policies(
    path: str, recomputed: Mapping[str, ModulePolicy], fully_sharded: Mapping[str, FullyShard]
) -> Iterator[str]:
    for inner, sharded in fully_sharded.items():
        if inner != path and is_inside(inner, path):
            yield f"in which fully_shard gathers {inner}: {sharded.description}"
    for outer, policy in recomputed.items():
        if outer != path and is_inside(path, outer) and policy.value == "selective-op":
            yield (
                f"whose operators the recomputation of {_name(outer)} has to see: "
                f"{policy.description}"
            )


def _of_phases(path: str, schedules: Mapping[str, Schedule]) -> Iterator[str]:
    for name, schedule in schedules.items():
        module = name.rpartition(".")[0]
        if schedule.has_phases and module != path and is_inside(module, path):
            yield f"in which {name} is gathered, as {', '.join(schedule.lines)} says"


# By what is done in a module: why it cannot be in a graph.
_NO_GRAPH = {
    OpKind.CONTEXT: "sends keys and values",
    OpKind.DISPATCH: "sends numbers of tokens that depend on values",
}


def _of_operations(path: str, ops: Sequence[Op]) -> Iterator[str]:
    for op in ops:
        if op.kind in _NO_GRAPH and is_inside(op.path, path):
            yield f"in which {op.path} {_NO_GRAPH[op.kind]}: {op.entry.description}"
        if op.path == path and op.hook_point is HookPoint.OPERATOR:
            yield f"whose own calls of functions the plan places: {op.entry.description}"


def _check_forward(policy: ModulePolicy, name: str, module: nn.Module) -> None:
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        inner = next((f"{name}.{child}" for child, _ in module.named_children()), name)
        raise ValueError(
            f"{policy.description}: expected modules with a forward, got {_name(name)}, a "
            f"{type(module).__name__}, whose modules are called one by one; name those, as in "
            f"{_pattern(inner)}"
        )


def _name(path: str) -> str:
    return path or "the model"


def _pattern(path: str) -> str:
    return path_code(generalize_numbers(path))
