"""A plan that asks for fully_shard, with the fsdp package: unmodified models as on one device."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdp import FSDPModule, Rows, fully_shard
from fsdp.optim import SOAP, Adam8bit, Muon
from integration.models.dit import DiffusionLoss, DiT
from integration.systems.zoo import with_noise_loss
from plan_api import deferred_init, parallelize, zoo
from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks
from testkit.inspection.memory import peak_bytes

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]


def _further(*values):
    """A further case on four ranks of what one shows in the fast tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _plan(mesh):
    plan = zoo.llama(mesh, dp="dp", sp=mesh.size(1) > 1)
    return plan.fully_shard(r"model\.layers\.\d+", "dp", Rows(2)).fully_shard("", "dp")


@pytest.mark.parametrize("shape", [_further((2, 2)), (2, 1)], ids=["FSDP x TP + SP", "FSDP"])
def test_it_trains_as_one_device(shape):
    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = models.llama()
        parallelize(model, _plan(mesh))
        assert isinstance(model.model.layers[0], FSDPModule)
        placed = [param.placements[0] for param in model.parameters()]
        assert all(isinstance(one, RaggedShard | StridedRaggedShard) for one in placed)
        return models.train(model, models.token_loss, steps=5)

    wanted = models.train(models.llama(), models.token_loss, steps=5)
    for losses in run_ranks(check, shape[0] * shape[1], timeout=180):
        assert losses == pytest.approx(wanted, abs=1e-5)


LAYER = r"model\.layers\.\d+"
EXPERTS = rf"{LAYER}\.mlp\.experts"


def _all_are_experts_ranks(mesh):
    """Experts over all ranks of data parallelism; fsdp leaves them alone."""
    plan = zoo.mixtral(mesh, tp=None, dp="dp", ep="dp")
    return plan.fully_shard(LAYER, "dp").fully_shard("", "dp")


def _some_are_experts_ranks(mesh):
    """Experts over some, and sharded over the others; all else over all ranks."""
    data = ("rest", "ep")
    plan = zoo.mixtral(mesh, tp=None, dp=data, ep="ep")
    plan.fully_shard(EXPERTS, "rest")
    return plan.fully_shard(LAYER, data, flat=True).fully_shard("", data, flat=True)


def _replicated(mesh):
    """Experts over some, and the same on the others, where nothing shards them."""
    data = ("rest", "ep")
    plan = zoo.mixtral(mesh, tp=None, dp=data, ep="ep")
    return plan.fully_shard(LAYER, data, flat=True).fully_shard("", data, flat=True)


def _beside_tp(mesh):
    """Experts over data's ranks, and cut within along tp; all else sharded and cut."""
    plan = zoo.mixtral(mesh, dp="dp", sp=True, ep="dp")
    return plan.fully_shard(LAYER, "dp").fully_shard("", "dp")


