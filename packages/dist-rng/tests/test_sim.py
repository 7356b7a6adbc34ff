"""On a simulated accelerator an emulated GPU's numbers are drawn, and others are refused."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

import dist_rng
from dist_rng import Geometry
from dist_rng.dtensor.agreement import require_equal_generators
from dist_rng.emulation.device import emulated_device
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks

DRAWS = {
    "normal": lambda x: x.normal_(),
    "uniform": lambda x: x.uniform_(-1, 1),
    "integers": lambda x: x.random_(0, 1000),
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "dropout": lambda x: torch.native_dropout(x.fill_(1.0), 0.3, True)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_dtensors_draw_the_numbers_of_the_emulated_gpu(name):
    def check():
        dist_rng.install()

        def drawn(device):
            mesh = init_device_mesh(device, (2,))
            with emulated_device(Geometry(sm_count=132, max_threads_per_sm=2048)):
                torch.manual_seed(7)
                x = zeros(8, 6, device_mesh=mesh, placements=[Shard(1)])
                return DRAWS[name](x).full_tensor().cpu()

        found, expected = drawn("sim"), drawn("cpu")
        return torch.equal(found, expected), found.unique().numel()

    for same, different in run_sim_ranks(check, 2):
        assert same
        assert different > 1


def test_without_an_emulated_gpu_the_generator_is_unknown():
    def check():
        dist_rng.install()
        x = zeros(8, 6, device_mesh=init_device_mesh("sim", (2,)), placements=[Shard(0)])
        with pytest.raises(TypeError, match="whose generator is unknown; draw on the CPU"):
            x.normal_()

    run_sim_ranks(check, 2)


@pytest.mark.parametrize("same", [True, False])
def test_generators_of_the_device_are_compared(same):
    def check():
        mesh = init_device_mesh("sim", (2,))
        torch.get_device_module("sim").manual_seed(0 if same else mesh.get_local_rank())
        try:
            require_equal_generators(mesh)
        except RuntimeError:
            return False
        return True

    assert run_sim_ranks(check, 2) == [same] * 2
