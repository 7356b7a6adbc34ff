"""Operators of users with `register_sharding`, and `local_map`: as with torch alone, on real ranks.

That a new registration takes effect at once is in test_patches.py.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map, register_sharding

import dtensor_rules
from testkit import assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks

NAMESPACE = "dtensor_rules_customs"
R, S0, S1 = Replicate(), Shard(0), Shard(1)

# Per operator: its schema, what it does, and the shardings that it accepts on one axis, as
# register_sharding takes them: placements of the results, then of the arguments.
OPERATORS = {
    "shift": (
        "(Tensor x, float by, *, Tensor? bias=None, str mode='plus') -> Tensor",
        lambda x, by, *, bias=None, mode="plus": x + by + (0 if bias is None else bias),
        lambda x, by, *, bias=None, mode="plus": [
            ([p], [p, None, None if bias is None else p]) for p in (R, S0, S1)
        ],
    ),
    "halves": (
        "(Tensor x, int dim) -> (Tensor, Tensor)",
        lambda x, dim: (x * 0.5, x.sum(dim)),
        # Sharded on the dim that is summed over, the second result is a partial sum.
        lambda x, dim: [([R, R], [R, None]), ([Shard(dim), Partial()], [Shard(dim), None])],
    ),
    "joined": (
        "(Tensor[] xs, Tensor last, int times=1) -> Tensor",
        lambda xs, last, times=1: torch.cat([*xs, last], 1) * times,
        lambda xs, last, times=1: [([p], [p] * (len(xs) + 1) + [None]) for p in (R, S0)],
    ),
    "listed": (
        "(Tensor x, int count) -> Tensor[]",
        lambda x, count: [x * index for index in range(count)],
        lambda x, count: [([p], [p, None]) for p in (R, S0)],
    ),
    "written_": (
        "(Tensor(a!) x, Tensor y) -> Tensor(a!)",
        lambda x, y: x.add_(y, alpha=3),
        lambda x, y: [([p], [p, p]) for p in (R, S0, S1)],
    ),
    "filled": (
        "(Tensor(a!) x, Tensor y) -> ()",
        lambda x, y: [x.copy_(y), None][1],
        lambda x, y: [([], [p, p]) for p in (R, S0, S1)],
    ),
}


def define():
    """Defines the operators in this process, once, and registers how they are sharded."""
    for name, (schema, implementation, sharding) in OPERATORS.items():
        qualified = f"{NAMESPACE}::{name}"
        if not hasattr(getattr(torch.ops, NAMESPACE), name):
            torch.library.define(qualified, schema)
            torch.library.impl(qualified, "CompositeExplicitAutograd")(implementation)
            torch.library.register_fake(qualified)(implementation)
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        register_sharding(op)(sharding)


def call(name, *args, **kwargs):
    return getattr(getattr(torch.ops, NAMESPACE), name)(*args, **kwargs)


def placed(mesh, placement, factor=1.0):
    return distribute_tensor(torch.arange(48.0).view(6, 8) * factor, mesh, [placement])


def written(mesh, name, x, y):
    x, y = placed(mesh, x), placed(mesh, y, 2.0)
    return [call(name, x, y), x]


CASES = {
    "shift": lambda m: call("shift", placed(m, S0), 2.0),
    "shift of another number": lambda m: call("shift", placed(m, S0), 3.0),
    "shift by a keyword tensor": lambda m: call(
        "shift", placed(m, S1), 1.0, bias=placed(m, S1), mode="plus"
    ),
    # Torch moves no keyword arguments: what comes out is what torch makes of it.
    "shift by a replica": lambda m: call("shift", placed(m, S0), 1.0, bias=placed(m, R)),
    "shift in another mode": lambda m: call("shift", placed(m, S0), 2.0, mode="other"),
    "two results": lambda m: call("halves", placed(m, S0), 0),
    "two results, redistributed": lambda m: call("halves", placed(m, S0), 1),
    "two results of a sum": lambda m: call("halves", placed(m, S1) @ placed(m, S0).t(), 1),
    "list": lambda m: call("joined", [placed(m, S0), placed(m, S0)], placed(m, S0)),
    "list of unlike": lambda m: call("joined", [placed(m, S0), placed(m, R)], placed(m, S1), 2),
    "list of one": lambda m: call("joined", [placed(m, R)], placed(m, R), 2),
    "list as result": lambda m: call("listed", placed(m, S0), 2),
    "in place": lambda m: written(m, "written_", S0, S0),
    "in place, redistributed": lambda m: written(m, "written_", S0, R),
    "without a result": lambda m: written(m, "filled", S0, S0),
}
# Calls that torch refuses.
REFUSED = {"shift by a replica", "list as result"}


def seen(result):
    """What is compared: local tensors, and what can be seen of the DTensors around them."""
    if isinstance(result, (list, tuple)):
        return [one for item in result for one in seen(item)]
    if not isinstance(result, DTensor):
        return [result]
    about = (result.shape, result.stride(), result.requires_grad, result.is_leaf, result._version)
    return [result.to_local().detach().clone(), (*about, result._spec)]


def outcome(function, *args):
    try:
        return seen(function(*args))
    except Exception as error:
        return [type(error), str(error)]


def both(functions, prepare=lambda: None):
    """Compares functions of a mesh; per function, torch's error if any, and our counts."""
    prepare()
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, function in functions.items():
        dtensor_rules.disable()
        native = outcome(function, mesh)
        with dtensor_rules.enabled():
            actual = [outcome(function, mesh) for _ in range(2)]
            dtensor_rules.stats_clear()
            actual.append(outcome(function, mesh))
            error = native[0] if isinstance(native[0], type) else None
            found[name] = (error, dtensor_rules.stats())
        for index, result in enumerate(actual):
            assert_same(result, native, f"{name}, call {index}")
    return found


