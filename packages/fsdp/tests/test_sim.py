"""On a simulated accelerator: the losses of the CPU, bit for bit, and no race on its memory."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp
from fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, Rows, Tiles
from fsdp.optim import SOAP, Adam8bit, Muon
from fsdp.plan import fully_shard as fully_shard_of_plans
from testkit.models import residual_stack
from testkit.models.residual_stack import batch, losses, stack
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks


def accumulates(model, last):
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


def prefetches(model, _):
    blocks = list(model)[:-1]
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def stages(model, _):
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)


def unshards(model, _):
    """Before the first forward, which sets the streams, on the current stream."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.unshard()


def stays_unsharded(model, _):
    model.set_keep_unsharded_storage(True)


def tiles_of_matrices(param):
    return Tiles(rows=4, cols=4) if param.ndim == 2 else None


def of_matrices(optimizer, **options):
    """Of a kind that updates whole matrices, with AdamW for the other parameters."""

    def make(model):
        named = list(model.named_parameters())
        matrices = [(name, param) for name, param in named if param.ndim == 2]
        others = [(name, param) for name, param in named if param.ndim != 2]
        flag = {f"use_{optimizer.__name__.lower()}": False}
        return optimizer([{"params": matrices}, {"params": others} | flag], lr=1e-2, **options)

    return make


# By name: options of fully_shard, those of `losses`, and how many ranks, if not 2.
DEFAULT = {
    "offload": ({"offload_policy": CPUOffloadPolicy()}, {"clip": 0.1}),
    "accumulation": ({}, {"micro": 2, "prepare": accumulates}),
    # Its gathers have no collective that orders the copy before them.
    "one rank": ({}, {}, 1),
    "gathered over two, unsharded before": (
        {"reshard_after_forward": 2},
        {"prepare": unshards},
        4,
    ),
}
SLOW = {
    "defaults": ({}, {}),
    "ZeRO-2": ({"placements": "zero2"}, {"clip": 0.1}),
    "mixed precision": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, {}),
    "HFSDP": ({"mesh": (2, 2), "placements": "hfsdp"}, {}, 4),
    "unsharded memory stays": (
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        {"prepare": stays_unsharded},
    ),
    "ZeRO-1, accumulation": (
        {"placements": "zero1"},
        {"micro": 2, "prepare": accumulates},
    ),
    "mixed precision on one rank": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, {}, 1),
    "prefetch": ({}, {"prepare": prefetches}),
    "kept after forward": ({"reshard_after_forward": False}, {"clip": 0.1}),
    "rows": ({"shard_placement_fn": lambda param: Rows(3) if param.ndim == 2 else None}, {}),
    "quantized": ({"quantize_fn": tiles_of_matrices}, {}),
    "memory of the process group": ({}, {"prepare": stages}),
    "HSDP": ({"mesh": (2, 2)}, {}, 4),
    "HSDP, accumulation": ({"mesh": (2, 2)}, {"micro": 2, "prepare": accumulates}, 4),
    "gathered over two after forward": ({"reshard_after_forward": 2}, {}, 4),
    "gathered over two, memory of the process group": (
        {"reshard_after_forward": 2}, {"prepare": stages}, 4,
    ),
    "DDP": ({"placements": "ddp"}, {}),
    "ZeRO-2, mixed precision": (
        {"placements": "zero2", "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"micro": 2, "prepare": accumulates},
    ),
    "ZeRO-2, offload": (
        {"placements": "zero2", "offload_policy": CPUOffloadPolicy()}, {"clip": 0.1},
    ),
    "ZeRO-2, prefetch": ({"placements": "zero2"}, {"prepare": prefetches}),
    "ZeRO-2, memory of the process group": ({"placements": "zero2"}, {"prepare": stages}),
    "HFSDP, accumulation": (
        {"mesh": (2, 2), "placements": "hfsdp"}, {"micro": 2, "prepare": accumulates}, 4,
    ),
    "HFSDP, mixed precision, prefetch": (
        {
            "mesh": (2, 2), "placements": "hfsdp",
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        },
        {"prepare": prefetches}, 4,
    ),
    "HFSDP, offload": (
        {"mesh": (2, 2), "placements": "hfsdp", "offload_policy": CPUOffloadPolicy()},
        {"clip": 0.1}, 4,
    ),
    "HFSDP, quantized": (
        {"mesh": (2, 2), "placements": "hfsdp", "quantize_fn": tiles_of_matrices}, {}, 4,
    ),
    "Adam8bit": ({}, {"make_optimizer": lambda m: Adam8bit(m.named_parameters(), lr=1e-2)}),
    "Muon": ({}, {"make_optimizer": of_matrices(Muon)}),
    "SOAP": ({}, {"make_optimizer": of_matrices(SOAP)}),
}  # fmt: skip


