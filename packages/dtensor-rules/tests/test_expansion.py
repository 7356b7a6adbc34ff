"""The decisions on several mesh axes are torch's, though most candidates are never built."""

import contextlib
import itertools
import sys
import types

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor._sharding_prop import _select_min_cost_strategy
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _StridedShard

import dtensor_rules
from dtensor_rules import _compat
from dtensor_rules.planning import expansion
from testkit import fake_mesh
from testkit.mesh import clear_redistribution_caches

aten = torch.ops.aten
R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
STRIDED = _StridedShard(0, split_factor=2)

# Operators whose strategies torch gives for one mesh axis, with the shapes of their tensors.
X, ROW = (8, 16), (16,)
OPERATORS = {
    "mm": (aten.mm.default, [(8, 16), (16, 32)], ()),
    "bmm": (aten.bmm.default, [(8, 4, 16), (8, 16, 8)], ()),
    "addmm": (aten.addmm.default, [(32,), (8, 16), (16, 32)], ()),
    "add": (aten.add.Tensor, [X, X], ()),
    "mul broadcast": (aten.mul.Tensor, [X, ROW], ()),
    "add_": (aten.add_.Tensor, [X, X], ()),
    "gelu": (aten.gelu.default, [X], ()),
    "softmax": (aten._softmax.default, [X], (-1, False)),
    "where": (aten.where.self, [(*X, "bool"), X, X], ()),
    "embedding": (aten.embedding.default, [(32, 16), (8, 16, "int64")], ()),
    "threshold backward": (aten.threshold_backward.default, [X, X], (0,)),
}


@pytest.fixture(autouse=True)
def no_cached_plans():
    yield
    clear_redistribution_caches()


def spec(mesh, shape, placements, *, strided_is_order=False):
    dtype = getattr(torch, shape[-1]) if isinstance(shape[-1], str) else torch.float32
    shape = torch.Size(dims_of(shape))
    stride = torch.empty(shape, device="meta").stride()
    flag = {"use_strided_shard_as_shard_order": strided_is_order} if STRIDED in placements else {}
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype), **flag)


def decision(op, args, **kwargs):
    """What torch's propagation makes of a call, in words; its error where it makes none."""
    clear_redistribution_caches()
    schema = OpSchema(op, args, kwargs, schema_info=_compat.schema_info(op))
    propagator = DTensor._op_dispatcher.sharding_propagator
    try:
        made = propagator.propagate_op_sharding_non_cached(schema)
    except Exception as error:
        return type(error).__name__, str(error)
    moved = made.redistribute_schema
    return str(made.output_spec), None if moved is None else str(moved.args_schema)


class SearchTooLongError(BaseException):
    """Raised out of torch's planning, past what torch catches."""


@contextlib.contextmanager
def search_limit(states):
    """Stops torch's graph searches after so many states; a time would depend on the machine."""
    planner, counted = _redistribute.DTensorRedistributePlanner, itertools.count(1)
    native = planner.get_next_state

    def next_state(self, *args):
        if next(counted) > states:
            raise SearchTooLongError
        return native(self, *args)

    planner.get_next_state = next_state
    try:
        yield
    finally:
        planner.get_next_state = native


def both(op, args, **kwargs):
    """Torch's decision about a call, and that with the library."""
    native = decision(op, args, **kwargs)
    with dtensor_rules.enabled():
        return native, decision(op, args, **kwargs)


def placements_of(shape):
    """The placements that a tensor of a shape can have on a mesh axis."""
    return [R, P, S0, STRIDED] + [S1] * (len(dims_of(shape)) > 1)


def dims_of(shape):
    return [size for size in shape if isinstance(size, int)]


@st.composite
def calls(draw, mesh_shapes):
    shape = draw(st.sampled_from(mesh_shapes))
    op, shapes, rest = OPERATORS[draw(st.sampled_from(sorted(OPERATORS)))]
    placed = [
        draw(st.tuples(*[st.sampled_from(placements_of(each))] * len(shape))) for each in shapes
    ]
    return shape, op, shapes, placed, rest, draw(st.booleans())


