"""Quantized weights on ranks: the bits of one device, bytes gathered, other options.

All ranks have the same batch, so that gradients are the same bits at any power of two of ranks.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import Block, Rows, Tiles, Whole
from fsdp.optim import Adam8bit, Muon
from testkit import CommLog, run_ranks
from testkit.models.tile_net import batch, fake_quantized, losses, net, plain_losses

pytestmark = pytest.mark.ranks
DTYPES = (torch.int8, torch.float8_e4m3fn)
SMALL = Tiles(rows=8, cols=8)  # so that small weights have many, and edges cut some
STEPS = 5


def of_matrices(tiles):
    return lambda param: tiles if param.ndim >= 2 else None


def sharded(tiles=SMALL, model=None, **options):
    model = net() if model is None else model
    if tiles is not None:
        options["quantize_fn"] = of_matrices(tiles)
    for block in list(model)[:-1]:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def used(tiles):
    return lambda name, weight: fake_quantized(weight, tiles.dtype, tiles.rows, tiles.cols)


def reference(tiles=SMALL, optimizer_of=adamw, steps=STEPS, **how):
    model = net()
    return plain_losses(model, optimizer_of(model), range(steps), used(tiles), **how)


def wholes(model):
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}


# The bits of one device.


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_unsharded_weights_equal_quantization_on_one_device(world):
    def check():
        for dtype in DTYPES:
            for rows, cols in [(8, 8), (3, 50), (128, 128)]:
                tiles = Tiles(dtype, rows, cols)
                model = sharded(tiles)
                for module in (model, *model[:-1]):
                    module.unshard()
                for (name, param), given in zip(
                    model.named_parameters(), net().parameters(), strict=True
                ):
                    wanted = fake_quantized(given.detach(), dtype, rows, cols)
                    assert torch.equal(param.detach(), wanted), (tiles, name)

    run_ranks(check, world)


@pytest.mark.parametrize(
    "world", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 4)), 2]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=["int8", "e4m3"])
def test_losses_equal_one_device(world, dtype):
    tiles = Tiles(dtype, 8, 8)
    wanted = reference(tiles)
    assert len(set(wanted)) == STEPS
    alone = net()
    assert wanted != plain_losses(alone, adamw(alone), range(STEPS), lambda name, weight: weight)

    def check():
        # What is resharded does not depend on the dtype; more ranks train all products.
        e4m3 = world == 2 and dtype is torch.float8_e4m3fn
        for reshard in (None,) if e4m3 else (None, True, False):
            model = sharded(tiles, reshard_after_forward=reshard)
            assert losses(model, adamw(model), range(STEPS)) == wanted, reshard

    run_ranks(check, world)


BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def test_losses_with_bfloat16_compute_equal_one_device():
    wanted = reference(dtype=torch.bfloat16)

    def check():
        model = sharded(mp_policy=BFLOAT16)
        assert losses(model, adamw(model), range(STEPS)) == wanted
        assert model[0].up.weight.dtype == torch.float32
        model.unshard()
        assert model[2].weight.dtype == torch.bfloat16

    run_ranks(check, 2)


def test_losses_with_bfloat16_weights_equal_one_device():
    def check():
        model, alone = sharded(model=net().bfloat16()), net().bfloat16()
        to_bf16 = lambda name, weight: used(SMALL)(name, weight.float())
        wanted = plain_losses(alone, adamw(alone), range(STEPS), to_bf16, dtype=torch.bfloat16)
        later = sharded().bfloat16()  # cast after it was sharded
        for one in (model, later):
            assert losses(one, adamw(one), range(STEPS), dtype=torch.bfloat16) == wanted

    run_ranks(check, 2)


def test_accumulated_gradients_equal_one_device():
    wanted = reference(micro=3)

    def check():
        model = sharded()
        assert losses(model, adamw(model), range(STEPS), micro=3) == wanted
        model = sharded()
        sync = model.set_requires_gradient_sync
        assert losses(model, adamw(model), range(STEPS), micro=3, prepare=sync) == wanted

    run_ranks(check, 2)


def test_hsdp_and_post_forward_mesh_give_the_same_losses():
    wanted = reference()

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for options in ({"mesh": mesh}, {"reshard_after_forward": 2}):
            model = sharded(**options)
            assert losses(model, adamw(model), range(STEPS)) == wanted, options

    run_ranks(check, 4)


class Checkpointed(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


def test_checkpointing_offload_and_kept_storage_give_the_same_losses():
    wanted = reference()

    def check():
        def checkpointed(**options):
            model = nn.Sequential(*[Checkpointed(block) for block in net()[:-1]], net()[-1])
            return sharded(model=model, **options)

        for reshard in (True, 2):
            model = checkpointed(reshard_after_forward=reshard)
            assert losses(model, adamw(model), range(STEPS)) == wanted
        model = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
        assert losses(model, adamw(model), range(STEPS)) == wanted
        model = sharded()
        model.set_keep_unsharded_storage(True)
        assert losses(model, adamw(model), range(STEPS)) == wanted
        with torch.inference_mode():
            first = model(batch(0))
        with torch.no_grad():
            assert torch.equal(model(batch(0)), first)

    run_ranks(check, 2)


def test_model_on_meta_trains_after_to_empty():
    wanted = reference()

    def check():
        with torch.device("meta"):
            model = net()
        model = sharded(model=model)
        model.to_empty(device="cpu")
        given = {name: param.detach() for name, param in net().named_parameters()}
        with torch.no_grad():
            for name, param in model.named_parameters():
                placement = param.placements[0]
                own = placement.interval(param.shape, torch.distributed.get_rank())
                local = given[name].flatten()[own.start : own.stop]
                param.to_local().copy_(local.view(param.to_local().shape))
        assert losses(model, adamw(model), range(STEPS)) == wanted

    run_ranks(check, 2)


# With other optimizers, whose blocks agree.


def muon(model):
    hidden = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and "2." not in n[:2]]
    names = {name for name, _ in hidden}
    rest = [(name, param) for name, param in model.named_parameters() if name not in names]
    return Muon([{"params": hidden}, {"params": rest, "use_muon": False}], lr=0.02)


def adam8bit(model):
    return Adam8bit(model.named_parameters(), lr=1e-2, block_size=16, min_8bit_size=64)


WITH = {
    "Adam8bit, by tiles": (adam8bit, None, {}),
    "Adam8bit, Rows(16)": (adam8bit, lambda p: Rows(16) if p.ndim == 2 else None, {}),
    "Adam8bit, blocks": (
        adam8bit,
        lambda p: Block(8 * 36 * 20) if p.shape[-1] in (20, 36) and p.ndim == 2 else None,
        {},
    ),
    "Muon, by tiles": (muon, None, {"all_reduce": 1, "all_to_all": 2}),
    "Muon, Whole()": (muon, lambda p: Whole(), {}),
}


@pytest.mark.parametrize(
    "name",
    [
        # As by tiles: the granularity is a multiple of both.
        pytest.param(one, marks=[pytest.mark.slow] * (one == "Adam8bit, Rows(16)"))
        for one in WITH
    ],
)
def test_adam8bit_and_muon_step_as_on_one_device(name):
    optimizer_of, placement, collectives = WITH[name]
    wanted = reference(optimizer_of=optimizer_of)

    def check():
        model = sharded(shard_placement_fn=placement)
        optimizer = optimizer_of(model)
        assert losses(model, optimizer, range(STEPS - 1)) == wanted[:-1]
        loss = model(batch(STEPS - 1)).square().mean()
        assert loss.item() == wanted[-1]
        loss.backward()
        with CommLog() as log:
            optimizer.step()
        log.assert_counts(collectives)

    run_ranks(check, 2)


# Which weights.


class Lora(nn.Module):
    """A frozen weight, adapters that are trained; both ends of it are one tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.base = nn.Linear(20, 20, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(20, 4, bias=False), nn.Linear(4, 20, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def lora():
    return nn.Sequential(Lora(), Lora(), nn.Linear(20, 20))


def frozen(param):
    return None if param.requires_grad else SMALL


def test_frozen_weights_may_be_quantized_alone():
    alone = lora()
    only_base = lambda name, weight: used(SMALL)(name, weight) if "base" in name else weight
    wanted = plain_losses(alone, adamw(alone), range(STEPS), only_base)

    def check():
        model = lora()
        for block in (*model[:-1], model):
            fsdp.fully_shard(block, quantize_fn=frozen, strategy="native")
        found = losses(model, adamw(model), range(STEPS - 1))
        with CommLog() as log:
            found += losses(model, adamw(model), [STEPS - 1])
        assert found[:-1] == wanted[:-1]
        # frozen weights and adapters of two blocks, twice each; the root's once
        log.assert_counts({"all_gather": 2 * 2 * 2 + 1, "reduce_scatter": 3})
        assert model[0].base.weight.grad is None

    run_ranks(check, 2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def test_tied_weights_are_quantized_once():
    alone = Tied()
    wanted = plain_losses(alone, adamw(alone), range(STEPS), used(SMALL))

    def check():
        model = fsdp.fully_shard(Tied(), quantize_fn=of_matrices(SMALL))
        assert losses(model, adamw(model), range(STEPS)) == wanted
        assert model.first.weight is model.last.weight

    run_ranks(check, 2)


# What is sent.


def wide():
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512)) for _ in range(2)],
        nn.Linear(512, 512, bias=False),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=["int8", "e4m3"])