@pytest.mark.parametrize(
    ("axes", "shape", "make", "of_experts", "experts"),
    [
        (("dp",), (2,), _all_are_experts_ranks, [Shard], 4),
        _further(("rest", "ep"), (2, 2), _some_are_experts_ranks, [StridedRaggedShard, Shard], 4),
        _further(("rest", "ep"), (2, 2), _some_are_experts_ranks, [StridedRaggedShard, Shard], 3),
        _further(("rest", "ep"), (2, 2), _replicated, [Replicate, Shard], 4),
        _further(("dp", "tp"), (2, 2), _beside_tp, [Shard, Shard], 4),
    ],
    ids=["EP of all", "EP of some", "uneven EP", "EP of some, replicated", "EP beside TP"],
)
def test_fsdp_beside_experts_that_tokens_are_sent_to(axes, shape, make, of_experts, experts):
    """Losses of eight steps, and norms of gradients, of which AdamW hides a factor."""

    def trained(model):
        losses = models.train(model, models.token_loss, steps=8)
        models.token_loss(model).backward()
        grads = [param.grad for param in model.parameters()]
        whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        return losses, [grad.norm().item() for grad in whole]

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        model = models.mixtral(attention_dropout=0.1, num_local_experts=experts)
        parallelize(model, make(mesh), strict=True)
        layer = model.model.layers[0]
        placed = [type(one) for one in layer.mlp.experts.down_proj.placements]
        attention = layer.self_attn.q_proj.weight
        local_numel = sum(param.to_local().numel() for param in model.parameters())
        return trained(model), placed, attention.device_mesh.size(), local_numel

    alone = models.mixtral(attention_dropout=0.1, num_local_experts=experts)
    full = sum(param.numel() for param in alone.parameters())
    losses, norms = trained(alone)
    ranks = len(shape) * 2
    found = run_ranks(check, ranks, timeout=300)
    for (own_losses, own_norms), placed, size, _ in found:
        assert own_losses == pytest.approx(losses, abs=6e-5, rel=0)
        assert own_norms == pytest.approx(norms, rel=1e-3)
        assert placed == of_experts
        assert size == ranks
    local_numel = sum(one[-1] for one in found)
    assert (
        local_numel == full
        if make in (_all_are_experts_ranks, _some_are_experts_ranks)
        else local_numel > full
    )


def _dit():
    torch.manual_seed(0)
    return DiffusionLoss(DiT(dropout=0.1)).train()


def _noise_loss(model):
    images, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    return model(images, torch.randint(0, 1000, (4,)), torch.randint(0, 10, (4,)), noise)


MODELS = {"dit": _dit, "gpt2": models.gpt2, "mixtral": models.mixtral}
FUSED = {  # projections that tensor parallelism cuts as InterleavedShard
    "dit": (r"model\.blocks\.\d+", _noise_loss, 1e-5),
    "gpt2": (r"transformer\.h\.\d+", models.token_loss, 1e-5),
    "mixtral": (r"model\.layers\.\d+", models.token_loss, 6e-5),
}


def _fsdp(name, model, sp, **options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = getattr(zoo, name)(mesh, tp="tp", dp="dp", sp=sp)
    plan = with_noise_loss(plan, "dp") if name == "dit" else plan
    plan.fully_shard(FUSED[name][0], "dp", Rows(2)).fully_shard("", "dp")
    return parallelize(model, plan, **options)


def _hsdp(name, model, sp):
    """Tensor parallelism by a plan of its axis alone; both replicas get the same batch."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "dp", "tp"))
    plan = getattr(zoo, name)(mesh["tp"], tp="tp", sp=sp)
    parallelize(model, plan.under("model") if name == "dit" else plan)
    for path, module in model.named_modules():
        if re.fullmatch(FUSED[name][0], path):
            fully_shard(module, mesh=mesh["replica", "dp"])
    fully_shard(model, mesh=mesh["replica", "dp"])


@pytest.mark.parametrize(
    ("shard", "sp"),
    [_further(_fsdp, False), (_fsdp, True), _further(_hsdp, True)],
    ids=["FSDP x TP", "FSDP x TP + SP", "HSDP x TP + SP"],
)
@pytest.mark.parametrize("name", [_further("dit"), "gpt2", _further("mixtral")])
def test_fused_projections_train_as_one_device(name, shard, sp):
    _, loss, within = FUSED[name]

    def check():
        model, alone = MODELS[name](), MODELS[name]()
        shard(name, model, sp)
        cut = [p for p in model.parameters() if isinstance(p.placements[-1], InterleavedShard)]
        assert cut
        assert all(isinstance(p.placements[-2], RaggedShard) for p in cut)
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), other)
        losses = models.train(model, loss, steps=5)
        wanted = models.train(alone, loss, steps=5)
        assert losses == pytest.approx(wanted, abs=within)
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-3, atol=2e-4)

    run_ranks(check, 4, timeout=180)


@pytest.mark.slow  # plan-api has uneven shards of its own
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_uneven_vocabulary_trains_as_on_one_device(name):
    """GPT-2's 50,257 rows have no divisor of two; its output layer is tied to its embeddings."""
    within = {"gpt2": r"transformer\.h\.\d+", "llama": r"model\.layers\.\d+"}[name]

    def check():
        make = {"gpt2": models.gpt2, "llama": models.llama}[name]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, alone = make(vocab_size=67), make(vocab_size=67)
        plan = getattr(zoo, name)(mesh, tp="tp", dp="dp", loss_parallel=True)
        parallelize(model, plan.fully_shard(within, "dp", Rows(2)).fully_shard("", "dp"))
        head = model.lm_head.weight
        assert isinstance(head.placements[0], StridedRaggedShard)
        assert head.placements[1] == Shard(0)
        losses = models.train(model, models.token_loss, steps=5)
        assert losses == pytest.approx(models.train(alone, models.token_loss, steps=5), abs=1e-5)
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-3, atol=2e-4)

    run_ranks(check, 4, timeout=180)


