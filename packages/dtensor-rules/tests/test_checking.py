"""The checking mode finds what it is for."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import dtensor_rules
from dtensor_rules import Plan, Rule
from testkit import fake_mesh


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setenv("DTENSOR_RULES_CHECK", "1")
    dtensor_rules.disable()
    with fake_mesh((2,)) as mesh, dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        yield mesh


@pytest.fixture
def wrong():
    """Registers a rule for `neg` whose result is said to be this."""

    def register(placement=None, shape=None, op="aten.neg.default"):
        def says_otherwise(call):
            meta = call.specs[0].tensor_meta
            meta = TensorMeta(torch.Size(shape or meta.shape), meta.stride, meta.dtype)
            placements = call.specs[0].placements if placement is None else (placement,)
            spec = DTensorSpec(call.specs[0].mesh, placements, tensor_meta=meta)
            return Plan(outputs=[lambda local: spec])  # unlike a spec, not compared with `local`

        dtensor_rules.register_rule(Rule(op, says_otherwise, name="wrong"))

    yield register
    dtensor_rules.remove_rule("wrong")


def test_right_calls_pass_and_are_made_both_ways(mesh):
    whole = torch.arange(8.0).reshape(4, 2)
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    y = (torch.neg(x) + 1).t() @ x
    assert y.placements == (Partial(),)
    x.add_(x)
    assert torch.equal(x.to_local(), 2 * torch.arange(4.0).reshape(2, 2))  # once, not twice
    assert torch.split(x, 1, dim=1)[1].shape == (4, 1)
    stats = dtensor_rules.stats()
    assert stats["aten.neg.default"].miss == 1
    assert stats["aten.neg.default"].fallthrough == {"checking": 1}
    assert stats["aten.add_.Tensor"].fallthrough == {"checking": 1}


def test_every_call_is_checked_and_every_result_is_in_its_place(mesh):
    whole = torch.arange(8.0).reshape(4, 2)
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    for _ in range(3):
        torch.neg(x)
        results = torch.native_layer_norm(x, [2], None, None, 1e-5)
        assert [one.shape for one in results] == [(4, 2), (4, 1), (4, 1)]
        wanted = torch.native_layer_norm(x.to_local(), [2], None, None, 1e-5)
        for one, other in zip(results, wanted, strict=True):
            assert torch.equal(one.to_local(), other)
    for name in ("neg", "native_layer_norm"):
        assert dtensor_rules.stats()[f"aten.{name}.default"].fallthrough == {"checking": 3}


def test_a_rule_with_a_wrong_placement_is_caught(mesh, wrong):
    wrong(placement=Replicate())
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"aten\.neg\.default: result 0 has placements \(Repl"):
        torch.neg(x)


def test_a_rule_with_a_wrong_shape_is_caught(mesh, wrong):
    wrong(shape=(5,))
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"global shape \(5,\) where torch has \(4,\)"):
        torch.neg(x)


def test_a_rule_that_torch_has_no_answer_beside_is_held_to_its_own_word(mesh, wrong):
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="renorm"):
        torch.renorm(x, 2, 0, 1.0)
    wrong(op="aten.renorm.default")
    assert torch.renorm(x, 2, 0, 1.0).placements == (Shard(0),)
    dtensor_rules.remove_rule("wrong")
    wrong(placement=Replicate(), op="aten.renorm.default")
    message = r"renorm.*result 0: its local tensor has shape \(2, 2\).*is \(4, 2\) on this rank"
    with pytest.raises(RuntimeError, match=message):
        torch.renorm(x, 2, 0, 1.0)


def test_a_local_tensor_that_belies_its_spec_is_named(mesh):
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    meta = TensorMeta(torch.Size((6, 2)), (2, 1), torch.float32)
    liar = DTensor(
        x.to_local(), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False
    )
    with pytest.raises(
        RuntimeError, match=r"argument 'other': its local tensor has shape \(2, 2\)"
    ):
        torch.mul(liar.to_local().new_ones(()), liar)


def test_torchs_own_errors_stay_torchs(mesh):
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        torch.mul(x, torch.ones(4, 2))


def test_a_variable_that_is_no_switch_is_refused(monkeypatch):
    dtensor_rules.disable()
    monkeypatch.setenv("DTENSOR_RULES_CHECK", "yes")
    with pytest.raises(ValueError, match="DTENSOR_RULES_CHECK='yes' must be 1"):
        dtensor_rules.enable()
    assert not dtensor_rules.is_enabled()


def test_uninitialized_memory_has_no_values_to_compare(mesh):
    x = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0)], run_check=False)
    for fill in (1.0, 2.0):  # of memory that the next results are likely to get
        torch.full((4, 6), fill)
        for _ in range(3):
            torch.empty_like(x)
            x.new_empty((8, 6))
            x.new_empty_strided((8, 6), (6, 1))
    # The gradient of a leaf that is expanded is copied into a new_empty_strided.
    leaf = x.clone().requires_grad_()
    (leaf + 1.0).sum().backward()
    assert leaf.grad.shape == leaf.shape


def test_what_uninitialized_results_are_is_compared(mesh, wrong):
    wrong(placement=Replicate(), op="aten.empty_like.default")
    x = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0)], run_check=False)
    with pytest.raises(RuntimeError, match=r"aten.empty_like.default: result 0 has placements"):
        torch.empty_like(x)
