"""Unmodified models on sharded sequences train with the losses of one device."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from plan_api import installed, parallelize, track, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

ALL = [
    {"cp_method": "ring"},
    {"cp_method": "ring", "cp_order": "contiguous"},
    {"cp_method": "all-gather"},
    {"cp_method": "all-gather", "cp_order": "contiguous"},
    {"cp_method": "ulysses"},
]
# By the mesh: axes with their sizes, options of all cases, and the cases.
MESHES = {
    "cp 2": ({"cp": 2}, {"tp": None}, ALL),
    "cp 4": ({"cp": 4}, {"tp": None}, ALL[:4]),  # 2 key-value heads
    "dp 2, cp 2": ({"dp": 2, "cp": 2}, {"tp": None, "dp": "dp"}, ALL),
    "cp 2, tp 2": ({"cp": 2, "tp": 2}, {}, ALL[:4]),
    "cp 2, tp 2, all sharded": ({"cp": 2, "tp": 2}, {"sp": True, "loss_parallel": True}, ALL[:1]),
}
SLOW = ("cp 4", "dp 2, cp 2", "cp 2, tp 2")


def llama(**changes):
    """4 heads and 2 key-value heads."""
    return models.llama(attn_implementation="sdpa", num_hidden_layers=2, **changes)


def loss_of(model):
    """Returns the loss of sequences of 16 tokens; the last one is padded at its end."""
    ids = torch.randint(0, models.VOCABULARY, (4, 16))
    labels = ids.clone()
    labels[-1, 9:] = -100
    return model(input_ids=ids, labels=labels).loss


def trained(model):
    """Returns the losses of 4 steps, and the norms of the gradients of one more batch."""
    losses = models.train(model, loss_of)
    loss_of(model).backward()
    return losses, [
        getattr(p.grad, "full_tensor", lambda p=p: p.grad)().norm().item()
        for p in model.parameters()
    ]


@pytest.fixture(scope="module")
def single_device():
    return trained(llama())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MESHES]
)
def test_llama_trains_as_on_one_device(name, single_device):
    axes, given, cases = MESHES[name]

    def check():
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        found = []
        for case in cases:
            model = parallelize(llama(), zoo.llama(mesh, cp="cp", **given, **case), strict=True)
            found.append((trained(model), installed(model).coverage.unused_sites))
        return found

    losses, norms = single_device
    for found in run_ranks(check, torch.Size(axes.values()).numel(), timeout=300):
        for case, ((actual, actual_norms), never) in zip(cases, found, strict=True):
            assert actual == pytest.approx(losses, abs=1e-5, rel=0), case
            assert actual_norms == pytest.approx(norms, rel=1e-4), case
            assert never == []


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "cp 2")) for name in MESHES],
)
def test_static_mode_trains_as_eager(name):
    """The first step is compared with Eager, site by site; losses are equal up to a sum's order."""
    axes, given, cases = MESHES[name]
    cases = cases[:1] if name == "cp 2" else cases

    def check():
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        for case in cases:
            plan = zoo.llama(mesh, cp="cp", **given, **case)
            losses = []
            for mode in ("eager", "static"):
                model = parallelize(llama(), plan, mode=mode)
                losses.append(models.train(model, loss_of))
            assert losses[1] == pytest.approx(losses[0], abs=2e-6, rel=0), case

    run_ranks(check, torch.Size(axes.values()).numel(), timeout=300)


@pytest.mark.slow
def test_static_mode_shards_parameters_over_data_and_context_parallel_ranks():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        plan = zoo.llama(mesh, tp=None, dp="dp", cp="cp")
        for path in (r"model\.layers\.\d+", ""):
            plan.fully_shard(path, ["dp", "cp"], flat=True)
        losses = [
            models.train(parallelize(llama(), plan, mode=mode), loss_of)
            for mode in ("eager", "static")
        ]
        assert losses[1] == pytest.approx(losses[0], abs=2e-6, rel=0)

    run_ranks(check, 4, timeout=300)


def test_inputs_and_outputs_are_reordered():
    """With positions and shifted labels as inputs, and logits reordered."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        plan = zoo.llama(mesh, tp=None, cp="cp").sequence("<out:logits>", "cp")
        model = parallelize(llama(), plan)
        out = model(**batch)
        with track(model) as record:
            model(**batch).loss.backward()
        rounds = [one for one in record.collectives if one.name in ("send", "recv")]
        events = {(one.name, one.site, one.axis, one.phase.value) for one in rounds}
        lines = {one.line for one in rounds if one.phase.value == "forward"}
        return (
            out.loss.item(),
            out.logits.placements,
            out.logits.full_tensor().detach(),
            events,
            lines,
        )

    torch.manual_seed(1)
    ids = torch.randint(0, 64, (2, 8))
    positions = torch.arange(3, 11).unsqueeze(0)
    shifted = torch.where(torch.rand(2, 8) < 0.3, -100, ids)
    batch = {"input_ids": ids, "labels": ids, "shift_labels": shifted, "position_ids": positions}
    expected = llama()(**batch)
    for loss, placements, logits, events, lines in run_ranks(check, 2):
        assert loss == pytest.approx(expected.loss.item(), abs=1e-6)
        torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-6)
        assert placements == (Shard(1),)
        assert events == {
            (name, f"model.layers.{layer}.self_attn", "cp", phase)
            for name in ("send", "recv")
            for layer in (0, 1)
            for phase in ("forward", "backward")
        }
        assert [line.partition(" > ")[2].partition(":")[0] for line in lines] == [
            "zoo/requirements.py"
        ]