@pytest.mark.slow  # plan-api's tests have LLaMA
@pytest.mark.parametrize("name", ["dit", "gpt2", "mixtral"])
def test_static_mode_trains_bit_for_bit_as_eager(name):
    """With sequence parallelism and dropout; the first step is compared with Eager, too."""

    def check():
        losses, params = [], []
        for mode in ("eager", "static"):
            model = _fsdp(name, MODELS[name](), True, mode=mode)
            losses.append(models.train(model, FUSED[name][1], steps=5))
            params.append([param.detach().to_local() for param in model.parameters()])
        assert losses[0] == losses[1]
        assert all(map(torch.equal, *params))

    run_ranks(check, 4, timeout=180)


@pytest.mark.parametrize("make", [_further(Adam8bit), Muon, _further(SOAP)])
def test_optimizers_of_fsdp_step_in_static_mode_as_in_eager(make):
    """Muon and SOAP on the matrices of the layers, which they gather."""

    def check():
        ends = []
        for mode in ("eager", "static"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model = parallelize(models.llama(), _plan(mesh), mode=mode, guard_steps=0)
            of_layers = [param for param in model.model.layers.parameters() if param.ndim == 2]
            optimizer = make(model.parameters() if make is Adam8bit else of_layers, lr=1e-2)
            torch.manual_seed(1)
            losses = []
            for _ in range(4):
                loss = models.token_loss(model)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert optimizer.state
            ends.append((losses, [param.detach().to_local() for param in model.parameters()]))
        (losses, params), (static_losses, static_params) = ends
        assert len(set(losses)) == 4
        assert static_losses == losses
        assert all(map(torch.equal, params, static_params))

    run_ranks(check, 4, timeout=180)


def _flat_plan(mesh):
    plan = zoo.llama(mesh, tp=None, dp=("dp", "cp"))
    plan.fully_shard(LAYER, ("dp", "cp"), Rows(2), flat=True)
    return plan.fully_shard("", ("dp", "cp"), flat=True)


@pytest.mark.parametrize(
    ("axes", "shape", "plan"),
    [_further(("dp", "tp"), (4, 1), _plan), _further(("dp", "cp"), (2, 2), _flat_plan)],
    ids=["one axis", "flattened axes"],
)
def test_a_deferred_model_is_never_whole_on_a_rank(axes, shape, plan):
    """At 4 ranks: a quarter, and once more what is on its way from plan to buffer."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}

    def make():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        model = deferred_init(lambda: models.llama(**wide))
        return parallelize(model, plan(mesh))

    def check():
        most, model = peak_bytes(make)
        # the bits of one device, whatever is random
        wanted = models.llama(**wide)
        for mine, other in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), other)
        sizes = [4 * param.numel() for param in wanted.parameters()]
        return most, sum(sizes), max(sizes)

    peaks, full, largest = zip(*run_ranks(check, 4, timeout=180), strict=True)
    assert full[0] / 4 <= min(peaks)
    assert max(peaks) < full[0] / 4 + 5 * largest[0] < full[0] / 2
