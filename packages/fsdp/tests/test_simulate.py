"""Simulations without ranks: the time model, plans, optimizer state, search, and errors."""

import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from torch import nn

import fsdp
from fsdp.optim import Adam8bit, WholeMatrices
from fsdp.simulate import (
    Compute,
    Constants,
    Link,
    MeshSize,
    Update,
    best_group_size,
    simulate,
    sweep,
)  # fmt: skip
from fsdp.simulate.machine import parse_mesh_size
from fsdp.simulate.probe import fit
from fsdp.simulate.report import CHART_WIDTH
from fsdp.simulate.result import simulations_svg
from fsdp.simulate.simulation import Simulator
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import KEEPS_ORDER_OF_RANKS, NO_ORDER_OF_RANKS, fake_mesh

needs_ordered_ranks = pytest.mark.skipif(not KEEPS_ORDER_OF_RANKS, reason=NO_ORDER_OF_RANKS)

WIDTH, LAYERS = 64, 3
NUMEL = WIDTH * WIDTH  # of a layer
LINK, COMPUTE = Link(1e-3, 1e-6), Compute(1e-9)


def _model(layers=LAYERS):
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers + 1)])


UNITS = [str(i) for i in range(LAYERS)]  # the last layer is the model's own


def _seconds(overlap, *, flop=1e-9, mesh=4, **options):
    constants = Constants(LINK, Compute(flop), overlap=overlap)
    return simulate(_model(), mesh=mesh, units=UNITS, tokens=10, constants=constants, **options)


def test_time_without_overlap_is_the_sum_of_all_terms():
    found = _seconds(overlap=False)
    collective = 3 * LINK.alpha + 3 / 4 * 4 * NUMEL * LINK.beta
    assert found.time.gather == pytest.approx((2 * LAYERS + 1) * collective)
    assert found.time.reduce == pytest.approx((LAYERS + 1) * collective)
    assert found.time.compute == pytest.approx(6 * 10 * (LAYERS + 1) * NUMEL * 1e-9)
    assert found.time.hidden == 0


def test_overlap_hides_collectives_behind_computation():
    collective = 3 * LINK.alpha + 3 / 4 * 4 * NUMEL * LINK.beta
    slow = _seconds(overlap=True, flop=1e-6).time
    # No computation overlaps the first two gathers, the first one of backward, and the last
    # reduction.
    assert slow.gather == pytest.approx(3 * collective)
    assert slow.reduce == pytest.approx(collective)
    assert slow.hidden == pytest.approx((3 * LAYERS - 2) * collective)
    fast = _seconds(overlap=True, flop=0.0).time
    assert fast.gather + fast.reduce == pytest.approx((3 * LAYERS + 2) * collective)


def test_hsdp_all_reduces_shards_over_replicas():
    found = _seconds(overlap=False, mesh={"dp_replicate": 2, "dp_shard": 4})
    ops = {one.op: one for one in found.collectives}
    assert ops["all_reduce"].count == LAYERS + 1
    assert ops["all_reduce"].ranks == 2
    assert ops["all_reduce"].nbytes == (LAYERS + 1) * NUMEL  # a quarter of 4 bytes each
    one_less = _seconds(overlap=False).time
    extra = (LAYERS + 1) * (2 * LINK.alpha + NUMEL * LINK.beta)
    assert found.time.reduce - one_less.reduce == pytest.approx(extra)


