"""Parameters that stay gathered between steps: gathered once they have changed, and only then."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, Tiles
from fsdp.optim import SOAP, Adam8bit, Muon
from testkit import KEEPS_ORDER_OF_RANKS, NO_ORDER_OF_RANKS, CommLog, run_ranks
from testkit.checkpoints import load_checkpoint, save_checkpoint
from testkit.models import residual_stack
from testkit.models.residual_stack import batch, losses, stack

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]  # DCP's own

needs_ordered_ranks = pytest.mark.skipif(not KEEPS_ORDER_OF_RANKS, reason=NO_ORDER_OF_RANKS)
STAYS = ("ddp", "zero1", "zero2", *(("hfsdp",) if KEEPS_ORDER_OF_RANKS else ()))
NAMES = (*STAYS, "zero3", "hsdp")
# One mesh axis and two: the other strategies share the code of these.
ONE_OF_EACH = [
    "zero2",
    pytest.param("hfsdp", marks=needs_ordered_ranks),
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("ddp", "zero1")),
]
BOTH = tuple(name for name in STAYS if name in ("zero2", "hfsdp"))


def shard(name, model=None, **options):
    """Shards a block and the root around it, or a model, on 4 ranks."""
    two_axes = name in ("hsdp", "hfsdp")
    names = ("replicate", "shard") if two_axes else ("shard",)
    mesh = init_device_mesh("cpu", (2, 2) if two_axes else (4,), mesh_dim_names=names)
    # The root of FSDP's strategies would stay unsharded after an evaluation.
    reshard = None if name in STAYS[:3] else True
    options = {"mesh": mesh, "strategy": "native", "reshard_after_forward": reshard} | options
    return residual_stack.shard(fsdp, model or stack(1), placements=name, **options)


def expected(model, x):
    """What an unsharded stack with the sharded parameters computes."""
    plain = stack(1)
    with torch.no_grad():
        for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            param.copy_(sharded.full_tensor())
    return plain(x)


@torch.no_grad()
def in_place(model):
    for param in model.parameters():
        param.mul_(0.5)


@torch.no_grad()
def detached(model):
    for param in model.parameters():
        param.detach().add_(0.25)


@torch.no_grad()
def of_local_tensors(model):
    for param in model.parameters():
        param.to_local().add_(0.125)


def loaded(model):
    model.load_state_dict({name: 2 * one for name, one in model.state_dict().items()})


def assigned(model):
    state = {name: 2 * one for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def initialized(model):
    for param in model.parameters():
        nn.init.constant_(param, 0.3)


def stepped(model, kernel=Adam8bit):
    """By a kernel of this package, which torch's versions do not count."""
    optimizer = kernel(model.named_parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


def through_data_and_resharded(model):
    """torch counts no such write; reshard says that there was one."""
    for param in model.parameters():
        param.data.mul_(2.0)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


CHANGES = (
    in_place, detached, of_local_tensors, loaded, assigned, initialized, stepped,
    through_data_and_resharded,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "param_dtype"),
    [
        ("zero2", torch.float64),
        pytest.param("hfsdp", None, marks=needs_ordered_ranks),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in STAYS
            for dtype in (None, torch.float64)
            if (name, dtype) not in (("zero2", torch.float64), ("hfsdp", None))
        ),
    ],
)
def test_evaluation_gathers_once_and_sees_each_change(name, param_dtype):
    def check():
        model = shard(name, mp_policy=MixedPrecisionPolicy(param_dtype))
        losses(model, steps=1)
        with torch.no_grad():
            model(batch(0))
            first = CommLog()
            with first:
                model(batch(0))
            for change in CHANGES:
                change(model)
                found, wanted = model(batch(1)), expected(model, batch(1))
                torch.testing.assert_close(found.float(), wanted, msg=change.__name__)
                again = CommLog()
                with again:
                    assert torch.equal(model(batch(1)), found)
                assert again.counts() == first.counts(), change.__name__
        return first.counts().get("all_gather", 0)

    gathers = 2 if name == "hfsdp" else 0  # over the shards, as HSDP
    assert run_ranks(check, 4, timeout=200) == [gathers] * 4


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_first_forward_of_training_sees_writes_that_torch_does_not_count(name):
    def check():
        model = shard(name)
        for evaluates in (True, False):
            if evaluates:
                with torch.no_grad():
                    model(batch(0))
            else:
                model(batch(0)).sum().backward()
            for param in model.parameters():
                param.data.mul_(2.0)
            found = model(batch(1))
            found.sum().backward()
            torch.testing.assert_close(found, expected(model, batch(1)))

    run_ranks(check, 4)