def foreach(model):
    """A device's default, which the CPU's is not."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def trained(device, world, options, how):
    shape = options.get("mesh", (world,))
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = residual_stack.shard(
        fsdp, stack().to(device), **options | {"mesh": mesh}, strategy="native"
    )
    found = losses(model, device=device, **{"make_optimizer": foreach} | how)
    whole = [param.full_tensor().cpu() for param in model.parameters()]
    return found.cpu(), whole


@pytest.mark.parametrize(
    "name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_training_has_the_bits_of_the_cpu(name):
    options, how, *ranks = (DEFAULT | SLOW)[name]
    world = ranks[0] if ranks else 2

    def check():
        found, params = trained("sim", world, options, how)
        expected, wanted = trained("cpu", world, options, how)
        return found.tolist(), expected.tolist(), all(map(torch.equal, params, wanted))

    for found, expected, same in run_sim_ranks(check, world, timeout=120):
        assert found[0] != found[-1]
        if name == "Adam8bit":  # the host has a kernel of its own, devices have torch's operators
            assert found == pytest.approx(expected, rel=1e-5)
            continue
        assert found == expected
        assert same


def test_an_all_reduce_hook_runs_on_its_stream_between_the_reduction_and_the_gradients():
    def check():
        def gradients(device):
            mesh = init_device_mesh(device, (2,))
            model = residual_stack.shard(fsdp, stack().to(device), mesh=mesh, strategy="native")
            module = torch.get_device_module(device)
            stream = module.Stream() if device == "sim" else None
            seen = []

            def hook(shard):
                seen.append(stream is None or module.current_stream() == stream)
                shard.mul_(4.0)

            for part in model.modules():
                if isinstance(part, fsdp.FSDPModule):
                    part.set_all_reduce_hook(hook, stream=stream)
            for step in range(2):
                model(residual_stack.batch(step).to(device)).square().mean().backward()
            assert seen == [True] * 8
            return [param.grad.full_tensor().cpu() for param in model.parameters()]

        return [torch.equal(*pair) for pair in zip(gradients("sim"), gradients("cpu"), strict=True)]

    assert run_sim_ranks(check, 2) == [[True] * 20] * 2


def test_uneven_tensor_parallelism_has_the_bits_of_the_cpu():
    """Seven rows are four and three, and a rank's shard of three is shorter than that of four."""

    def check():
        def trained(device):
            mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
            torch.manual_seed(3)
            model = torch.nn.Linear(8, 7).to(device)
            for name, param in list(model.named_parameters()):
                placed = distribute_tensor(param.detach(), mesh["tp"], [Shard(0)])
                setattr(model, name, torch.nn.Parameter(placed))
            fsdp.fully_shard(model, mesh=mesh["dp"], strategy="native")
            optimizer, found = foreach(model), []
            for step in range(3):
                x = DTensor.from_local(
                    batch(step, mesh.get_local_rank("dp")).to(device), mesh["tp"]
                )
                loss = model(x).square().sum()
                loss.backward()
                norm = fsdp.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                found += [loss.full_tensor().item(), norm.item()]
            return found, [param.full_tensor().tolist() for param in model.parameters()]

        return trained("sim"), trained("cpu")

    for found, expected in run_sim_ranks(check, 4, timeout=120):
        assert found == expected
        assert found[0][0] != found[0][-2]


@pytest.mark.parametrize("pinned", [True, False])
def test_offloaded_shards_are_pinned_where_the_policy_says_so(pinned):
    def check():
        policy = CPUOffloadPolicy(pin_memory=pinned)
        mesh = init_device_mesh("sim", (2,))
        model = residual_stack.shard(fsdp, stack().to("sim"), mesh=mesh, offload_policy=policy)
        shards = [param.to_local() for param in model.parameters()]
        shards = [shard for shard in shards if shard.numel()]
        return {(shard.device.type, shard.is_pinned()) for shard in shards}

    assert run_sim_ranks(check, 2) == [{("cpu", pinned)}] * 2


def test_a_module_that_runs_twice_has_the_gradients_of_the_cpu():
    def check():
        def gradients(device):
            block = residual_stack.ResidualBlock()
            torch.manual_seed(3)
            for param in block.parameters():
                torch.nn.init.normal_(param)
            block, mesh = block.to(device), init_device_mesh(device, (2,))
            fsdp.fully_shard(block, mesh=mesh, strategy="native")
            model = torch.nn.Sequential(block, torch.nn.Tanh(), block)
            fsdp.fully_shard(model, mesh=mesh, strategy="native")
            model(batch(0).to(device)).square().mean().backward()
            return [param.grad.full_tensor().cpu() for param in block.parameters()]

        return all(map(torch.equal, gradients("sim"), gradients("cpu")))

    assert run_sim_ranks(check, 2) == [True] * 2


def test_muon_that_exchanges_one_matrix_at_a_time_has_the_bits_of_one_exchange():
    """Results of one matrix are sent back while the next one is computed."""

    def check():
        single, whole = (
            trained("sim", 2, {}, {"make_optimizer": of_matrices(Muon, bucket_mb=size)})
            for size in (1e-5, 25)
        )
        return single[0].tolist() == whole[0].tolist(), all(map(torch.equal, single[1], whole[1]))

    assert run_sim_ranks(check, 2) == [(True, True)] * 2


