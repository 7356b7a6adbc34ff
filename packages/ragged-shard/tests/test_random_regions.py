"""Random numbers for our placements: those of one device with dist-rng, and a rank's without."""

import warnings

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard, random_regions
from testkit import TORCH_RELEASE, assert_bitwise, each_rank, fake_mesh, run_ranks

R = Replicate()
LAYOUTS = {
    "rows": ((2,), [RaggedShard((0,), (5, 7))]),
    "an empty shard": ((2,), [RaggedShard((0,), (0, 1))]),
    "elements": ((3,), [RaggedShard((0, 1), (7, 0, 89))]),
    "an owner": ((2,), [RaggedShard.owned_by(1, 2)]),
    "interleaved": ((2,), [InterleavedShard(0, 3)]),
    "interleaved unevenly": ((3,), [InterleavedShard(1, 2)]),
    "interleaved in units": ((2,), [InterleavedShard(0, 2, unit=2)]),
    "hybrid": ((2, 2), [R, RaggedShard((0,), (1, 3))]),
    "strided": ((2, 2), [StridedRaggedShard((0,), (1, 5), 2), Shard(0)]),
    "over uneven rows": ((2, 5), [StridedRaggedShard((0, 1), (10, 14), 5, 1), Shard(0)]),
    "over columns": ((2, 2), [RaggedShard((0, 1), (1, 2)), Shard(1)]),
    "over interleaved": ((2, 2), [RaggedShard((0,), (1, 2)), InterleavedShard(0, 3)]),
}


DRAWS = {
    "uniform_": lambda x: x.normal_().uniform_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.2),
    "log_normal_": lambda x: x.log_normal_(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_draws_its_part_of_one_devices_numbers(name):
    mesh_shape, placements = LAYOUTS[name]
    dist_rng = pytest.importorskip("dist_rng", reason="its entry points are tested where it is")
    dist_rng.install()
    try:
        for draw in DRAWS.values():
            torch.manual_seed(7)
            whole, state = draw(torch.empty(12, 8)), torch.get_rng_state()
            for _rank, mesh in each_rank(mesh_shape):
                expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                torch.manual_seed(7)
                drawn = draw(torch.zeros_like(expected))
                assert drawn.placements == tuple(placements)
                assert_bitwise(drawn.to_local(), expected.to_local(), name)
                assert torch.equal(torch.get_rng_state(), state)
        for _rank, mesh in each_rank(mesh_shape):
            drawn = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            torch.manual_seed(7)
            torch.nn.init.normal_(drawn)
            torch.nn.functional.dropout(drawn, 0.5)
    finally:
        dist_rng.uninstall()


@pytest.mark.ranks
def test_poisson_and_multinomial_gather_and_give_one_devices_numbers():
    pytest.importorskip("dist_rng", reason="its entry points are tested where it is")

    def body(rates):
        from torch.distributed.device_mesh import init_device_mesh

        import dist_rng

        dist_rng.install()
        mesh, found = init_device_mesh("cpu", (2, 2)), []
        for size, placements in LAYOUTS.values():
            if size != (2, 2):
                continue
            x = distribute_tensor(rates, mesh, placements)
            torch.manual_seed(7)
            drawn, samples = torch.poisson(x), torch.multinomial(x, 3)
            assert drawn.placements == tuple(placements)
            found.append((drawn.full_tensor(), samples.full_tensor(), torch.get_rng_state()))
        dist_rng.uninstall()
        return found

    rates = torch.linspace(0.25, 12, 12 * 8).view(12, 8)
    torch.manual_seed(7)
    expected = torch.poisson(rates), torch.multinomial(rates, 3), torch.get_rng_state()
    for found in run_ranks(body, 4, rates):
        assert len(found) == 4
        for tensors in found:
            for tensor, wanted in zip(tensors, expected, strict=True):
                assert_bitwise(tensor, wanted)


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.parametrize("name", LAYOUTS)
def test_without_dist_rng_a_rank_draws_its_shard_with_its_own_generator(name):
    mesh_shape, placements = LAYOUTS[name]
    # Interleaved shards take torch's strategies, and 2.11 has none for exponential_.
    lacks = TORCH_RELEASE < (2, 12) and name.startswith("interleaved")

    def draw(tensor):
        tensor.normal_().uniform_(0, 2)
        return tensor if lacks else tensor.exponential_()

    for _rank, mesh in each_rank(mesh_shape):
        drawn = distribute_tensor(torch.zeros(12, 8), mesh, placements, src_data_rank=None)
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* each rank draws")
            draw(drawn)
            like = torch.randn_like(drawn)
        torch.manual_seed(7)
        alone = draw(torch.empty_like(drawn.to_local()))
        assert like.placements == drawn.placements == tuple(placements)
        assert_bitwise(drawn.to_local(), alone, name)
        assert_bitwise(like.to_local(), torch.randn_like(alone), name)


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_own_numbers_are_warned_of_once_in_a_process(monkeypatch):
    monkeypatch.setattr(random_regions, "_warned", False)
    with fake_mesh((2,)) as mesh:
        placements = [RaggedShard((0,), (5, 7))]
        drawn = distribute_tensor(torch.zeros(12, 8), mesh, placements, src_data_rank=None)
        with pytest.warns(UserWarning, match=r"normal_.* own shard.*dist_rng.install\(\)"):
            drawn.normal_()
        drawn.uniform_()
        with pytest.raises(RuntimeError, match="install dist-rng"):
            drawn.random_(9)
