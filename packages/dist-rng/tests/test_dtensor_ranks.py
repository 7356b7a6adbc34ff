"""Random operators that communicate, and whole modules, on real gloo ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from testkit import TORCH_RELEASE, CommLog, assert_bitwise, run_ranks

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


ON_GATHERED = {
    "poisson": lambda x: torch.poisson(x),
    "poisson of a transpose": lambda x: torch.poisson(x.t()),
    "poisson of small rates": lambda x: torch.poisson(x / 8),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial with replacement": lambda x: torch.multinomial(x, 30, replacement=True),
    "multinomial of a transpose": lambda x: torch.multinomial(x.t(), 3),
}


def drawn_on(x):
    torch.manual_seed(3)
    torch.randn(3)
    return {name: draw(x) for name, draw in ON_GATHERED.items()}, torch.get_rng_state()


def test_poisson_and_multinomial_of_sharded_inputs_are_one_devices():
    def body(full):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        import dist_rng

        dist_rng.install()
        rows, columns, replica = Shard(0), Shard(1), Replicate()
        mesh, found = init_device_mesh("cpu", (2, 2)), {}
        # torch 2.11 does not transpose these placements with the tensor.
        strided = [(_StridedShard(0, split_factor=2), rows)]
        strided_rows = strided if TORCH_RELEASE >= (2, 12) else []
        for placements in (
            (rows, columns), (columns, rows), (rows, rows), (columns, columns), (replica, rows),
            (columns, replica), (replica, replica), *strided_rows,
        ):  # fmt: skip
            x = distribute_tensor(full, mesh, placements, src_data_rank=None)
            results, state = drawn_on(x)
            found[placements] = (
                {
                    name: (result.full_tensor(), result.placements)
                    for name, result in results.items()
                },
                state,
            )
        dist_rng.uninstall()
        return found

    full = torch.linspace(0.25, 12, 5 * 7).view(5, 7)  # uneven: five rows on two and four ranks
    expected, state = drawn_on(full)
    for found in run_ranks(body, 4, full):
        for placements, (results, end) in found.items():
            assert torch.equal(end, state), placements
            for name, (whole, _) in results.items():
                assert_bitwise(whole, expected[name], f"{name} of {placements}")
            assert results["poisson"][1] == placements
        rows, columns, replica = Shard(0), Shard(1), Replicate()
        of = {placed: results["multinomial"][1] for placed, (results, _) in found.items()}
        assert of[rows, columns] == (rows, replica)
        assert of[columns, rows] == (replica, rows)
        assert of[columns, columns] == of[replica, replica] == (replica, replica)


def test_multinomial_of_one_sharded_row_is_replicated():
    def body(row):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        import dist_rng

        dist_rng.install()
        x = distribute_tensor(row, init_device_mesh("cpu", (2,)), [Shard(0)])
        torch.manual_seed(1)
        result = torch.multinomial(x, 4)
        dist_rng.uninstall()
        assert result.placements == (Replicate(),)
        return result.to_local()

    row = torch.linspace(1, 2, 7)
    torch.manual_seed(1)
    expected = torch.multinomial(row, 4)
    for drawn in run_ranks(body, 2, row):
        assert_bitwise(drawn, expected)


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


@pytest.mark.parametrize("draw", [lambda x: x.uniform_(), torch.poisson], ids=["fill", "gathered"])
def test_different_generators_raise_on_every_rank_before_the_first_draw(draw):
    def body(same, draw):
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
                draw(dtensor)
            else:
                with pytest.raises(RuntimeError, match="expected equal generators"):
                    draw(dtensor)
            # Once per mesh: the second draw does not communicate.
            with CommLog() as log:
                dtensor.normal_()
            log.assert_counts({})
        finally:
            dist_rng.uninstall()

    run_ranks(body, 4, True, draw)
    run_ranks(body, 4, False, draw)
