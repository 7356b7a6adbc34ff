"""Random operators that communicate, and whole modules, on real gloo ranks."""

import pytest
import torch
from torch import nn

from testkit import CommLog, assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks

BOUNDS = {"wide": (-2.0, 2.0), "one side": (-0.5, 1.0), "far out": (2.0, 3.0)}


def truncated(bounds, tensor):
    torch.manual_seed(11)
    low, high = bounds
    with torch.no_grad():
        nn.init.trunc_normal_(tensor, 0.0, 1.0, low, high)
    return tensor, torch.get_rng_state()


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.filterwarnings("ignore:mean is more than 2 std from")
def test_trunc_normal_agrees_on_its_rounds(bounds, ranks):
    def body(bounds, ranks):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        import dist_rng

        dist_rng.install()
        mesh = init_device_mesh("cpu", (2, ranks // 2))
        empty = distribute_tensor(torch.zeros(33, 17), mesh, [Shard(0), Shard(1)])
        tensor, state = truncated(bounds, empty)
        full = tensor.full_tensor()
        dist_rng.uninstall()
        return full, state

    expected, state = truncated(bounds, torch.zeros(33, 17))
    for full, end in run_ranks(body, ranks, bounds, ranks):
        assert_bitwise(full, expected)
        assert torch.equal(end, state)


def test_a_tensor_parallel_mlp_with_dropout_trains_as_one_device():
    def train(shard):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            parallelize_module,
        )

        import dist_rng

        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Sequential(
                nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.Dropout(0.1)
            )
        if shard:
            dist_rng.install()
            mesh = init_device_mesh("cpu", (2,))
            schedule = {
                "0": ColwiseParallel(use_local_output=False),
                "3": RowwiseParallel(
                    input_layouts=Shard(-1), output_layouts=Replicate(), use_local_output=False
                ),
            }
            parallelize_module(model, mesh, schedule)
            parallelize_module(
                model,
                mesh,
                PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
            )
        model.to_empty(device="cpu")
        for layer in (model[0], model[3]):
            layer.reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(5):
            x = torch.randn(4, 8)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.full_tensor() if shard else loss).item())
        weight = model[0].weight.detach()
        dist_rng.uninstall()
        return losses, weight.full_tensor() if shard else weight, torch.get_rng_state()

    losses, _, state = train(shard=False)
    for sharded_losses, _, sharded_state in run_ranks(train, 2, shard=True):
        assert sharded_losses == pytest.approx(losses, abs=1e-6)
        assert torch.equal(sharded_state, state)


def test_different_generators_raise_on_every_rank_before_the_first_draw():
    def body(same):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        import dist_rng

        rank = torch.distributed.get_rank()
        torch.manual_seed(0 if same else rank // 3)  # one rank of four differs
        mesh = init_device_mesh("cpu", (2, 2))
        dtensor = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)])
        dist_rng.install(check_generators=True)
        try:
            if same:
                dtensor.uniform_()
            else:
                with pytest.raises(RuntimeError, match="expected equal generators"):
                    dtensor.uniform_()
            # Once per mesh: the second draw does not communicate.
            with CommLog() as log:
                dtensor.normal_()
            log.assert_counts({})
        finally:
            dist_rng.uninstall()

    run_ranks(body, 4, True)
    run_ranks(body, 4, False)
