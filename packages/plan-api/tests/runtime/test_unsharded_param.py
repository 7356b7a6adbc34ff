"""Data parallelism and ZeRO as phases of one plan: the same numbers, other memory and traffic."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from plan_api import Phase, Plan, parallelize, track
from plan_api.runtime.unsharded_param import UnshardedParam
from testkit import CommLog, fake_mesh, models, run_ranks

R, S0 = Replicate(), Shard(0)
WAYS = {
    "DP": {},
    "ZeRO-1": {Phase.OPTIM: S0},
    "ZeRO-2": {Phase.OPTIM: S0, Phase.GRAD: S0},
    "ZeRO-3": {Phase.INIT: S0, Phase.RUN: R},
}
WIDTH = 6  # uneven on 4 ranks


class Layers(nn.Module):
    """Linears in a row, the last one frozen, the middle ones recomputed if asked."""

    def __init__(self, width=WIDTH, recomputes=None, count=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.layers[3].requires_grad_(False)
        self.recomputes = recomputes

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if self.recomputes is not None and number == 1:
                x = checkpoint(self._run, layer, x, use_reentrant=self.recomputes)
            elif self.recomputes is not None and number == 2:
                # The gradient of what the module returns comes before it is computed again.
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.recomputes))
            else:
                x = self._run(layer, x)
        return x

    @staticmethod
    def _run(layer, x):
        return torch.tanh(layer(x))


def plan_of(mesh, way):
    plan = Plan(mesh).shard("<in>", S0, "dp").shard("<out>", [R] * mesh.ndim)
    for phase, placement in WAYS[way].items():
        plan.shard(r"layers\.\d+\.(weight|bias)", placement, "dp", phase)
    if "tp" in plan.axes:
        plan.shard(r"layers\.[02]\.(weight|bias)", S0, "tp").shard(
            r"layers\.[13]\.weight", Shard(1), "tp"
        )
        plan.shard(r"layers\.[13].<out>", R, "tp")
    return plan


def train(model, steps=4, width=WIDTH):
    return models.train(
        model, lambda model: model(torch.randn(8, width)).square().mean(), steps=steps, lr=1e-2
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "recomputes"),
    [
        ((2,), None),
        ((2,), True),
        ((2, 2), None),
        *(
            pytest.param(shape, recomputes, marks=pytest.mark.slow)
            for shape, recomputes in (
                ((2,), False),
                ((4,), None),
                *itertools.product(((2, 2), (4,)), (False, True)),
            )
        ),
    ],
    ids=str,
)
def test_replication_and_zero_1_to_3_train_as_one_device(shape, recomputes):
    def check():
        names = ("dp", "tp")[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        return {
            way: train(parallelize(Layers(recomputes=recomputes), plan_of(mesh, way)))
            for way in WAYS
        }

    expected = train(Layers(recomputes=recomputes))
    for found in run_ranks(check, 4 if shape != (2,) else 2, timeout=120):
        for way, losses in found.items():
            assert losses == pytest.approx(expected, abs=1e-6), way


@pytest.mark.ranks
def test_a_retained_graph_runs_backward_twice():
    """What was let go after the first is gathered again for the second."""

    def check():
        mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), {}
        for way in WAYS:
            model = parallelize(Layers(), plan_of(mesh, way))
            loss = model(torch.ones(8, WIDTH)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found[way] = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
        return found

    alone = Layers()
    for _ in range(2):
        alone(torch.ones(8, WIDTH)).square().mean().backward()
    expected = [p.grad for p in alone.parameters() if p.requires_grad]
    for found in run_ranks(check, 2, timeout=120):
        for way, grads in found.items():
            torch.testing.assert_close(grads, expected, msg=lambda text, way=way: f"{way}: {text}")


class Squares(nn.Module):
    """Computes with its weight's local tensor, which autograd saves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0))

    def forward(self, x):
        return x.to_local() * self.weight.to_local() ** 2


def test_saved_local_tensors_are_filled_for_backward():
    with fake_mesh((2,), ("dp",)) as mesh:
        plan = Plan(mesh).shard("weight", S0, "dp").shard("weight", R, "dp", Phase.RUN)
        model = parallelize(Squares(), plan.shard("<in>", R, "dp"))
        for _ in range(2):
            model(torch.ones(8)).sum().backward()
        assert model.weight.grad.shape == (8,)


def test_frozen_parameters_are_freed_after_backward():
    with fake_mesh((2,), ("dp",)) as mesh:
        gc.collect()
        model = parallelize(Layers(), plan_of(mesh, "ZeRO-3"))
        model(torch.ones(8, WIDTH)).square().mean().backward()
        copies = objects(UnshardedParam)
        assert len(copies) == 8
        assert not any(copy.is_allocated for copy in copies)


