"""What results are is inferred once for all placements, on fake tensors that are made once."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, _op_schema
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.fx.experimental.proxy_tensor import make_fx

import dtensor_rules
from dtensor_rules.planning import inference
from testkit import fake_mesh


@pytest.fixture
def spec():
    with fake_mesh((2,)) as mesh, dtensor_rules.enabled():
        meta = TensorMeta(torch.Size((4, 6)), (6, 1), torch.float32)
        yield DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)


def rebuilt(spec):
    return _op_schema._rebuild_tensor_from_dtensor_meta(spec)


def test_equal_arguments_are_one_fake_tensor(spec):
    with inference.mode():
        first = rebuilt(spec)
        assert isinstance(first, FakeTensor)
        assert (first.shape, first.stride(), first.dtype) == spec.tensor_meta
        sharded = DTensorSpec(spec.mesh, (Shard(0),), tensor_meta=spec.tensor_meta)
        assert rebuilt(sharded) is first
        other = spec.tensor_meta._replace(dtype=torch.bfloat16)
        assert rebuilt(DTensorSpec(spec.mesh, (Shard(0),), tensor_meta=other)) is not first


def test_a_tensor_that_an_operator_has_reshaped_is_made_again(spec):
    with inference.mode():
        first = rebuilt(spec)
        first.t_()
        second = rebuilt(spec)
    assert first.shape == (6, 4)
    assert second.shape == (4, 6)


def test_under_another_mode_torch_makes_its_own(spec):
    with FakeTensorMode():
        first = rebuilt(spec)
        assert rebuilt(spec) is not first
    with inference.mode():
        assert rebuilt(spec) is not first


def test_few_are_kept(spec, monkeypatch):
    monkeypatch.setattr(inference, "_MOST_TENSORS", 3)
    with inference.mode():
        for rows in range(1, 6):
            meta = spec.tensor_meta._replace(shape=torch.Size((rows, 6)))
            rebuilt(DTensorSpec(spec.mesh, (Replicate(),), tensor_meta=meta))
            assert len(inference._thread.tensors) <= 3


def test_disable_drops_them(spec):
    with inference.mode():
        rebuilt(spec)
    dtensor_rules.disable()
    assert not inference._thread.tensors
    assert not inference._results
    assert inference._thread.mode is None


def inferred(op, *args):
    propagator = DTensor._op_dispatcher.sharding_propagator
    return propagator._propagate_tensor_meta_non_cached(OpSchema(op, args, {}))


def test_calls_that_differ_in_placements_alone_are_inferred_once(spec):
    aten = torch.ops.aten
    sharded = DTensorSpec(spec.mesh, (Shard(0),), tensor_meta=spec.tensor_meta)
    first = inferred(aten.mul.Tensor, spec, 2)
    assert inferred(aten.mul.Tensor, sharded, 2) is first
    assert len(inference._results) == 1
    assert first == (spec.shape, (6, 1), torch.float32)
    both = inferred(aten.split.Tensor, spec, 2, 1)
    assert isinstance(both, (tuple, list))
    assert [meta.shape for meta in both] == [(4, 2)] * 3


def test_numbers_that_are_equal_but_of_other_types_are_other_calls(spec):
    integers = spec.tensor_meta._replace(dtype=torch.int64)
    count = DTensorSpec(spec.mesh, (Replicate(),), tensor_meta=integers)
    by = {factor: inferred(torch.ops.aten.mul.Tensor, count, factor).dtype for factor in (2, True)}
    assert inferred(torch.ops.aten.mul.Tensor, count, 2.0).dtype is torch.float32
    assert by == {2: torch.int64, True: torch.int64}
    torch.set_default_dtype(torch.float64)
    try:
        assert inferred(torch.ops.aten.mul.Tensor, count, 2.0).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_cannot_be_compared_is_inferred_by_torch_each_time(spec):
    class Size(int):
        pass

    assert inferred(torch.ops.aten.mul.Tensor, spec, Size(2)).shape == (4, 6)
    assert not inference._results


def test_results_are_bounded(spec, monkeypatch):
    monkeypatch.setattr(inference, "_MOST_RESULTS", 3)
    for factor in range(6):
        inferred(torch.ops.aten.mul.Tensor, spec, factor)
        assert len(inference._results) <= 3


aten = torch.ops.aten
ON_META = {
    "view": (aten.view.default, [(4, 6)], ([2, 12],)),
    "t": (aten.t.default, [(4, 6)], ()),
    "transpose": (aten.transpose.int, [(4, 6, 2)], (0, -1)),
    "permute": (aten.permute.default, [(4, 6, 2)], ([2, 0, 1],)),
    "expand": (aten.expand.default, [(4, 1)], ([3, 4, 6],)),
    "slice": (aten.slice.Tensor, [(4, 6)], (1, 1, 5, 2)),
    "select": (aten.select.int, [(4, 6)], (1, -1)),
    "unsqueeze": (aten.unsqueeze.default, [(4, 6)], (1,)),
    "squeeze": (aten.squeeze.dims, [(4, 1, 6)], ([1],)),
    "split": (aten.split.Tensor, [(5, 6)], (2,)),
    "split_with_sizes": (aten.split_with_sizes.default, [(5, 6)], ([2, 3],)),
    "unbind": (aten.unbind.int, [(3, 6)], (1,)),
    "detach": (aten.detach.default, [(4, 6)], ()),
    "diagonal": (aten.diagonal.default, [(4, 6)], ()),
    "_unsafe_view": (aten._unsafe_view.default, [(4, 6)], ([24],)),
    "clone": (aten.clone.default, [(4, 6)], ()),
    "mm": (aten.mm.default, [(4, 6), (6, 3)], ()),
    "bmm": (aten.bmm.default, [(2, 4, 6), (2, 6, 3)], ()),
    "addmm": (aten.addmm.default, [(3,), (4, 6), (6, 3)], ()),
}


# Not by columns: a vector has one layout, and these two refuse another.
LAYOUTS = [(name, False) for name in ON_META] + [
    (name, True) for name in ON_META if name not in ("addmm", "view", "_unsafe_view")
]


@pytest.mark.parametrize(("name", "columns"), LAYOUTS)
def test_meta_tensors_give_what_fake_tensors_give(name, columns, spec):
    op, shapes, rest = ON_META[name]
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    if columns:
        tensors = [tensor.mT.contiguous().mT for tensor in tensors]
    metas = [TensorMeta(one.shape, one.stride(), one.dtype) for one in tensors]
    specs = [DTensorSpec(spec.mesh, (Replicate(),), tensor_meta=meta) for meta in metas]
    propagator = DTensor._op_dispatcher.sharding_propagator
    of_torch = type(propagator)._propagate_tensor_meta_non_cached
    expected = of_torch(propagator, OpSchema(op, (*specs, *rest), {}))
    assert op.is_view or op in inference._NATIVE
    got = inferred(op, *specs, *rest)
    assert (type(got), got) == (type(expected), expected)


def test_a_compiler_that_traces_sees_no_meta_tensors(spec):
    propagator = DTensor._op_dispatcher.sharding_propagator
    of_torch = type(propagator)._propagate_tensor_meta_non_cached

    def recorded(infer):
        def traced(x):
            with_view = OpSchema(aten.view.default, (spec, [2, 12]), {})
            assert infer(with_view).shape == (2, 12)
            return x + 1

        graph = make_fx(traced, tracing_mode="fake")(torch.ones(3)).graph
        return [node.target for node in graph.nodes if node.op == "call_function"]

    expected = recorded(lambda schema: of_torch(propagator, schema))  # 2.11 records its own
    assert recorded(propagator._propagate_tensor_meta_non_cached) == expected
    assert len(inference._results) == 1


def test_clearing_the_cache_of_plans_clears_results_too(spec):
    inferred(aten.mul.Tensor, spec, 2)
    dtensor_rules.cache_clear()
    assert not inference._results
