"""What a process holds does not grow: tensors, their storages, process groups."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp
from testkit import CommLog, run_ranks
from testkit.models.residual_stack import batch, losses, shard, stack

pytestmark = pytest.mark.ranks


class Checkpointed(nn.Module):
    """Residual blocks that are recomputed, by the reentrant way of pytorch#169349 or the other."""

    def __init__(self, reentrant):
        super().__init__()
        *blocks, self.head = stack()
        self.blocks, self.reentrant = nn.ModuleList(blocks), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def _alive():
    """Counts this process's tensors, bytes of their storages, and process groups."""
    while gc.collect():  # a cycle may keep another one
        pass
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    plain = [getattr(one, "_local_tensor", one) for one in tensors]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in plain}
    groups = len(dist.distributed_c10d._world.pg_map)
    return len(tensors), sum(storages.values()), groups


def _grows(action, *, before, after):
    """Repeats an action; returns what is alive after some calls, and after some more."""
    found = []
    for calls in (before, after):
        for number in range(calls):
            action(number)
        found.append(_alive())
    return found


def _step(model, optimizer, length):
    x = torch.randn(length, 8, requires_grad=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


STEPS = [20, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    "reentrant",
    [pytest.param(True, marks=pytest.mark.slow), False],
    ids=["reentrant", "not reentrant"],
)
def test_recomputed_steps_of_changing_lengths(reentrant, steps):
    def check():
        model = Checkpointed(reentrant)
        for block in model.blocks:
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        lengths = [3, 17, 5, 64, 1]
        return _grows(
            lambda number: _step(model, optimizer, lengths[number % 5]), before=10, after=steps
        )

    for before, after in run_ranks(check, 2, timeout=300):
        assert after == before


def test_state_dicts_and_parameters_gathered_by_hand():
    def check():
        model = shard(fsdp, stack())
        optimizer = torch.optim.AdamW(model.parameters())
        _step(model, optimizer, 3)

        def action(_):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            for module in model.modules():
                if isinstance(module, fsdp.FSDPModule):
                    module.unshard()
            for module in model.modules():
                if isinstance(module, fsdp.FSDPModule):
                    module.reshard()

        return _grows(action, before=3, after=20)

    for before, after in run_ranks(check, 2):
        assert after == before


def test_deleted_models():
    def check():
        mesh = init_device_mesh("cpu", (2,))

        def action(_):
            model = shard(fsdp, stack(), mesh=mesh)
            _step(model, torch.optim.AdamW(model.parameters()), 3)

        return _grows(action, before=3, after=10)

    for before, after in run_ranks(check, 2):
        assert after == before


def test_that_growth_is_found():
    def check():
        model, left = shard(fsdp, stack()), []
        return _grows(lambda _: left.append(model(batch(0)).detach()), before=3, after=3)

    for before, after in run_ranks(check, 2):
        assert after[0] == before[0] + 3
        assert after[1] == before[1] + 3 * 3 * 4 * 4


def test_a_mesh_of_one_rank_trains_as_an_unsharded_model_and_sends_nothing():
    """pytorch#152710: FSDP2 gathers and reduces there, too."""

    def check():
        sizes = (1, 2)
        mesh = init_device_mesh("cpu", sizes[::-1], mesh_dim_names=("others", "shard"))["shard"]
        model = shard(fsdp, stack(), mesh=mesh, strategy="native")
        optimizer = torch.optim.AdamW(model.parameters())
        _step(model, optimizer, 3)
        with CommLog() as log:
            _step(model, optimizer, 3)
        alone = losses(stack())
        return log.counts(), losses(shard(fsdp, stack(), mesh=mesh)), alone

    for counts, actual, alone in run_ranks(check, 2):
        assert counts == {}
        assert torch.equal(actual, alone)