def test_a_quarter_of_the_bytes_is_gathered_in_the_same_collectives(dtype):
    def check():
        logs = []
        for tiles in (None, Tiles(dtype)):
            model = sharded(tiles, wide(), strategy="native")
            x = torch.ones(2, 512)
            model(x).sum().backward()
            with CommLog() as log:
                model(x).sum().backward()
            log.assert_counts({"all_gather": 2 * 2 + 1, "reduce_scatter": 3})
            logs.append(log)
        plain, quantized = (log.wire_bytes("all_gather") for log in logs)
        assert 0.25 < quantized / plain < 0.26
        reduced = [log.wire_bytes("reduce_scatter") for log in logs]
        assert 1 <= reduced[1] / reduced[0] < 1.01  # tiles cost some padding

    run_ranks(check, 2)


def test_gather_from_post_forward_shards_is_quantized():
    def check():
        gathered = []
        for tiles in (None, SMALL):
            model = sharded(tiles, reshard_after_forward=2, strategy="native")
            model(batch(0)).sum().backward()
            loss = model(batch(0)).sum()
            with CommLog() as log:
                loss.backward()
            gathered.append(log.wire_bytes("all_gather"))
            with torch.no_grad():
                model(batch(0))
            cache = model[0]._get_fsdp_state().groups[0].all_gather._post_forward
            assert not cache.is_filled  # nor is it, where no backward comes
        assert gathered[1] < 0.4 * gathered[0]  # the tiles are small, and biases are as they are

    run_ranks(check, 4)


def test_unsharded_weights_and_bytes_are_freed():
    def check():
        model = sharded(reshard_after_forward=True)
        group = model[0]._get_fsdp_state().groups[0]
        model(batch(0)).sum().backward()
        assert not group.all_gather._buffer.allocated
        model[0].unshard()
        weight = model[0].up.weight
        assert weight.untyped_storage().size() == 4 * group.shard.layout.buffer_size
        assert not group.all_gather._buffer.allocated  # the bytes are of no use any more
        model[0].reshard()
        assert weight.untyped_storage().size() == 0

    run_ranks(check, 2)