def assert_decision_is_torchs(call):
    shape, op, shapes, placed, rest, strided_is_order = call
    with fake_mesh(shape) as mesh:
        args = [
            spec(mesh, shape, placements, strided_is_order=strided_is_order)
            for shape, placements in zip(shapes, placed, strict=True)
        ]
        try:
            with search_limit(500):
                native = decision(op, (*args, *rest))
        except SearchTooLongError:
            native = None
        assume(native is not None)  # torch's search takes too long
        # Torch asks for the costs of all candidates, and fails where one of them has none.
        assume("No path found" not in str(native))
        with dtensor_rules.enabled():
            assert decision(op, (*args, *rest)) == native


SEARCHING = settings(
    deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


@settings(SEARCHING, max_examples=25)
@given(call=calls([(4,), (2, 2)]))
def test_decisions_are_torchs(call):
    assert_decision_is_torchs(call)


@pytest.mark.slow
@settings(SEARCHING, max_examples=80)
@given(call=calls([(4,), (2, 2), (2, 4), (2, 2, 2)]))
def test_many_decisions_are_torchs(call):
    assert_decision_is_torchs(call)


@pytest.mark.parametrize(
    ("name", "every_nth"),
    [
        ("mm", 4),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("mm", "add")),
        ("mul broadcast", 1),
        ("where", 1),
    ],
)
def test_pairs_of_placements_on_two_axes(name, every_nth):
    op, shapes, rest = OPERATORS[name]
    first, *others = shapes
    every = [
        itertools.product([one for one in placements_of(shape) if one != STRIDED], repeat=2)
        for shape in (first, others[0])
    ]
    with fake_mesh((2, 4)) as mesh:
        calls = [
            (spec(mesh, first, one), *(spec(mesh, shape, other) for shape in others), *rest)
            for one, other in itertools.islice(itertools.product(*every), 0, None, every_nth)
        ]
        native = [decision(op, args) for args in calls]
        with dtensor_rules.enabled():
            for args, expected in zip(calls, native, strict=True):
                assert decision(op, args) == expected, args


def test_a_replicated_axis_is_sharded_where_that_makes_the_other_cheaper():
    """Torch's choice costs 144 us here; to move the second axis alone would cost 167."""
    with fake_mesh((2, 4)) as mesh:
        args = spec(mesh, (1024, 1024), (R, P)), spec(mesh, (1024, 1024), (R, S1))
        native, planned = both(aten.mm.default, args)
    assert planned == native
    assert "placements=(Shard(dim=0), Shard(dim=1))" in planned[1]
    assert "placements=(Replicate(), Shard(dim=0))" in planned[1]


def strategy(spec):
    return OpStrategy([OpSpec(spec)])


def expanded(mesh, op, inputs, rows, *, by, **options):
    schema = OpSchema(op, tuple(map(strategy, inputs)), {})
    return by(mesh, schema, rows, **options)


def rules(mesh, op, inputs, rows, **options):
    """Which of torch's candidates both of its choices take, from all and from those of `expand`."""
    schema, chosen = OpSchema(op, tuple(inputs), {}), []
    for by in (_compat.expand_to_full_mesh, expansion.expand):
        made = expanded(mesh, op, inputs, rows, by=by, **options)
        chosen.append([str(_select_min_cost_strategy(made, one)) for one in (schema, None)])
    assert chosen[0] == chosen[1]
    return chosen[1]


def test_where_nothing_moves_the_last_of_equals_is_taken():
    with fake_mesh((2, 2)) as mesh:
        rows, inputs = [[R, R], [S0, R], [P, R], [S1, S1]], [spec(mesh, X, (R, R))]
        made = expanded(mesh, aten.neg.default, inputs, rows, by=expansion.expand)
        assert made.strategies[-1].output_specs.placements == (P, P)
        rules(mesh, aten.neg.default, inputs, rows)


