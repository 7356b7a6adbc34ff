"""On a GPU: streams and events keep the order, all-gathers copy nothing, memory is freed."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp
from fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from testkit import mesh_of_one

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WIDTH = 1024


@pytest.fixture
def mesh():
    with mesh_of_one("cuda") as mesh:
        yield mesh


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def model_of(package=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)]).cuda()
    if package is not None:
        for block in model:
            package.fully_shard(block, **options)
        package.fully_shard(model, **options)
    return model


def step(model, optimizer, number):
    torch.manual_seed(number)
    loss = model(torch.randn(16, WIDTH, device="cuda")).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def losses(model, steps=6):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.stack([step(model, optimizer, number) for number in range(steps)])


def test_losses_equal_those_without_sharding(mesh):
    assert torch.equal(losses(model_of(fsdp, mesh=mesh)), losses(model_of()))


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded"])
def test_mixed_precision_losses_equal_fsdp2(mesh, offload):
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    actual, native = (losses(model_of(package, **options)) for package in (fsdp, torch_fsdp))
    assert torch.equal(actual, native)


def test_losses_are_the_same_when_streams_are_busy(mesh):
    """Collectives on busy streams still complete before their results are used."""
    wanted = losses(model_of(fsdp, mesh=mesh))
    model = model_of(fsdp, mesh=mesh)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for number in range(6):
        streams = model._get_fsdp_state().context.streams
        for stream in (streams.all_gather, streams.reduce_scatter, torch.cuda.current_stream()):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000 * (1 + number % 2))
        found.append(step(model, optimizer, number))
    assert torch.equal(torch.stack(found), wanted)


def test_all_gather_issues_no_copies(mesh):
    model = model_of(fsdp, mesh=mesh)
    losses(model, steps=2)
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds, acc_events=True) as profiler:
        for block in model:
            block.unshard()
        torch.cuda.synchronize()
    kernels = [e.name for e in profiler.events() if e.device_type.name == "CUDA"]
    copies = [name for name in kernels if "opy" in name or "Cat" in name]
    # With one rank there is no collective, and the shard's own copy is all that happens.
    assert len(copies) <= len(model)


def test_unsharded_memory_is_freed_after_a_step(mesh):
    before = torch.cuda.memory_allocated()  # of other tests, of which failures keep their tensors
    model = model_of(fsdp, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(2):
        step(model, optimizer, number)
    rest = torch.cuda.memory_allocated() - before
    states = sum(3 * 4 * param.numel() for param in model.parameters())
    assert rest < states + 2**20  # parameters and two moments, and no gathered ones
    step(model, optimizer, 2)
    assert torch.cuda.memory_allocated() - before <= rest + 2**20


def test_symmetric_and_process_group_memory_give_the_same_losses(mesh):
    wanted = losses(model_of(fsdp, mesh=mesh))
    model = model_of(fsdp, mesh=mesh)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    assert torch.equal(losses(model), wanted)