def test_writes_to_the_local_tensor_are_unsharded():
    """As DCP loads a checkpoint."""
    with fake_mesh((2,), ("dp",)) as mesh:
        plan = Plan(mesh).shard("weight", S0, "dp", Phase.OPTIM).shard("<in>", R, "dp")
        model = parallelize(Squares(), plan)
        model(torch.ones(8))
        with torch.no_grad():
            model.weight._local_tensor.fill_(3.0)
        assert model(torch.ones(8))[:4].tolist() == [9.0] * 4


# What each way keeps on each of n ranks, of all elements: of parameters, and of gradients while
# backward runs; and what it sends in a step, where a collective that gives every rank all of them
# counts as one (Rajbhandari et al., ZeRO, section 7).
EXPECTED = {
    "DP": lambda n: (1, 1, 2),
    "ZeRO-1": lambda n: (1 + 1 / n, 1, 2),
    "ZeRO-2": lambda n: (1 + 1 / n, 1 / n, 2),
    "ZeRO-3": lambda n: (1 / n, 1 / n, 3),
}
LAYERS, BROAD = 16, 64
LARGE = BROAD * BROAD  # bytes: a quarter of a weight, twice an activation


def storages(tensors):
    found = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return {storage._cdata: storage.nbytes() for storage in found}


def objects(*kinds):
    return [one for one in gc.get_objects() if type(one) in kinds]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"bucket_mb": BROAD * (BROAD + 1) * 4.2 / 2**20}),
        pytest.param(4, {"bucket_mb": BROAD * (BROAD + 1) * 4.2 / 2**20}, marks=pytest.mark.slow),
        pytest.param(2, {"use": ()}, marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "4 ranks", "without fused-comm"],
)
@pytest.mark.parametrize("way", WAYS)
def test_memory_and_communication_are_those_of_the_zero_paper(ranks, options, way):
    """A bucket is a layer: two of them and one new gradient are alive beside what is counted."""

    def check():
        gc.collect()  # models of other tests in this process
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        model = Layers(BROAD, count=LAYERS)
        model.layers[3].requires_grad_(True)
        parallelize(model, plan_of(mesh, way), **options)
        train(model, 2, BROAD)
        gc.collect()
        params = list(model.parameters())
        copies = [copy._local for copy in objects(UnshardedParam)]
        saved, beside = storages([p._local_tensor for p in params] + copies), []

        def look(_):
            large = (t for t in objects(torch.Tensor) if t.nbytes >= LARGE)
            now = storages(large)
            beside.append(sum(size for at, size in now.items() if at not in saved))

        for layer in model.layers[::5]:
            layer.weight.register_post_accumulate_grad_hook(look)
        with CommLog() as log:
            train(model, 1, BROAD)
        elements = sum(p.numel() for p in params)
        sent = sum(call.wire_bytes for call in log.calls if call.input_bytes > 8)
        sent -= 2 * 8 * BROAD * 4 * (ranks - 1) / ranks  # the model's output, and its gradient
        return (
            sum(saved.values()) / 4 / elements,
            max(beside) / 4 / elements,
            sent / 4 / elements * ranks / (ranks - 1),
        )

    parameters, gradients, traffic = EXPECTED[way](ranks)
    for saved, beside, sent in run_ranks(check, ranks, timeout=120):
        assert saved == pytest.approx(parameters, rel=0.001)
        assert gradients - 0.03 <= beside <= gradients + 3.2 / LAYERS
        assert sent == pytest.approx(traffic, rel=0.03)


@pytest.mark.parametrize("way", WAYS)
def test_an_unreferenced_model_is_freed(way):
    with fake_mesh((2,), ("dp",)) as mesh:
        model = parallelize(Layers(), plan_of(mesh, way))
        parts = [param._local_tensor for param in model.parameters()]
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
        del parts
        train(model, 2)
        seen = [weakref.ref(one) for one in (model, *model.parameters())]
        del model
        gc.collect()
        assert [one() for one in seen] == [None] * len(seen)


def test_gathers_are_recorded_with_their_line():
    with fake_mesh((2,), ("dp",)) as mesh:
        model = parallelize(Layers(), plan_of(mesh, "ZeRO-3"))
        train(model, 1)
        with track(model) as record:
            train(model, 1)
        gathers = [one for one in record.collectives if "all_gather" in one.name]
        forward = [one for one in gathers if one.phase.name == "FORWARD" and one.site]
        assert [one.site for one in forward] == [f"layers.{at}" for at in range(4) for _ in "wb"]
        assert {one.cause for one in forward} == {"plan"}
        assert all("test_unsharded_param.py:" in one.line for one in forward)