def gradients(device, prepare=lambda model, last: None, finish=lambda model: None):
    """Returns this rank's gradients of two backwards."""
    mesh = init_device_mesh(device, (2,))
    model = residual_stack.shard(fsdp, stack().to(device), mesh=mesh, strategy="native")
    for number in range(2):
        prepare(model, number == 1)
        model(batch(number).to(device)).square().mean().backward()
    finish(model)
    return [param.grad.to_local().cpu() for param in model.parameters()]


@pytest.mark.parametrize("own", [False, True], ids=["parameters' memory", "own memory"])
def test_a_backward_waits_for_reductions_of_the_backward_before(own):
    def overlaps(model, last):
        model.set_reduce_scatter_max_input_buffers(8)
        model.set_keep_unsharded_storage(own)  # of which gradients cannot have the memory
        model.set_is_last_backward(last)  # after the first one all its reductions are in flight

    def check():
        return all(map(torch.equal, gradients("sim", overlaps), gradients("cpu")))

    assert run_sim_ranks(check, 2) == [True] * 2


def test_finalize_backward_completes_gradients():
    def defers(model, _):
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)

    def finish(model):
        model.set_requires_gradient_sync(True)
        model.finalize_backward()

    def check():
        return all(
            map(torch.equal, gradients("sim", defers, finish), gradients("cpu", accumulates))
        )

    assert run_sim_ranks(check, 2) == [True] * 2


def test_unshard_gathers_what_an_optimizer_has_just_written():
    def check():
        mesh = init_device_mesh("sim", (2,))
        model = residual_stack.shard(fsdp, stack().to("sim"), mesh=mesh)
        same = []
        for _ in range(2):  # before the first forward, and behind a step
            model[0].unshard()
            gathered = [param.detach().clone() for param in model[0].parameters()]
            model[0].reshard()
            same += map(torch.equal, gathered, (p.full_tensor() for p in model[0].parameters()))
            losses(model, device="sim", steps=1, make_optimizer=foreach)
        return all(same)

    assert run_sim_ranks(check, 2) == [True] * 2


def test_a_plan_gathers_for_a_comparison_what_an_optimizer_has_just_written():
    def check():
        mesh = init_device_mesh("sim", (2,))
        model = residual_stack.shard(fsdp, stack().to("sim"), mesh=mesh)
        same = []
        for _ in range(2):  # before the first forward, and behind a step
            with fully_shard_of_plans.unsharded(model):
                gathered = [param.detach().clone() for param in model.parameters()]
            same += map(torch.equal, gathered, (p.full_tensor() for p in model.parameters()))
            losses(model, device="sim", steps=1, make_optimizer=foreach)
        return all(same)

    assert run_sim_ranks(check, 2) == [True] * 2


def test_a_step_that_failed_is_forgotten_behind_its_reductions():
    def check():
        mesh = init_device_mesh("sim", (2,))
        model = residual_stack.shard(fsdp, stack().to("sim"), mesh=mesh)

        def fail(_):
            raise ValueError("in backward")

        x = batch(0).to("sim").requires_grad_()
        x.register_hook(fail)
        with pytest.raises(ValueError, match="in backward"):
            model(x).square().mean().backward()
        model.reset_iter_state()
        return losses(model, device="sim").isfinite().all().item()

    assert run_sim_ranks(check, 2) == [True] * 2


def test_unsharded_memory_is_freed_after_a_step():
    def check():
        memory, allocated = torch.accelerator.memory_allocated, []
        before = memory()
        mesh = init_device_mesh("sim", (2,))
        model = residual_stack.shard(fsdp, stack(8).to("sim"), mesh=mesh)
        shards = sum(param.to_local().nbytes for param in model.parameters())
        losses(model, device="sim", prepare=lambda *_: allocated.append(memory() - before))
        return allocated[-1], 2 * shards, 8 * 2 * shards

    for used, states, unsharded in run_sim_ranks(check, 2):
        assert states <= used < states + unsharded / 8


@pytest.mark.parametrize("name", ["zero1", "ddp"])
def test_parameters_that_changed_between_forward_and_backward_are_gathered_behind_the_change(name):
    def check():
        def gradients(device):
            mesh = init_device_mesh(device, (2,))
            policy = MixedPrecisionPolicy(torch.float64)
            model = residual_stack.shard(
                fsdp, stack().to(device), mesh=mesh, strategy="native", placements=name,
                mp_policy=policy,
            )  # fmt: skip
            loss = model(batch(0).to(device)).square().mean()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
            loss.backward()
            return [param.grad.full_tensor().cpu() for param in model.parameters()]

        return all(map(torch.equal, gradients("sim"), gradients("cpu")))

    assert run_sim_ranks(check, 2) == [True] * 2