def assert_same(actual, expected, what):
    assert len(actual) == len(expected), (what, actual, expected)
    for got, want in zip(actual, expected, strict=True):
        if isinstance(want, torch.Tensor):
            assert_bitwise(got, want, what)
        else:
            assert got == want, what


def test_operators_with_registered_sharding():
    for results in run_ranks(both, 2, CASES, define):
        for name, (error, stats) in results.items():
            counts = next(one for op, one in stats.items() if op.startswith(NAMESPACE))
            assert error is (RuntimeError if name in REFUSED else None), name
            if error is None:
                assert (counts.rule + counts.cache, counts.miss) == (1, 0), name
                assert counts.fallthrough == {}, name


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return call("shift", x, by)

    @staticmethod
    def backward(ctx, grad):
        return call("shift", grad, ctx.by), None


def differentiated(mesh):
    x = placed(mesh, S0).requires_grad_()
    result = _Scaled.apply(x, 2.0)
    result.sum().backward()
    return [result, x.grad]


def regions():
    """Functions of a mesh with a `local_map` region in them."""
    product = local_map(torch.mm, out_placements=[Partial()], in_placements=([S1], [S0]))
    moved = local_map(torch.mm, [S0], ([S0], [R]), redistribute_inputs=True)
    graded = local_map(torch.mm, [S0], ([S0], [R]), in_grad_placements=([S0], [Partial()]))
    several = local_map(lambda x, n: (x * n, x + 1, n + 1), ([S0], [S0], None), ([S0], None))

    def trained(region, left, right):
        def run(mesh):
            x, w = placed(mesh, left).requires_grad_(), placed(mesh, right).detach().t()
            w = w.contiguous().requires_grad_()
            result = region(x * 0.5, w) * 2
            whole = result.redistribute(placements=[R])
            (whole * whole).sum().backward()
            return [result, whole, x.grad, w.grad]

        return run

    return {
        "partial product": trained(product, S1, S1),
        "redistributed": trained(moved, S1, S1),
        "gradients placed": trained(graded, S0, R),
        "several results": lambda mesh: list(several(placed(mesh, S0), 3)),
        "wrongly placed": lambda mesh: product(placed(mesh, S0), placed(mesh, S0)),
        "a custom operator with a gradient": differentiated,
    }


def test_local_map_regions_and_functions_with_gradients():
    for results in run_ranks(lambda: both(regions(), define), 2):
        for name, (error, stats) in results.items():
            if name == "wrongly placed":
                assert error is ValueError
                continue
            assert error is None, name
            assert {op: one.miss for op, one in stats.items() if one.miss} == {}, name
            assert {op: one.fallthrough for op, one in stats.items() if one.fallthrough} == {}, name
            assert sum(one.rule + one.cache for one in stats.values()) > 2
