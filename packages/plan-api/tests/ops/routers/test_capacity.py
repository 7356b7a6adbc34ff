"""The capacity of experts: what one device drops, however tokens are sharded."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from plan_api import (
    AttentionMask,
    Plan,
    attention_mask,
    limit_expert_capacity,
    parallelize,
    zoo,
)
from plan_api.ops.routers.tokens import routers_of
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, CommLog, models, run_ranks

FACTOR = 0.75
needs_flattening = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
FAMILIES = {
    "mixtral": (models.mixtral, zoo.mixtral, {}),
    "deepseek_v3": (models.deepseek_v3, zoo.deepseek_v3, {"dense": 1}),
}


def _batch(length=8):
    torch.manual_seed(3)
    ids = torch.randint(0, 64, (4, length))
    return {"input_ids": ids, "labels": ids}


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _results(model, batch):
    """The loss, and the gradients."""
    loss = model(**batch).loss
    loss.backward()
    return _whole(loss).item(), [_whole(param.grad) for param in model.parameters()]


def _drop(batch, dropped):
    """A hook of a router that drops choices one by one, in the order of tokens."""
    sequences, length = batch["input_ids"].shape

    def hook(router, _, output):
        logits, weights, index = output
        within = torch.ones_like(weights)
        limit = math.ceil(FACTOR * length * index.shape[1] / logits.shape[1])
        for sequence in range(sequences):
            taken = [0] * logits.shape[1]
            for token in range(sequence * length, (sequence + 1) * length):
                for choice, expert in enumerate(index[token].tolist()):
                    if taken[expert] >= limit:
                        within[token, choice] = 0
                        dropped.append((token, expert))
                    taken[expert] += 1
        return logits, weights * within, index

    return hook


def _by_hand(make, batch, run=_results):
    model, dropped = make(), []
    for router in routers_of(model).values():
        router.register_forward_hook(_drop(batch, dropped))
    results = run(model, batch)
    choices = batch["input_ids"].numel() * 2 * len(routers_of(model))
    assert 0.1 < len(dropped) / choices < 0.6
    assert abs(results[0] - run(make(), batch)[0]) > 1e-5
    return results


def _check(found, expected):
    loss, grads = expected
    for of_rank, of_params in found:
        assert of_rank == pytest.approx(loss, abs=2e-6, rel=0)
        for one, other in zip(of_params, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_expert_takes_the_first_tokens_of_each_sequence(family):
    make, _, _ = FAMILIES[family]
    model, batch = make(), _batch()
    limit_expert_capacity(model, FACTOR)
    _check([_results(model, batch)], _by_hand(make, batch))
    assert model.eval()(**batch).loss == make().eval()(**batch).loss


def test_a_large_factor_drops_nothing():
    model = models.mixtral()
    limit_expert_capacity(model, 2.0)  # four experts, of which each token chooses two
    assert model(**_batch()).loss == models.mixtral()(**_batch()).loss


@pytest.mark.ranks
@needs_flattening
@pytest.mark.parametrize("family", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_one_device(mode, ranks, cases, family):
    make, plan_of, options = FAMILIES[family]

    def check(batch):
        found = []
        for shape, axes, product in cases:
            mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=axes), make()
            limit_expert_capacity(model, FACTOR)
            plan = plan_of(mesh, **options, **product)
            plan.recompute(r"model\.layers\.\d+", "full")
            parallelize(model, plan, mode=mode)
            found.append(_results(model, batch))
        return found

    expected = _by_hand(make, _batch())
    for of_case in zip(*run_ranks(check, ranks, _batch(), timeout=240), strict=True):
        _check(of_case, expected)


CONTEXT = {
    "zig-zag": ("mixtral", 16, {"ep": "cp"}),
    "contiguous": ("mixtral", 16, {"cp_method": "ulysses"}),
    "DeepSeek-V3, all-gather": ("deepseek_v3", 16, {"ep": "cp", "cp_method": "all-gather"}),
    "padded": ("mixtral", 13, {"ep": "cp"}),
    "documents": ("mixtral", 13, {"cp_order": "balanced", "ep": "cp"}),
}
CONTEXT_OPTIONS = {
    "attn_implementation": "sdpa",
    "num_key_value_heads": 4,
}  # a head for each rank of ulysses
DOCUMENTS = AttentionMask.of_lengths([4, 9])


def _context_results(model, batch, name, on_ranks):
    """The results of a batch, whose mask is described or dense where it is not causal."""
    if name not in ("padded", "documents"):
        return _results(model, batch)
    mask = DOCUMENTS if name == "documents" else AttentionMask()
    if on_ranks:
        with attention_mask(mask):
            return _results(model, batch)
    return _results(model, batch | {"attention_mask": mask.dense(batch["input_ids"].shape[1])})


@pytest.mark.ranks
@needs_flattening
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, ["zig-zag", "documents"]), pytest.param(4, [*CONTEXT], marks=pytest.mark.slow)],
    ids=["2 ranks", "4 ranks"],
)
@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "static"])
def test_tokens_in_an_order_of_context_parallelism_are_counted_in_the_sequences(mode, ranks, names):
    def check():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        found = []
        for name in names:
            family, length, product = CONTEXT[name]
            make, plan_of, options = FAMILIES[family]
            model = make(**CONTEXT_OPTIONS)
            limit_expert_capacity(model, FACTOR)
            plan = plan_of(mesh, tp=None, cp="cp", **options, **product)
            parallelize(model, plan, mode=mode)
            found.append(_context_results(model, _batch(length), name, on_ranks=True))
        return found

    for name, of_case in zip(
        names, zip(*run_ranks(check, ranks, timeout=240), strict=True), strict=True
    ):
        family, length, _ = CONTEXT[name]
        make = partial(FAMILIES[family][0], **CONTEXT_OPTIONS)
        run = partial(_context_results, name=name, on_ranks=False)
        _check(of_case, _by_hand(make, _batch(length), run))


@pytest.mark.ranks
def test_ranks_with_different_parts_of_a_sequence_drop_what_one_device_drops():
    """In static mode, of 7 tokens."""

    def check(batch):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = models.mixtral()
        limit_expert_capacity(model, FACTOR)
        plan = zoo.mixtral(mesh, sp=True, ep="tp")
        parallelize(model, plan, mode="static", guard_steps=0)
        return _results(model, batch)

    batch = _batch(length=7)
    _check(run_ranks(check, 2, batch), _by_hand(models.mixtral, batch))


@pytest.mark.ranks
def test_only_a_sharded_sequence_communicates():
    """In static mode an all-gather for each router, of numbers of choices and of tokens."""

    def check(batch):
        found = []
        for axes, options in ((("tp",), {"sp": True, "ep": "tp"}), (("dp",), {"dp": "dp"})):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=axes)
            of_both = []
            for factor in (FACTOR, None):
                model = models.mixtral()
                if factor is not None:
                    limit_expert_capacity(model, factor)
                tp = {} if axes == ("tp",) else {"tp": None}
                plan = zoo.mixtral(mesh, **tp, **options)
                parallelize(model, plan, mode="static", guard_steps=0)
                with CommLog() as log:
                    model(**batch)
                # Dropped choices are not dispatched.
                of_both.append(
                    [(one.op, one.op != "all_to_all" and one.input_bytes) for one in log.calls]
                )
            limited, without = of_both
            for call in without:
                limited.remove(call)
            found.append(limited)
        return found

    for along_sequence, along_batch in run_ranks(check, 2, _batch()):
        assert [size for _, size in along_sequence] == [4 * (4 + 1) * 4] * 2
        assert not along_batch


def _record_rows(module):
    """Returns a list to which calls of a module append how many rows it gets."""
    rows, forward = [], module.forward

    def record(tokens, *others):
        rows.append(len(tokens))
        return forward(tokens, *others)

    module.forward = record
    return rows


@pytest.mark.ranks
@pytest.mark.parametrize("chunks", [1, 3])
def test_bytes_are_those_of_choices_that_are_not_dropped(chunks):
    """In static mode; a row for each token and other rank whose experts take it."""

    def check(batch):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = models.mixtral()
        limit_expert_capacity(model, FACTOR)
        plan = zoo.mixtral(mesh, tp=None, dp="dp", ep="dp", ep_chunks=chunks)
        parallelize(model, plan, mode="static", guard_steps=0)
        routed = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, __, out: routed.append(out[1:]))
        rows = [_record_rows(layer.mlp.experts) for layer in model.model.layers]
        with CommLog() as log:
            loss = model(**batch).loss
        with CommLog() as back:
            loss.backward()
        sent = [
            [one.wire_bytes for one in calls if one.op == "all_to_all"]
            for calls in (log.calls, back.calls)
        ]
        found = [(weights.detach() != 0, index // 2) for weights, index in routed]
        return found, [*map(sum, rows)], sent

    found = run_ranks(check, 2, _batch())
    features, numbers = 4 * 32, 2 * 4
    row, gradient, counts = features + 2 * numbers, features + numbers, 8 * 2 * chunks
    for layer in range(2):
        taken = [routed[layer] for routed, _, _ in found]
        pairs = [
            int((within & (of == 1 - at)).any(1).sum()) for at, (within, of) in enumerate(taken)
        ]
        assert any(of.eq(1 - at).any(1).sum() > pairs[at] for at, (_, of) in enumerate(taken))
        for rank, (_, computed, (forward, backward)) in enumerate(found):
            own, other = pairs[rank], pairs[1 - rank]
            calls = 1 + 2 * chunks
            numbered, *exchanged = forward[calls * layer : calls * (layer + 1)]
            assert numbered == counts
            assert sum(exchanged) == row * own + features * other
            first = 2 * chunks * (1 - layer)  # the last layer is first
            assert sum(backward[first : first + 2 * chunks]) == features * own + gradient * other
            assert computed[layer] == sum(
                int((within & (of == rank)).sum()) for within, of in taken
            )


class TopKRouter(nn.Module):
    """Returns choices that are given."""

    def __init__(self, choices):
        super().__init__()
        self.choices = torch.tensor(choices)

    def forward(self, x):
        return torch.zeros(len(self.choices), 3), torch.ones(self.choices.shape), self.choices


class Experts(nn.Module):
    def __init__(self, choices):
        super().__init__()
        self.gate = TopKRouter(choices)

    def forward(self, x):
        return self.gate(x.flatten(0, -2))[1]


@pytest.mark.parametrize(
    ("choices", "shape", "within"),
    [
        ([[0], [0], [0], [0]], (1, 4, 2), [1, 1, 0, 0]),
        ([[0], [0], [0], [0]], (2, 2, 2), [1, 0, 1, 0]),
        ([[0], [1], [2], [0]], (1, 4, 2), [1, 1, 1, 1]),
        ([[2]], (1, 1, 2), [1]),
    ],
    ids=["all tokens on one expert", "two sequences", "even", "one token"],
)
def test_the_first_tokens_are_kept(choices, shape, within):
    model = Experts(choices)
    limit_expert_capacity(model, 1.0)
    assert model(torch.zeros(shape)).flatten().tolist() == within


def test_hidden_states_without_sequences_are_refused():
    model = Experts([[0], [1]])
    limit_expert_capacity(model, 1.0)
    with pytest.raises(ValueError, match=r"gate: expected .*\(batch, sequence, features\).* 2 tok"):
        model(torch.zeros(2, 4))


def test_what_has_no_effect_or_comes_too_late_is_refused(mesh):
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected a factor above 0"):
            limit_expert_capacity(models.mixtral(), factor)
    with pytest.raises(ValueError, match=r"expected a model with routers .* got a Linear"):
        limit_expert_capacity(nn.Linear(2, 2), 1.0)
    model = models.mixtral()
    limit_expert_capacity(model, 1.0)
    with pytest.raises(ValueError, match="got one that has it already"):
        limit_expert_capacity(model, 1.0)
    late = parallelize(models.mixtral(), Plan(mesh), src_data_rank=None)
    with pytest.raises(ValueError, match="before parallelize"):
        limit_expert_capacity(late, 1.0)


def test_sequences_that_are_sharded_in_an_unknown_order_are_refused(mesh):
    model = models.mixtral()
    limit_expert_capacity(model, 1.0)
    plan = Plan(mesh).shard("<in:input_ids>", Shard(1), "tp")
    with pytest.raises(ValueError, match=r"sequences by sequence\(\), got shard.* along 'tp'"):
        parallelize(model, plan, src_data_rank=None)
    assert not isinstance(next(model.parameters()), DTensor)


def test_routers_on_dtensors_beside_context_parallelism_are_refused(mesh):
    model = models.mixtral()
    limit_expert_capacity(model, 1.0)
    plan = Plan(mesh).sequence("<in:input_ids>", "tp", order="contiguous")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate to run on .*along 'tp'.*add local"):
        parallelize(model, plan, src_data_rank=None)
    plan = zoo.mixtral(mesh, cp="dp", sp=True, ep=("dp", "tp"))
    with pytest.raises(ValueError, match=r"one axis .*layers\.0\.mlp\.gate, got \['dp', 'tp'\]"):
        parallelize(model, plan, src_data_rank=None)


def test_several_axes_along_a_sequence_are_refused(mesh):
    model = models.mixtral()
    limit_expert_capacity(model, 1.0)
    plan = Plan(mesh).local(r"model\.layers\.\d+\.mlp", [Shard(1), Shard(1)])
    with pytest.raises(ValueError, match=r"one axis .*layers\.0\.mlp\.gate, got \['dp', 'tp'\]"):
        parallelize(model, plan, src_data_rank=None)


def test_hidden_states_whose_sequences_are_sharded_are_refused(mesh):
    model = models.mixtral()
    limit_expert_capacity(model, 1.0)
    plan = zoo.mixtral(mesh, tp=None, dp="dp")
    plan.shard(r"model\.layers\.1\.mlp\.<in>", Shard(1), "tp")
    parallelize(model, plan, src_data_rank=None)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate: .* sequences are on one rank"):
        model(**_batch())