@pytest.mark.parametrize(
    ("placements", "parameters", "master", "gradients", "state", "gathers", "reductions"),
    [  # of docs/packages/fsdp/placements.md, where R = S = 2 and N = 4: elements over P
        ("ddp", 1, 1, 1, 1, 3 / 4, 3 / 4),
        ("zero1", 1, 1 / 4, 1 / 4, 1 / 4, 3 / 4, 3 / 4),
        ("zero2", 1, 1 / 4, 1 / 4, 1 / 4, 3 / 4, 3 / 4),
        ("zero3", 0, 1 / 4, 1 / 4, 1 / 4, 2 * 3 / 4, 3 / 4),
        ("hsdp", 0, 1 / 2, 1 / 2, 1 / 2, 2 * 1 / 2, 1 / 2 + 1 / 2 * 1 / 2 * 2),
        pytest.param(
            "hfsdp",
            1 / 2,
            1 / 4,
            1 / 4,
            1 / 4,
            2 * 1 / 2 + 1 / 2 * 1 / 2,
            1 / 2 + 1 / 2 * 1 / 2,
            marks=needs_ordered_ranks,
        ),
    ],
)
@pytest.mark.parametrize(
    ("param_dtype", "exchange"),
    [
        pytest.param(None, False, id="float32, native"),
        pytest.param(torch.bfloat16, True, id="bfloat16, exchange", marks=pytest.mark.slow),
    ],
)
def test_placements_have_the_memory_and_bytes_of_their_formulas(
    placements, parameters, master, gradients, state, gathers, reductions, param_dtype, exchange
):
    policy = fsdp.MixedPrecisionPolicy(param_dtype, torch.float32)
    found = simulate(
        _model(), mesh=(2, 2) if placements in ("hsdp", "hfsdp") else 4, placements=placements,
        units=["0", "1", "2", "3"], mp_policy=policy, exchange=exchange,
    )  # fmt: skip
    numel, itemsize = (LAYERS + 1) * NUMEL, 4 if param_dtype is None else 2
    if param_dtype is None:  # what the optimizer updates is a view of what stays
        master = 0 if parameters else master
    assert found.memory.parameters == numel * (itemsize * parameters + 4 * master)
    assert found.memory.gradients == 4 * numel * gradients
    by_rank = [one - 4 * (LAYERS + 1) for one in found.optimizer_by_rank]  # without step counts
    assert by_rank == [8 * numel * state] * (2 if placements == "hsdp" else 4)
    if placements == "ddp":  # its all-gather is of gradients
        itemsize = 4
    sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for one in found.collectives:
        sent[one.op] += one.sent
    assert sent["all_gather"] == itemsize * numel * gathers
    assert sent["reduce_scatter"] + sent["all_reduce"] == 4 * numel * reductions


def test_time_of_placements_counts_what_follows_the_reduce_scatter():
    collective = 3 * LINK.alpha + 3 / 4 * 4 * NUMEL * LINK.beta
    replicated = _seconds(overlap=False, placements="ddp").time
    assert replicated.gather == 0  # its all-gathers are of gradients
    assert replicated.reduce == pytest.approx(2 * (LAYERS + 1) * collective)


@needs_ordered_ranks
def test_time_of_hfsdp_counts_gathers_and_reductions_over_replicas():
    near, far = Link(0, 1e-9, ranks=2), Link(0, 1e-6)
    constants = Constants([far, near], COMPUTE, overlap=False)
    over_replicas = (LAYERS + 1) * 4 * NUMEL / 2 / 2 * 1e-6  # of a half, each sends a half
    hfsdp = simulate(_model(), mesh=(2, 2), placements="hfsdp", constants=constants).time
    assert hfsdp.gather == pytest.approx(over_replicas, rel=0.01)  # replicas are not neighbours
    assert hfsdp.reduce == pytest.approx(over_replicas, rel=0.01)


@needs_ordered_ranks
def test_placements_of_two_axes_take_one_replica_too():
    found = {one.mesh: one for one in sweep(_model(), 4, placements="hfsdp")}
    assert list(found) == [MeshSize(1, 4), MeshSize(2, 2), MeshSize(4, 1)]
    assert {one.memory.gradients for one in found.values()} == {(LAYERS + 1) * NUMEL}
    assert [one.memory.parameters for one in found.values()] == [
        4 * (LAYERS + 1) * NUMEL / shard for shard in (1, 2, 4)
    ]


def test_axis_uses_the_link_that_connects_it():
    near, far = Link(0, 1e-9, ranks=8), Link(0, 1e-6)

    def gather(ranks):
        constants = Constants([far, near], COMPUTE, overlap=False)
        return simulate(_model(), mesh=ranks, constants=constants).time.gather

    assert gather(16) / gather(8) == pytest.approx(1000 * (15 / 16) / (7 / 8))
    constants = Constants([far, near], COMPUTE, overlap=False)
    # Two replicas of 8 ranks: the shards reach each other by the near link, replicas do not.
    hsdp = simulate(_model(), mesh=(2, 8), constants=constants).time
    assert hsdp.reduce == pytest.approx(hsdp.gather + 4 * (LAYERS + 1) * NUMEL / 8 * 1e-6)
    with pytest.raises(ValueError, match="a link that connects 16 ranks"):
        simulate(_model(), mesh=16, constants=Constants([near], COMPUTE))


