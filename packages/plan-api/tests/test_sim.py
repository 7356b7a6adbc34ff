"""On a simulated accelerator: training has the bits of the CPU in both modes, and does not race."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

from plan_api import AttentionMask, Plan, parallelize, zoo
from plan_api.context_parallel import AttentionCall, SequenceSharding
from plan_api.context_parallel.attention import IMPLEMENTATIONS
from plan_api.static.comparison import preserved_state
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models
from testkit.sim.ranks import run_sim_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def llama_plan(mesh):
    return zoo.llama(mesh, dp="dp", sp=True, loss_parallel=True)


def mixtral_plan(mesh):
    return zoo.mixtral(mesh, dp="dp", ep="tp")


# By name: the model, its plan, and the mode. Ranks draw no numbers: generators differ by device.
CASES = {
    "llama, Eager": (models.llama, llama_plan, "eager"),
    "llama, static": (models.llama, llama_plan, "static"),
    "mixtral, Eager": (models.mixtral, mixtral_plan, "eager"),
    "mixtral, static": (models.mixtral, mixtral_plan, "static"),
}
SLOW = {"llama, static", "mixtral, Eager", "mixtral, static"}


def offloaded_plan(mesh):
    plan = zoo.llama(mesh, dp="dp")
    for path in (r"model\.layers\.\d+", ""):
        plan.fully_shard(path, "dp", offload_policy=CPUOffloadPolicy(pin_memory=False))
    return plan


def parallel(device, shape, make, plan, mode):
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    return parallelize(make(**HEADS).to(device), plan(mesh), mode=mode)


def losses(device, *case, steps=3):
    return losses_of(parallel(device, *case), device, steps)


def losses_of(model, device, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        ids = torch.randint(0, models.VOCABULARY, (4, 8)).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("shape", [(1, 2), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_training_has_the_bits_of_the_cpu(name, shape):
    def check():
        return losses("sim", shape, *CASES[name]), losses("cpu", shape, *CASES[name])

    for found, expected in run_sim_ranks(check, torch.Size(shape).numel(), timeout=240):
        assert found[0] != found[-1]
        assert found == expected


@pytest.mark.parametrize("mode", ["static", pytest.param("eager", marks=pytest.mark.slow)])
def test_offloaded_shards_are_on_the_host_and_train_as_on_the_cpu(mode):
    case = (2, 1), models.llama, offloaded_plan, mode

    def check():
        model = parallel("sim", *case)
        found = losses_of(model, "sim")
        devices = {param.to_local().device.type for param in model.parameters()}
        return found, devices, losses("cpu", *case)

    for found, devices, expected in run_sim_ranks(check, 2, timeout=240):
        assert devices == {"cpu"}
        assert found[0] != found[-1]
        assert found == expected


def attended(device, method, causal):
    """Output and gradients of attention over a sequence of 16 tokens on 2 ranks."""
    mesh = init_device_mesh(device, (2,))
    order = SequenceSharding("contiguous" if method == "ulysses" else "zigzag", 2)
    order = order.token_order(16)
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, 16, 8, dtype=torch.float64) for heads in (8, 4, 4, 8)]
    own = order.positions().chunk(2)[mesh.get_local_rank()]
    *local, upstream = (one[:, :, own].contiguous().to(device) for one in whole)
    local = [one.requires_grad_() for one in local]
    call = AttentionCall(mesh, 0, order, AttentionMask(causal), 0.3, "attention")
    out = IMPLEMENTATIONS[method](*local, call)
    out.backward(upstream)
    return [one.detach().cpu() for one in (out, *(one.grad for one in local))]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("method", IMPLEMENTATIONS)
def test_attention_over_a_sharded_sequence_equals_the_cpus(method, causal):
    """By torch's operators, where the CPU has a fused kernel; in float64 to 1e-12."""

    def check():
        pairs = zip(attended("sim", method, causal), attended("cpu", method, causal), strict=True)
        return max((found - expected).abs().max().item() for found, expected in pairs)

    assert max(run_sim_ranks(check, 2)) < 1e-12


def test_the_generator_of_the_device_is_restored():
    """As validation of static mode does, which runs the model once more."""

    def check():
        module = torch.get_device_module("sim")
        model = torch.nn.Linear(2, 2, device="sim")
        before = module.get_rng_state()
        with preserved_state(model):
            module.manual_seed(7)
            changed = not torch.equal(module.get_rng_state(), before)
        return changed, torch.equal(module.get_rng_state(), before)

    assert run_sim_ranks(check, 1) == [(True, True)]


def parallelized(model, mesh):
    return parallelize(model, Plan(mesh).shard("up.weight", Shard(0), "tp"))


def test_a_model_on_another_accelerator_than_the_meshs_is_refused():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        expected = r"a model on 'cpu', .* got 'up.weight' on 'sim:\d'; call model.to\('cpu'\), or"
        with pytest.raises(ValueError, match=expected):
            parallelized(models.TwoLinears().to("sim"), mesh)
        on_device = init_device_mesh("sim", (2,), mesh_dim_names=("tp",))
        return parallelized(models.TwoLinears(), on_device).up.weight.device.type

    assert run_sim_ranks(check, 2) == ["sim"] * 2


def test_a_mesh_on_the_cpu_needs_a_backend_for_the_cpu():
    """As of NCCL, which has none."""

    def check():
        group = dist.new_group(backend="simccl")
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        with pytest.raises(
            ValueError, match=r"axis 0 has no backend for 'cpu'.*init_process_group"
        ):
            parallelized(models.TwoLinears(), mesh)

    run_sim_ranks(check, 2)