@pytest.mark.parametrize("name", STAYS)
def test_modules_have_sharded_parameters_after_forward(name):
    """So that what is changed is what the next forward gathers."""

    def check():
        model = shard(name)
        out = model(batch(0))
        blocks = [isinstance(param, DTensor) for param in model[0].parameters()]
        out.sum().backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        return all(blocks)

    assert run_ranks(check, 4) == [True] * 4


@pytest.mark.slow
def test_checkpoints_of_each_strategy_load_into_each_other(tmp_path):
    def make(name):
        model = shard(name, stack())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model, optimizer, number):
        loss = model(batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def values(model, optimizer):
        params = [param.full_tensor() for param in model.parameters()]
        states = [optimizer.state[param]["exp_avg_sq"] for param in model.parameters()]
        tensors = [*params, *(state.full_tensor() for state in states)]
        return [tensor.clone() for tensor in tensors]  # of DDP's they are the parameters

    def check():
        two_axes = ("hsdp", "hfsdp")  # they sum gradients in another order
        before, after = {}, {}
        for name in NAMES:
            model, optimizer = make(name)
            for number in range(2):
                step(model, optimizer, number)
            save_checkpoint(tmp_path / name, model, optimizer)
            before[name] = values(model, optimizer)
            after[name] = torch.stack([step(model, optimizer, number) for number in range(2, 5)])
        for saved in NAMES:
            for name in NAMES:
                model, optimizer = make(name)
                load_checkpoint(tmp_path / saved, model, optimizer)
                assert all(map(torch.equal, values(model, optimizer), before[saved])), (saved, name)
                found = torch.stack([step(model, optimizer, number) for number in range(2, 5)])
                if (saved in two_axes) == (name in two_axes):
                    assert torch.equal(found, after[saved]), (saved, name)
                else:
                    torch.testing.assert_close(found, after[saved])

    run_ranks(check, 4, timeout=400)


# Together with other options.


def by(name, optimizer):
    """Of all matrices, with AdamW for the other parameters."""

    def make(model):
        named = list(model.named_parameters())
        matrices = [(key, param) for key, param in named if param.ndim == 2]
        others = {"params": [(key, param) for key, param in named if param.ndim != 2], name: False}
        return optimizer([{"params": matrices}, others], lr=1e-2)

    return make


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam8bit": lambda model: Adam8bit(model.named_parameters(), lr=1e-2),
    "Muon": by("use_muon", Muon),
    "SOAP": by("use_soap", SOAP),
}


@pytest.mark.parametrize(
    ("optimizer", "names", "blocks"),
    [
        pytest.param("Muon", BOTH, 1, id="Muon"),
        *(
            pytest.param(one, STAYS, 3, id=f"{one}, all", marks=pytest.mark.slow)
            for one in OPTIMIZERS
        ),
    ],
)
def test_optimizers_have_the_bits_of_fsdp(optimizer, names, blocks):
    def check():
        how = {"make_optimizer": OPTIMIZERS[optimizer], "steps": 3}
        wanted = losses(shard("zero3", stack(blocks)), **how)
        replicas = losses(shard("hsdp", stack(blocks)), **how)
        for name in names:
            found = losses(shard(name, stack(blocks)), **how)
            assert torch.equal(found, replicas if name == "hfsdp" else wanted)

    run_ranks(check, 4, timeout=200)


def prefetches(model, _):
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[1].set_modules_to_backward_prefetch([model[0]])


def defers(model, _):
    model.set_manual_backward_finalization(True)


OPTIONS = {
    "offload": ({"offload_policy": CPUOffloadPolicy()}, {}),
    "exchange": ({"strategy": "exchange"}, {}),
    "prefetch": ({}, {"prepare": prefetches}),
    "rows": ({"shard_placement_fn": lambda param: fsdp.Rows(3) if param.ndim == 2 else None}, {}),
    "whole": ({"shard_placement_fn": lambda param: fsdp.Whole()}, {}),
}
OF_HFSDP = {
    "gathered over two after forward": ({"reshard_after_forward": 2}, {}),
    "kept after forward": ({"reshard_after_forward": False}, {}),
    "quantized": (
        {
            "quantize_fn": lambda param: Tiles(rows=4, cols=4) if param.ndim == 2 else None,
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        },
        {},
    ),
}