def test_time_of_the_update_and_slack():
    constants = Constants(LINK, COMPUTE, Update(1e-3, 1e-6), overlap=False, slack=1.5)
    found = simulate(_model(), mesh=4, tokens=10, constants=constants).time
    assert found.update == pytest.approx((LAYERS + 1) * (1e-3 + NUMEL * 1e-6))
    assert found.total == pytest.approx(1.5 * (found.total - found.other))


def test_padding_is_that_of_the_planner_and_of_fully_shard():
    rows = fsdp.Rows(24)
    found = simulate(_model(), mesh=4, units=UNITS, shard_placement_fn=lambda param: rows)
    one = plan_layout(
        [TensorSpec("weight", NUMEL, 24 * WIDTH, (WIDTH, WIDTH))], 4, alignment=4, order="best"
    )
    assert found.padding == (LAYERS + 1) * one.padding > 0
    with fake_mesh((4,)) as mesh:
        model = _model()
        for layer in model:
            fsdp.fully_shard(layer, mesh=mesh, shard_placement_fn=lambda param: rows)
        nbytes = sum(param.to_local().untyped_storage().nbytes() for param in model.parameters())
    assert found.memory.parameters == nbytes


def test_optimizer_state_by_rank_follows_the_layout():
    model = _model(0)
    found = simulate(model, mesh=3, shard_placement_fn=lambda param: fsdp.Rows(48))
    rows = [by // WIDTH // 8 for by in found.optimizer_by_rank]  # 4 more bytes: of the steps
    assert sorted(rows) == [0, 16, 48]
    assert found.memory.optimizer == 48 * WIDTH * 8 + 4


def test_each_run_balances_whole_matrices_independently():
    whole = WholeMatrices()
    simulator = Simulator(_model(3), units=["0", "1", "2"], shard_placement_fn=whole)
    for _ in range(2):  # the second run does not count the load of the first
        assert simulator.run(4).optimizer_by_rank == (8 * NUMEL + 16,) * 4
    stacked = simulate(_model(3), mesh=4, units=UNITS, shard_placement_fn=lambda p: fsdp.Whole())
    assert max(stacked.optimizer_by_rank) == 4 * 8 * NUMEL + 16


@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [
        ("adam", 8 * NUMEL + 4),
        ("sgd", 0),
        (1.5, 1.5 * NUMEL),
        (lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9), 4 * NUMEL),
        (lambda params: Adam8bit(params, min_8bit_size=0), 2 * NUMEL + 8 * NUMEL // 256 + 4),
    ],
    ids=["Adam", "SGD", "bytes", "momentum", "8-bit Adam"],
)
def test_state_bytes_of_optimizers(optimizer, nbytes):
    assert simulate(_model(0), mesh=1, optimizer=optimizer).memory.optimizer == nbytes


def test_frozen_parameters_have_no_gradients_and_no_state():
    model = _model(1)
    model[0].weight.requires_grad_(False)
    found = simulate(model, mesh=1)
    assert found.groups == 2
    assert found.memory.parameters == 2 * found.memory.gradients == 8 * NUMEL
    assert found.memory.optimizer == 8 * NUMEL + 4


def test_forward_is_traced_without_changing_the_model():
    with torch.device("cpu"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    before = model[0].weight.detach().clone()

    def forward(given):
        return given(torch.zeros(10, WIDTH)).square().sum()

    constants = Constants(LINK, COMPUTE, overlap=False)
    on_cpu, on_meta = (
        simulate(one, mesh=2, units=["0"], forward=forward, constants=constants)
        for one in (model, _model(1))
    )
    assert on_cpu == on_meta
    # Backward of the first layer needs no gradient of its input.
    assert on_cpu.time.compute == pytest.approx(5 * 2 * 10 * NUMEL * 1e-9)
    assert on_cpu.memory.activations == 4 * 3 * 10 * WIDTH  # input, two outputs
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight.grad, torch.ones(WIDTH, WIDTH))
    assert not model[0]._forward_hooks