def test_of_what_costs_nothing_the_first_is_taken():
    with fake_mesh((2, 2)) as mesh:
        rows = [[S1, S1], [S0, S0], [P, S1]]
        rules(mesh, aten.neg.default, [spec(mesh, X, (R, R))], rows)
        made = expanded(mesh, aten.neg.default, [spec(mesh, X, (R, R))], rows, by=expansion.expand)
        (only,) = made.strategies
        assert only.output_specs.placements == (S1, S1)


def test_of_equally_cheap_ones_the_first_is_taken():
    with fake_mesh((2, 2)) as mesh:
        rows = [[P, R], [S1, R], [R, R]]
        made = expanded(
            mesh, aten.neg.default, [spec(mesh, X, (S0, S0))], rows, by=expansion.expand
        )
        (only,) = made.strategies
        assert only.output_specs.placements == (P, P)
        rules(mesh, aten.neg.default, [spec(mesh, X, (S0, S0))], rows)


def test_lists_of_tensors_take_the_first_of_the_cheapest_also_where_it_moves():
    with fake_mesh((2, 2)) as mesh:
        inputs = [spec(mesh, X, (R, R))]
        single, element = rules(mesh, aten.neg.default, inputs, [[S0, S0], [R, R]])
        assert single != element
        lists = [[spec(mesh, X, (R, S0)), spec(mesh, ROW, (S0, R))]] * 2
        native, planned = both(aten._foreach_add.List, tuple(lists))
    assert planned == native


def test_at_most_two_candidates_are_built():
    with fake_mesh((2, 2, 2)) as mesh:
        rows = [[R, R, R], [S0, S0, S0], [S1, S1, S1], [P, P, P]]
        for first, second in [((S0, R, S1), (S0, R, S1)), ((S0, P, S1), (R, S1, S0))]:
            inputs = [spec(mesh, X, first), spec(mesh, X, second)]
            made = expanded(mesh, aten.add.Tensor, inputs, rows, by=expansion.expand)
            assert 1 <= len(made.strategies) <= 2


def test_no_tensor_becomes_partial_in_two_ways():
    with fake_mesh((2, 2)) as mesh:
        rows = [[R, R], [Partial("max"), S0], [P, S1]]
        inputs = [spec(mesh, X, (S0, S1))]
        made = expanded(mesh, aten.neg.default, inputs, rows, by=expansion.expand)
        mixed = (Partial("max"), P)
        found = [one.output_specs.placements for one in made.strategies]
        assert (mixed in found) is not _compat.MIXED_PARTIALS_ARE_REFUSED
        rules(mesh, aten.neg.default, inputs, rows)
        sums = [[R, R], [Partial("avg"), S0], [P, S1]]
        made = expanded(mesh, aten.neg.default, inputs, sums, by=expansion.expand)
        assert (Partial("avg"), P) in [one.output_specs.placements for one in made.strategies]


def test_an_operators_own_condition_is_asked():
    with fake_mesh((2, 2)) as mesh:
        rows, inputs = [[R, R], [S0, S0], [S1, S1]], [spec(mesh, X, (S0, S0))]

        def holds(inputs, output):
            return inputs[0].placements != (S0, S0) and output.placements == inputs[0].placements

        options = {_compat.VALIDITY_OPTION: holds}
        single, _ = rules(mesh, aten.neg.default, inputs, rows, **options)
        free, _ = rules(mesh, aten.neg.default, inputs, rows)
    assert single != free


def test_a_dim_with_fewer_elements_than_shards_is_not_sharded():
    with fake_mesh((2, 4)) as mesh:
        rows, inputs = [[R, R], [S0, S0], [S1, S1]], [spec(mesh, (4, 16), (S0, S0))]
        uneven = {"allow_uneven_sharding": True} if _compat.RELEASE >= (2, 12) else {}
        strict, _ = rules(mesh, aten.neg.default, inputs, rows)
        assert "S(0)[0]S(0)[1]" not in strict
        if uneven:
            assert rules(mesh, aten.neg.default, inputs, rows, **uneven)[0] != strict


