"""Several mesh axes as one process group: its ranks and their order."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fused_comm.process_groups import flat_group, flat_group_of, group_of_ranks
from testkit import CommLog, fake_mesh, run_ranks


@pytest.mark.parametrize(
    ("axes", "ranks", "position"),
    [
        ((0,), (1, 5), 1),
        ((2,), (4, 5), 1),
        ((0, 1), (1, 3, 5, 7), 2),
        ((0, 2), (0, 1, 4, 5), 3),
        ((0, 1, 2), tuple(range(8)), 5),
    ],
)
def test_the_ranks_along_axes_are_in_the_order_of_the_mesh(axes, ranks, position):
    with fake_mesh((2, 2, 2), rank=5) as mesh:
        flat = flat_group(mesh, axes)
        assert (flat.ranks, flat.position, flat.size) == (ranks, position, len(ranks))
        assert flat.order == tuple(range(len(ranks)))
        assert dist.get_process_group_ranks(flat.group) == list(ranks)


def test_a_group_is_made_once_per_set_of_ranks():
    with fake_mesh((2, 2, 2)) as mesh:
        assert flat_group(mesh, (0, 2)) is flat_group(mesh, (0, 2))
        assert flat_group(mesh, (0, 1, 2)).group is dist.group.WORLD
        assert flat_group(mesh, (0,)).group is mesh.get_group(0)
        assert group_of_ranks((0, 1, 4, 5)) is flat_group(mesh, (0, 2))
    with fake_mesh((2, 2, 2)) as mesh:  # another world: groups of the last one are gone
        assert flat_group(mesh, (0, 1, 2)).group is dist.group.WORLD


@pytest.mark.parametrize("axes", [(), (1, 0), (0, 0), (3,), (-1,)])
def test_axes_out_of_range_or_order_are_refused(axes):
    with fake_mesh((2, 2, 2)) as mesh, pytest.raises(ValueError, match="expected ascending axes"):
        flat_group(mesh, axes)


def test_a_rank_outside_the_mesh_is_refused():
    with fake_mesh((4,), rank=3):
        mesh = DeviceMesh("cpu", torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="rank 3 is not part of"):
            flat_group(mesh, (0,))


def test_positions_follow_a_permuted_mesh():
    with fake_mesh((4,), rank=2):
        mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]))
        flat = flat_group(mesh, (0, 1))
        assert flat.ranks == (3, 1, 2, 0)
        assert flat.order == (3, 1, 2, 0)  # group rank 0 is global rank 0, at position 3
        assert flat.position == 2


def test_positions_of_a_process_group_are_its_group_ranks():
    with fake_mesh((4,), rank=1):
        flat = flat_group_of(dist.group.WORLD)
        assert (flat.ranks, flat.order, flat.position) == ((0, 1, 2, 3), (0, 1, 2, 3), 1)


@pytest.mark.ranks
def test_group_ranks_are_those_of_the_mesh_on_real_ranks():
    """Each rank finds its own position where `order` says that its group rank is."""

    def check():
        found = []
        for order in ([[0, 1], [2, 3]], [[3, 1], [2, 0]], [[1, 0], [3, 2]]):
            mesh = DeviceMesh("cpu", torch.tensor(order))
            for axes in ((0,), (1,), (0, 1)):
                flat = flat_group(mesh, axes)
                gathered = [None] * flat.size
                dist.all_gather_object(gathered, flat.position, group=flat.group)
                found.append(tuple(gathered) == flat.order)
        return found

    assert run_ranks(check, 4) == [[True] * 9] * 4


@pytest.mark.ranks
def test_a_pipeline_stage_makes_its_group_without_the_others():
    """Ranks of another pipeline stage take no part."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
        stage = mesh["dp", "tp"]
        if dist.get_rank() >= 2:
            return None
        with CommLog() as log:
            flat = flat_group(stage, (0, 1))
        total = torch.ones(())
        dist.all_reduce(total, group=flat.group)
        return flat.ranks, total.item(), len(log.calls)

    assert run_ranks(check, 4) == [((0, 1), 2.0, 0)] * 2 + [None] * 2