def test_activation_checkpointing_reduces_activations():
    from torch.utils.checkpoint import checkpoint

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
                for _ in range(3)
            )
            self.recompute = False

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            return x.sum()

    with torch.device("meta"):
        model = Blocks()
    found = []
    for model.recompute in (False, True):
        found.append(
            simulate(
                model, mesh=2, units=r"blocks\.\d", constants=Constants(LINK, COMPUTE),
                forward=lambda one: one(torch.zeros(512, WIDTH, requires_grad=True)),
            )
        )  # fmt: skip
    saved, recomputed = found
    assert recomputed.memory.activations < 0.65 * saved.memory.activations
    assert recomputed.memory.peak < saved.memory.peak
    assert recomputed.time.compute > saved.time.compute
    assert recomputed.collectives == saved.collectives


def test_activations_given_as_a_number_count_at_the_peak():
    less, more = (simulate(_model(), mesh=2, activations=n).memory for n in (0, 3_000_000))
    assert more.activations == 3_000_000
    assert more.peak - less.peak == 3_000_000


def test_modules_of_one_call_are_one_group():
    apart = simulate(_model(), mesh=2, units=["0", "1"])
    together = simulate(_model(), mesh=2, units=[("0", "1")])
    assert (apart.groups, together.groups) == (3, 2)
    assert simulate(_model(), mesh=2, units=lambda name, module: name in "01").groups == 3


def test_best_group_size_is_the_fastest_that_fits():
    constants = Constants([Link(1e-6, 1e-10, 4), Link(1e-4, 1e-8)], Compute(1e-12))
    options = {"units": UNITS, "constants": constants, "tokens": 10}
    state = (LAYERS + 1) * NUMEL * 4
    roomy = best_group_size(_model(), 16, memory=1e9, **options)
    assert [one.mesh.shard for one in roomy.candidates] == [1, 2, 4, 8, 16]
    assert all(one.mesh.ranks == 16 for one in roomy.candidates)
    assert roomy.fits == (1, 2, 4, 8, 16)
    times = {one.mesh.shard: one.time.total for one in roomy.candidates}
    assert times[roomy.group_size] == min(times.values())
    limit = roomy.candidates[3].memory.peak
    tight = best_group_size(_model(), 16, memory=limit, **options)
    assert tight.fits == (8, 16)
    assert tight.group_size == 8  # less of the slow link
    with pytest.raises(ValueError, match=r"at least [\d,]+ bytes, which a rank needs on 16 ranks"):
        best_group_size(_model(), 16, memory=state / 16, **options)


def test_tables_and_pictures(tmp_path):
    constants = Constants(LINK, COMPUTE)
    best = best_group_size(_model(), 4, memory=1e9, constants=constants, tokens=10)
    text = best.simulation.table()
    assert "16,384 elements in 1 groups" in text
    assert "optimizer's step" in text
    assert len(best.table().splitlines()) == 4
    best.picture(tmp_path / "sweep.svg")
    root = ET.parse(tmp_path / "sweep.svg").getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("2 x 2 ranks") == 2  # of memory, and of time
    assert {"gathered", "wait for reductions"} <= set(texts)
    simulate(_model(), mesh=2).picture(tmp_path / "one.svg")
    assert "time of a step" not in (tmp_path / "one.svg").read_text()


def test_bars_are_proportional_to_memory(tmp_path):
    found = sweep(_model(), 4, optimizer=0.0)
    boxes = ET.fromstring(simulations_svg(found)).iter("{http://www.w3.org/2000/svg}rect")
    widths = [float(box.get("width")) for box in boxes if box.get("height") == "16"]
    bars = [sum(widths[start : start + 7]) for start in range(0, len(widths), 7)]
    peaks = [one.memory.peak for one in found]
    assert bars == pytest.approx([CHART_WIDTH * peak / max(peaks) for peak in peaks], abs=0.5)


@pytest.mark.slow
def test_simulating_a_large_model_on_many_ranks_takes_seconds():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    start = time.process_time()
    found = simulate(model, mesh=8192, units=r"model\.layers\.\d+")
    assert time.process_time() - start < 30
    assert found.elements == 70_553_706_496
    assert found.groups == 81
    assert found.memory.parameters == pytest.approx(4 * found.elements / 8192, rel=1e-3)
    steps = 4 * 8192 * len(list(model.parameters()))
    assert sum(found.optimizer_by_rank) == 8 * found.elements + steps