@pytest.mark.parametrize(
    ("option", "names", "blocks"),
    [
        pytest.param("offload", BOTH, 1, id="offload"),
        pytest.param("quantized", ("hfsdp",), 1, id="quantized", marks=needs_ordered_ranks),
        *(pytest.param(one, STAYS, 3, id=f"{one}, all", marks=pytest.mark.slow) for one in OPTIONS),
        *(
            pytest.param(
                one, ("hfsdp",), 3, id=f"{one}, all", marks=[pytest.mark.slow, needs_ordered_ranks]
            )
            for one in OF_HFSDP
        ),
    ],
)
def test_options_have_the_bits_of_fsdp(option, names, blocks):
    def check():
        options, how = (OPTIONS | OF_HFSDP)[option]
        how, wanted = {"steps": 3} | how, {}
        for name in names:
            like = "hsdp" if name == "hfsdp" else "zero3"
            if like not in wanted:
                wanted[like] = losses(shard(like, stack(blocks), **options), **how)
            found = losses(shard(name, stack(blocks), **options), **how)
            assert torch.equal(found, wanted[like]), name

    run_ranks(check, 4, timeout=200)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_recomputed_modules_and_several_forwards_before_backward(name):
    def check():
        found = []
        for strategy in (name, "hsdp" if name == "hfsdp" else "zero3"):
            model = shard(strategy)
            x = batch(0).requires_grad_()
            y = checkpoint(model, x, use_reentrant=False).sum()
            (y + model(batch(1)).sum() + model[0](model[0](batch(2))).sum()).backward()
            found.append([x.grad, *(param.grad.full_tensor() for param in model.parameters())])
        assert all(map(torch.equal, *found))

    run_ranks(check, 4)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_parameters_on_meta_are_materialized(name):
    def check():
        with torch.device("meta"):
            model = shard(name)
        model.to_empty(device="cpu")
        model.load_state_dict(shard(name).state_dict())
        assert torch.equal(losses(model, steps=2), losses(shard(name), steps=2))

    run_ranks(check, 4)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_cast_of_the_module_is_seen_by_evaluation(name):
    def check():
        model, x = shard(name), batch(0)
        with torch.no_grad():
            wanted = model(x)
            assert model.double()(x.double()).dtype == torch.float64
            assert torch.equal(model.float()(x), wanted)
        assert torch.equal(losses(model, steps=2), losses(shard(name), steps=2))

    run_ranks(check, 4)


@pytest.mark.parametrize(
    "name", ["zero2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ddp", "zero1"))]
)
def test_parameters_that_tensor_parallelism_shards(name):
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = []
        for strategy in (name, "zero3"):
            torch.manual_seed(3)
            model = nn.Linear(6, 8, bias=False)
            placed = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
            model.weight = nn.Parameter(placed)
            fsdp.fully_shard(model, mesh=mesh["dp"], placements=strategy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(3):
                torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
                x = distribute_tensor(torch.randn(4, 6), mesh["tp"], [Replicate()])
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(model.weight.full_tensor())
        assert torch.equal(*found)

    run_ranks(check, 4)


@needs_ordered_ranks
def test_hfsdp_on_a_mesh_of_all_parallelism():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        dims = DataParallelMeshDims(shard="inner", replicate="outer")
        found = []
        for name in ("hsdp", "hfsdp"):
            model = stack(1)
            for module in model.modules():
                for key, param in list(module._parameters.items()):
                    placed = distribute_tensor(param.detach(), mesh, [Replicate()] * 2)
                    module._parameters[key] = nn.Parameter(placed)
            shard(name, model, mesh=mesh, dp_mesh_dims=dims)
            x = distribute_tensor(batch(0, 0), mesh, [Replicate()] * 2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            groups = (
                {param.device_mesh.get_group().group_name for param in model.parameters()}
                if (name == "hfsdp")
                else {None}
            )
            assert len(groups) == 1  # one for all modules
            found.append([param.full_tensor() for param in model.parameters()])
        assert all(map(torch.equal, *found))

    run_ranks(check, 4)