def test_what_is_written_in_place_stays_as_it_is():
    with fake_mesh((2, 2)) as mesh:
        args = spec(mesh, X, (S0, R)), spec(mesh, X, (S1, S0))
        native, planned = both(aten.add_.Tensor, args)
        assert planned == native
        assert "placements=(Shard(dim=0), Replicate())" in planned[1]
        # The first row would cost nothing, and its result is placed as the input is.
        rows, inputs = [[R, S0, P], [R, R, R]], [spec(mesh, X, (R, R)), spec(mesh, X, (P, P))]
        single, _ = rules(mesh, aten.add_.Tensor, inputs, rows, inplace_op=True)
        assert "RR, RR" in single
        partial = spec(mesh, X, (P, R)), spec(mesh, X, (R, R))
        native, planned = both(aten.mul_.Tensor, partial)
        assert planned == native


def test_what_out_is_has_its_placements():
    with fake_mesh((2, 2)) as mesh:
        x, out = spec(mesh, X, (S0, R)), spec(mesh, X, (R, S1))
        native = decision(aten.neg.out, (x,), out=out)
        with dtensor_rules.enabled():
            assert decision(aten.neg.out, (x,), out=out) == native


def test_torch_answers_where_sizes_are_symbols():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = ShapeEnv().create_unbacked_symint()
    with fake_mesh((2,)) as mesh:
        meta = TensorMeta(torch.Size((8, 16)), (16, 1), torch.float32)._replace(shape=(size, 16))
        inputs = [DTensorSpec(mesh, (R,), tensor_meta=meta)]
        made = expanded(mesh, aten.neg.default, inputs, [[R, R], [P, R]], by=expansion.expand)
        assert len(made.strategies) == 2  # all of them


def test_torchs_error_where_no_candidate_holds():
    with fake_mesh((2, 2)) as mesh:
        native, planned = both(aten.relu_.default, (spec(mesh, X, (P, R)),))
        assert planned == native
        refused = _compat.RELEASE >= (2, 12)  # 2.11 makes a sum of it
        assert (native[0] == "RuntimeError") is refused


def test_operators_of_users_are_planned_by_it():
    with torch.library._scoped_library("expansion_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        op = torch.ops.expansion_tests.twice.default

        @register_sharding(op)
        def twice(x):
            return [([R], [R]), ([S0], [S0]), ([P], [P])]

        with fake_mesh((2, 2, 2)) as mesh:
            for placements in itertools.product([R, S0, P], repeat=3):
                native, planned = both(op, (spec(mesh, X, placements),))
                assert planned == native
                assert native[1] is None
    with dtensor_rules.enabled():  # without what is defined no longer
        assert op in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs


def test_torchs_function_is_everywhere_again():
    native = _compat.expand_to_full_mesh
    name = native.__name__
    with dtensor_rules.enabled():
        assert getattr(utils, name) is expansion.expand
        late = types.ModuleType("imported_late")
        setattr(late, name, getattr(utils, name))  # as `from ... import` does
        sys.modules[late.__name__] = late
    try:
        having = [m for m in list(sys.modules.values()) if name in getattr(m, "__dict__", {})]
        assert late in having
        assert len(having) >= 3
        assert all(getattr(module, name) is native for module in having)
    finally:
        del sys.modules[late.__name__]


def test_candidates_that_cannot_win_are_not_costed(monkeypatch):
    asked = []
    cost = expansion.CostModel.cost
    monkeypatch.setattr(
        expansion.CostModel, "cost", lambda *args: asked.append(args) or cost(*args)
    )
    rows = [[R, R, R], [S0, S0, R], [S1, R, S1], [P, S1, S0], [P, P, R], [P, R, P]]
    with fake_mesh((2, 2, 2, 2)) as mesh:
        first = spec(mesh, (32, 64), (S0, S0, P, R))
        for second, most in [((R, R, R, R), 200), ((S1, R, R, S0), 700)]:
            asked.clear()
            inputs = [first, spec(mesh, (64, 32), second)]
            made = expanded(mesh, aten.mm.default, inputs, rows, by=expansion.expand)
            assert made.strategies
            assert len(asked) < most < 2 * len(rows) ** 4, len(asked)