def test_fit_of_a_line():
    exact = fit([0, 10, 100], [2.0, 3.0, 12.0])
    assert (exact.alpha, exact.beta, exact.error) == pytest.approx((2.0, 0.1, 0.0))
    assert fit([1, 2], [1.0, 3.0]).alpha == 0  # never below
    assert fit([1, 2], [3.0, 1.0]).beta == 0
    assert fit([0, 1, 2], [1.0, 1.0, 2.0]).error > 0.1


@pytest.mark.parametrize("mesh", [0, (2, 0), (1, 2, 3), (), "4", 1.5, {"a": 2.0}], ids=repr)
def test_invalid_mesh(mesh):
    with pytest.raises(ValueError, match="simulate: expected mesh"):
        simulate(_model(), mesh=mesh)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"units": "layers"}, "units .* got 'layers', which matches no module"),
        ({"units": ["7"]}, r"matches no \['7'\]"),
        ({"units": [""]}, r"matches no \[''\]"),
        ({"optimizer": "lion"}, "optimizer to be one of .* got 'lion'"),
        ({"optimizer": -1.0}, "optimizer .* got -1.0"),
        ({"optimizer": lambda p: torch.optim.AdamW(p, fused=True)}, "to step on meta"),
        ({"tokens": -1}, "tokens to be 0 or more.* got -1"),
        ({"activations": 1, "forward": lambda model: None}, "activations .* got 1"),
        ({"forward": lambda model: None}, "forward to return the loss.* got NoneType"),
        ({"reshard_after_forward": 3}, "reshard_after_forward"),
        ({"placements": "zero4"}, "placements: expected one of 'ddp' .* got 'zero4'"),
        ({"placements": "zero1", "reshard_after_forward": True}, "that stay unsharded"),
        ({"shard_placement_fn": lambda param: fsdp.Rows(0)}, "n >= 1 .*weight.*Rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_invalid_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        simulate(_model(), mesh=4, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(-1e-6, 0), lambda: Link(0, float("nan")), lambda: Link(0, 0, ranks=0),
        lambda: Compute(-1), lambda: Update(0, float("inf")),
        lambda: Constants(LINK, COMPUTE, slack=-1),
    ],
)  # fmt: skip
def test_invalid_constants(make):
    with pytest.raises(ValueError, match="simulate: "):
        make()


def test_placements_of_one_axis_on_two_are_an_error():
    with pytest.raises(ValueError, match=r"one of 'hsdp' .* on the 2 axes \(2, 2\) .*'zero2'"):
        simulate(_model(), mesh=(2, 2), placements="zero2")


def test_sizes_that_do_not_divide_the_ranks():
    with pytest.raises(ValueError, match=r"sizes to be divisors of 8 ranks, got \[3\]"):
        sweep(_model(), 8, sizes=[2, 3])
    with pytest.raises(ValueError, match=r"ranks .* got 0"):
        sweep(_model(), 0)


def test_tied_parameter_in_two_units_is_an_error():
    model = _model(1)
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"got '0.weight', which is tied to '1.weight'"):
        simulate(model, mesh=2, units=["0"])


def test_unit_without_parameters_is_an_error():
    model = nn.Sequential(_model(), nn.ReLU())
    with pytest.raises(ValueError, match="got '1', which has none"):
        simulate(model, mesh=2, units=["1"])


def test_str_of_mesh_sizes():
    assert str(MeshSize(8, 64)) == "64 x 8 ranks"
    assert str(MeshSize(8192)) == "8,192 ranks"


def test_mesh_sizes_may_be_numpy_integers():
    assert parse_mesh_size(np.int64(4)) == parse_mesh_size(4)
    size = parse_mesh_size((np.int64(2), np.int64(4)))
    assert size == parse_mesh_size((2, 4))
    assert {type(size.replicate), type(size.shard)} == {int}
    for wrong in (4.0, [2.0, 4], [], [2, np.int64(0)]):
        with pytest.raises(ValueError, match="the number of ranks that shard"):
            parse_mesh_size(wrong)
