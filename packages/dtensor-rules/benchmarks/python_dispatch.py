"""Rules and the cache in Python, for the ablation: what the library does before C++ does it.

Every call still reaches the library's kernels, which hand it to a Python function in the place of
the checking mode's. That costs a boxed call and the Python arguments, as `__torch_dispatch__` does.
"""

import contextlib

from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

import dtensor_rules
from dtensor_rules import _core
from dtensor_rules.inspect import reference
from dtensor_rules.planning import planner
from dtensor_rules.registry import table
from dtensor_rules.registry.pattern import is_in_place
from dtensor_rules.registry.rule import Call


@contextlib.contextmanager
def in_python(*, cached):
    """Sends DTensor operators through Python: rules, and with `cached` every plan by its key.

    `DTensor.redistribute`, `from_local` and `to_local` are torch's.
    """
    plans = {} if cached else None
    with dtensor_rules.enabled():
        _core.set_methods_on(False)
        _core.set_checker(lambda op, args, kwargs: _dispatch(plans, op, args, kwargs))
        try:
            yield
        finally:
            _core.set_checker(None)
            _core.set_methods_on(True)


def _dispatch(plans, op, args, kwargs):
    plan = _rule(op, args, kwargs) if plans is None else _cached(plans, op, args, kwargs)
    if plan is None or plan.reason:
        before = _core.set_path(_core.Path.TORCH)
        try:
            return op(*args, **kwargs)
        finally:
            _core.set_path(before)
    return _execute(plan, op, args, kwargs)


def _rule(op, args, kwargs):
    """The plan of the first rule that matches; None where torch propagates, by its own cache."""
    try:
        return table.match(Call(op, args, kwargs))
    except Exception:  # torch meets it as well, and words it
        return None


def _cached(plans, op, args, kwargs):
    try:
        key = (op, *reference.key_words(op, 0, _written_out(op, args, kwargs)))
    except TypeError:  # an argument that no key can hold
        return None
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = planner.plan(op, args, kwargs)
    return plan


def _written_out(op, args, kwargs):
    """A value for each argument of the schema, defaults included."""
    rest = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(a.name, a.default_value) for a in rest)]


def _execute(plan, op, args, kwargs):
    values = [_local(value) for value in args]
    for move in plan.moves:
        apply = getattr(move.transform, "apply", move.transform)
        if move.element < 0:
            values[move.argument] = apply(values[move.argument])
        else:
            values[move.argument][move.element] = apply(values[move.argument][move.element])
    for index, value in plan.values.items():
        values[index] = value
    if plan.instead is not None:
        values = values[: len(plan.instead._schema.arguments)]
    result = (plan.instead or op)(*values, **{name: _local(v) for name, v in kwargs.items()})
    if is_in_place(op):
        return args[0]
    if plan.finish is not None:
        return plan.finish(result) if callable(plan.finish) else result
    if len(op._schema.returns) == 1:
        result = _wrapped(result, plan.outputs[0])
    else:
        result = tuple(map(_wrapped, result, plan.outputs))
    return return_and_correct_aliasing(op, args, kwargs, result) if op.is_view else result


def _local(value):
    return pytree.tree_map_only(DTensor, lambda tensor: tensor._local_tensor, value)


def _wrapped(local, spec):
    if spec is None or local is None:
        return local
    if isinstance(spec, list):
        return [_wrapped(one, its) for one, its in zip(local, spec, strict=True)]
    spec = spec(local) if callable(spec) else spec
    return DTensor(local, spec, requires_grad=False)
