"""Steps within `attention_mask`: packed documents and lengths that ranks do not divide."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from plan_api import (
    AttentionMask,
    Plan,
    UlyssesRing,
    attention_mask,
    lower,
    parallelize,
    zoo,
)
from plan_api.context_parallel import SequenceSharding
from plan_api.context_parallel.batch import current_batch, order_of
from plan_api.context_parallel.reorder import SequenceReorder
from plan_api.lowering.ir import OpKind
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, fake_mesh, models, run_ranks

LENGTH = 13
MASKS = [
    AttentionMask.of_lengths([6, 4, 3]),
    AttentionMask.of_lengths([1, 12]) & AttentionMask(tokens=((0, 12), (2, 13))),
    AttentionMask(causal=True, documents=((0, 8, 13), (0, 3, 13)), window=4),
]
CASES = [
    {"cp_method": "ring", "cp_order": "balanced"},
    {"cp_method": "all-gather", "cp_order": "zigzag"},
    {"cp_method": "ulysses"},
]
OF_GROUPS = [
    {"cp_method": UlyssesRing(2), "cp_order": order}
    for order in ("balanced", "zigzag", "contiguous")
]


def llama():
    return models.llama(attn_implementation="sdpa", num_hidden_layers=2)


def trained(model, mask_of):
    """Returns the losses of a step with each mask, and the last logits.

    Args:
        model: a LLaMA.
        mask_of: returns the arguments of the model for a mask, and what to run the step within.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for mask in MASKS:
        ids = torch.randint(0, models.VOCABULARY, (2, LENGTH), generator=generator)
        labels = ids.where(mask.dense(LENGTH).any(-1)[:, 0], -100)
        arguments, block = mask_of(mask)
        with block:
            out = model(input_ids=ids, labels=labels, **arguments)
            out.loss.backward()
        losses.append(out.loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, out.logits.detach()


@pytest.fixture(scope="module")
def single_device():
    """By masks of queries and keys."""
    return trained(
        llama(), lambda mask: ({"attention_mask": mask.dense(LENGTH)}, torch.enable_grad())
    )


@pytest.mark.parametrize(
    ("ranks", "mode", "cases"),
    [
        (2, "eager", CASES[:1]),
        (2, "static", CASES),
        pytest.param(2, "eager", CASES[1:], marks=pytest.mark.slow),
        pytest.param(4, "eager", CASES[:2], marks=pytest.mark.slow),  # 2 key-value heads
        pytest.param(4, "static", CASES[:2], marks=pytest.mark.slow),
        pytest.param(4, "eager", OF_GROUPS, marks=pytest.mark.slow),
        pytest.param(4, "static", OF_GROUPS[:1], marks=pytest.mark.slow),
    ],
    ids=lambda one: None if isinstance(one, list) else str(one),
)
@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
def test_packed_and_uneven_sequences_train_as_on_one_device(ranks, mode, cases, single_device):
    """Losses, and in Eager logits in the sequence's order, without padding."""

    def check():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        found = []
        for case in cases:
            plan = zoo.llama(mesh, tp=None, cp="cp", **case)
            if mode == "eager":
                plan.sequence("<out:logits>", "cp", order=case.get("cp_order", "contiguous"))
            model = parallelize(llama(), plan, mode=mode)
            losses, logits = trained(model, lambda mask: ({}, attention_mask(mask)))
            found.append((losses, logits.full_tensor() if mode == "eager" else None))
        return found

    expected, expected_logits = single_device
    for found in run_ranks(check, ranks, timeout=120):
        for case, (losses, logits) in zip(cases, found, strict=True):
            assert losses == pytest.approx(expected, abs=1e-5, rel=0), case
            if logits is not None:
                torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 2), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
def test_dropout_of_attention_is_one_devices(shape):
    """In both modes, beside a batch that is sharded too; losses of 3 steps."""
    dropping = models.llama(
        attn_implementation="sdpa", num_hidden_layers=2, attention_dropout=0.3
    ).train()

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        losses = []
        for mode in ("eager", "static"):
            plan = zoo.llama(mesh, tp=None, dp="dp", cp="cp")
            model = parallelize(copy.deepcopy(dropping), plan, mode=mode)
            losses.append(models.train(model, steps=3))
        return losses

    expected = models.train(copy.deepcopy(dropping), steps=3)
    for found in run_ranks(check, shape[0] * shape[1], timeout=120):
        for losses in found:
            assert losses == pytest.approx(expected, abs=1e-5, rel=0)


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
def test_a_recomputed_backward_outside_is_refused():
    def check():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        plan = zoo.llama(mesh, tp=None, cp="cp").recompute(r"model\.layers\.\d+", "full")
        model = parallelize(llama(), plan)
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        with attention_mask(MASKS[0]):
            loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(ValueError, match=r"expected backward within plan_api.attention_mask"):
            loss.backward()

    run_ranks(check, 1)


def test_orders_within_a_block_are_those_of_its_batch():
    mask = AttentionMask.of_lengths([300, 13])
    sharding = SequenceSharding("balanced", 2)
    with attention_mask(mask):
        order = order_of(sharding, 313, "x")
        assert order.length == 313
        assert order != sharding.token_order(313)
        assert order_of(sharding, order.padded_length, "y") == order
        assert order_of(SequenceSharding("contiguous", 2), 313, "x").is_contiguous
        with pytest.raises(ValueError, match=r"y: expected a sequence of 313 .*got 312"):
            order_of(sharding, 312, "y")
        with attention_mask(AttentionMask()):
            assert order_of(sharding, 5, "x").padded_length == 6
    assert current_batch() is None
    with attention_mask(mask), pytest.raises(ValueError, match=r"of 12 tokens.*got 313.*shorten"):
        order_of(sharding, 12, "x")
    with pytest.raises(ValueError, match=r"x: expected .*multiple of 4.*attention_mask\(mask\)"):
        order_of(sharding, 313, "x")


@pytest.mark.parametrize("order", ["balanced", "contiguous"])
def test_outputs_that_all_ranks_have_are_restored(order):
    """An input is padded and reordered, and an output put back, without communication."""
    with fake_mesh((2,), ("cp",)) as mesh:
        plan = Plan(mesh).context("", "cp", order=order)
        plan.sequence("<in>", "cp", order=order).sequence("<out>", "cp", order=order)
        begin, end = (
            SequenceReorder(step, mesh, site)
            for site in lower(plan, torch.nn.Identity()).sites
            for step in site.steps
            if step.kind is OpKind.ORDER
        )
        whole = torch.arange(2 * 313).view(2, 313)
        with attention_mask(AttentionMask.of_lengths([300, 13])):
            padded = begin(whole)
            assert padded.shape[1] % 2 == 0
            assert torch.equal(padded.sort().values[:, -313:], whole.sort().values)
            assert torch.equal(end(padded), whole)
