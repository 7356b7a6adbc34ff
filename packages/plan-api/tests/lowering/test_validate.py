"""Options of methods of a plan: those without effect are refused at the call, or when lowered."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from plan_api import Phase, Plan, lower, parallelize
from plan_api.inspect.explain import explain
from testkit import CommLog, fake_mesh
from testkit.models import TwoLinears

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture
def mesh():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        yield mesh


def _refused(model, plan, message, **options):
    before = dict(model.named_parameters())
    with CommLog() as log, pytest.raises(ValueError, match=message):
        parallelize(model, plan, use=(), **options)
    log.assert_counts({})
    assert all(param is before[name] for name, param in model.named_parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda plan: plan.shard("w", S0, "dp", "run"), "such as Phase.RUN, got 'run'"),
        (lambda plan: plan.shard("w", S0, "dp", unit=0), "unit: expected at least 1, got 0"),
        (lambda plan: plan.shard("w", S0, "dp", unit=-4), "unit: expected at least 1, got -4"),
        (lambda plan: plan.shard("w", S0, "dp", unit=2.0), "an attribute.s name, got 2.0"),
        (lambda plan: plan.shard("w", S0, "dp", unit=True), "attribute's name, got True"),
        (
            lambda plan: plan.fully_shard("", "dp", reshard_after_forward=0),
            "expected True, False, None or a number of ranks, got 0",
        ),
    ],
    ids=["phase", "unit of nothing", "unit below", "unit of a float", "unit of a bool", "reshard"],
)  # fmt: skip
def test_invalid_values_are_refused_by_the_methods(mesh, call, message):
    plan = Plan(mesh)
    with pytest.raises(ValueError, match=message):
        call(plan)
    assert plan.entries == ()


@pytest.mark.parametrize("value", ["rows(2)", 2, S0])
def test_what_is_no_granularity_is_refused_by_the_method(mesh, value):
    pytest.importorskip("fsdp")
    with pytest.raises(
        ValueError,
        match=r"granularity: expected Rows or Block or Whole of the package .* got",
    ):
        Plan(mesh).fully_shard("", "dp", value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "Rows(0)"}, r"expected n >= 1 for parameter 'up.weight', got Rows\(n=0\)"),
        ({"granularity": "{r'.*': Rows(0)}"}, "expected n >= 1 for parameter 'up.weight'"),
        ({"granularity": "{r'uq.*': Rows()}"}, r"got 'uq\.\*', which match none"),
        (
            {"granularity": "{r'up.*': Rows(), r'.*weight': Rows()}"},
            r"one pattern that matches up.weight, got 'up\.\*' and '\.\*weight'; make one",
        ),
        ({"granularity": "lambda param: 'row'"}, "up.weight: granularity: expected Rows .* 'row'"),
        ({"quantize": "Tiles(rows=2, cols=2)"}, "expected None for 'up.bias', .* only matrices"),
        (
            {"quantize": "{r'.*weight': Tiles(rows=2, cols=2)}", "granularity": "Rows(1)"},
            r"splits its tiles of 2 x 2; expected None, Rows\(2\)",
        ),
        ({"quantize": "{r'up.weight': Tiles(rows=128)}"}, "expected a multiple of 128 there"),
        ({"reshard_after_forward": "3"}, "a factor of 2, .* got 3"),
    ],
    ids=[
        "granularity", "by pattern", "no such parameter", "two patterns", "by function",
        "no matrix", "tiles split", "tiles split by tp", "ranks after forward",
    ],
)  # fmt: skip
def test_values_that_parameters_cannot_have_are_refused_before_anything_changes(
    mesh, options, message
):
    fsdp = pytest.importorskip("fsdp")
    given = {name: eval(value, vars(fsdp)) for name, value in options.items()}
    plan = Plan(mesh).shard(r".*weight", S0, "tp").fully_shard("", "dp", **given)
    _refused(TwoLinears(), plan, f"test_validate.*{message}")


@pytest.mark.parametrize("option", ["granularity", "quantize", "offload_policy"])
def test_policies_of_parameters_that_the_plan_shards_itself_are_refused(mesh, option):
    fsdp = pytest.importorskip("fsdp")
    value = {
        "granularity": fsdp.Rows(),
        "quantize": fsdp.Tiles(),
        "offload_policy": CPUOffloadPolicy(),
    }[option]
    plan = Plan(mesh).shard(r"up\..*", S0, "dp").fully_shard("up", "dp", **{option: value})
    message = rf"test_validate.*fully_shard.*for {option}, got only such as up.weight"
    _refused(TwoLinears(), plan, message)
    of_bias = {option: value} if option != "quantize" else {}
    beside = Plan(mesh).shard("up.weight", S0, "dp").fully_shard("up", "dp", **of_bias)
    assert lower(beside, TwoLinears()).fully_sharded


def test_granularities_are_resolved_to_values_of_parameters(mesh):
    """Functions, patterns and values; what is written are the values that functions returned."""
    fsdp = pytest.importorskip("fsdp")
    model, tiles = TwoLinears(), {r"up\.weight": fsdp.Tiles(torch.int8, 2, 2)}

    def matrices(param):
        return fsdp.Rows(2) if param.ndim == 2 else None

    by_function = Plan(mesh).fully_shard("", "dp", matrices, quantize=tiles)
    by_pattern = Plan(mesh).fully_shard("", "dp", {r".*weight": fsdp.Rows(2)}, quantize=tiles)
    with pytest.raises(ValueError, match=r"to_json: .* by .*matrices.* plan.resolved"):
        by_function.to_json()
    resolved = by_function.resolved(model)
    read = Plan.from_json(resolved.to_json(), mesh)
    assert read.entries == resolved.entries
    assert Plan.from_json(by_pattern.to_json(), mesh).entries == by_pattern.entries
    values = {
        "up.weight": "granularity=Rows(n=2), quantize=Tiles(rows=2, cols=2)",
        "down.weight": "granularity=Rows(n=2)",
    }
    for plan in (by_function, by_pattern, resolved, read):
        found = lower(plan, model).shard_values
        assert {name: str(one) for name, one in found.items()} == values
    nested = nn.ModuleDict({"inner": model})
    found = lower(by_pattern.under("inner"), nested).shard_values
    assert {name: str(one) for name, one in found.items()} == {
        f"inner.{name}": text for name, text in values.items()
    }
    assert "fully_shard" in str(explain(by_pattern, model))
    assert "granularity=Rows(n=2) (1 parameters)" in str(explain(by_pattern, model))


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ("dp", {"placements": "zero4"}),
        (("dp", "tp"), {"placements": "zero2"}),
        ("dp", {"placements": "zero2", "reshard_after_forward": True}),
        ("dp", {"placements": "hfsdp", "replicate": 2}),
    ],
    ids=["no such", "of one axis", "resharded", "other axes"],
)
def test_placements_that_fsdp_refuses_are_refused_before_anything_changes(mesh, axes, options):
    pytest.importorskip("fsdp")
    plan = Plan(mesh).fully_shard("", axes, **options)
    _refused(TwoLinears(), plan, rf"test_validate.*placements='{options['placements']}'")


def test_fully_shard_of_a_module_twice_is_an_override(mesh):
    pytest.importorskip("fsdp")
    plan = Plan(mesh).fully_shard("", "dp").fully_shard("", "tp")
    lowered = lower(plan, TwoLinears())
    assert [str(one) for one in lowered.overrides] == [
        "fully_shard('', dp, granularity=None, reshard_after_forward=None) is overridden by "
        "fully_shard('', tp, granularity=None, reshard_after_forward=None)"
    ]
    assert lowered.fully_sharded[""].axes == ("tp",)
    _refused(TwoLinears(), plan, "strict=True: .* overrides itself", strict=True)
    assert (
        lower(Plan(mesh).fully_shard("", "dp").fully_shard("", "dp"), TwoLinears()).overrides == ()
    )


def test_mixed_precision_beside_parameters_that_keep_their_dtype_is_refused(mesh):
    pytest.importorskip("fsdp")
    policy = MixedPrecisionPolicy(torch.bfloat16)
    plan = Plan(mesh).shard("up.weight", S0, "dp").fully_shard("", "dp", mp_policy=policy)
    message = "no parameter .* along dp, .* get inputs in .*bfloat16, got up.weight in .*float32"
    _refused(TwoLinears(), plan, message)
    assert lower(plan, TwoLinears().to(torch.bfloat16)).fully_sharded
    other = Plan(mesh).shard("up.weight", S0, "tp").fully_shard("", "dp", mp_policy=policy)
    assert lower(other, TwoLinears()).fully_sharded
    # Without a cast of inputs, as under autocast, every operator casts what it gets.
    policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    plan = Plan(mesh).shard("up.weight", S0, "dp").fully_shard("", "dp", mp_policy=policy)
    assert lower(plan, TwoLinears()).fully_sharded


@pytest.mark.parametrize(
    "phases",
    [{Phase.INIT: S0, Phase.RUN: R}, {Phase.OPTIM: S0}, {Phase.GRAD: S0, Phase.OPTIM: S0}],
    ids=["ZeRO-3", "ZeRO-1", "ZeRO-2"],
)  # fmt: skip
def test_phases_along_the_axes_of_fully_shard_are_refused(mesh, phases):
    pytest.importorskip("fsdp")
    plan = Plan(mesh).fully_shard("", "dp")
    for phase, placement in phases.items():
        plan.shard(r".*weight", placement, "dp", phase)
    _refused(TwoLinears(), plan, "expected no phases along dp for .*weight, which .*, got .*shard")
    # along another axis, or outside of what is fully sharded, there are
    assert lower(Plan(mesh).fully_shard("", "tp"), TwoLinears()).fully_sharded
    beside = Plan(mesh).fully_shard("a", "dp").shard("b.weight", S0, "dp", Phase.OPTIM)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    assert lower(beside, model).schedules["b.weight"].has_phases


@pytest.mark.parametrize(
    "phases",
    [{Phase.INIT: S0, Phase.RUN: R}, {Phase.OPTIM: S0}, {Phase.GRAD: S0, Phase.OPTIM: S0}],
    ids=["ZeRO-3", "ZeRO-1", "ZeRO-2"],
)
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_phases_on_a_dim_that_is_interleaved_are_refused(mesh, phases, mode):
    """Before any parameter is sent; along another dim, or an axis of their own, they are not."""
    interleaved = pytest.importorskip("ragged_shard").InterleavedShard(0, 2)
    plan = Plan(mesh).shard("up.weight", interleaved, "tp")
    for phase, placement in phases.items():
        plan.shard("up.weight", placement, "dp", phase)
    message = r"test_validate.*one axis that shards dim 0 of up.weight, .* got dp and tp; shard"
    _refused(TwoLinears(), plan, message, mode=mode)
    other = Plan(mesh).shard("up.weight", interleaved, "tp")
    for phase, placement in phases.items():
        other.shard("up.weight", S1 if placement == S0 else R, "dp", phase)
    assert lower(other, TwoLinears()).schedules["up.weight"].has_phases


def test_parameters_ignored_by_fully_shard_have_the_plans_placements(mesh):
    pytest.importorskip("fsdp")
    plan = Plan(mesh).shard("up.weight", S0, "dp").fully_shard("", ("dp", "tp"), flat=True)
    model = parallelize(TwoLinears(), plan, use=())
    assert model.up.weight.placements == (S0, R)
    assert model.down.weight.device_mesh.ndim == 1


def test_flattened_axes_are_split_into_replicas_and_shards(mesh):
    """Each of two replicas is sharded over four of the eight ranks."""
    pytest.importorskip("fsdp")
    plan = Plan(mesh).fully_shard("", ("dp", "tp"), flat=True, replicate=2)
    model = parallelize(TwoLinears(), plan, use=())
    for param in model.parameters():
        assert param.device_mesh.mesh_dim_names == ("dp_tp_replicate", "dp_tp_shard")
        assert param.device_mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert param.placements[0] == R
    local_numel = sum(param.to_local().numel() for param in model.parameters())
    assert local_numel <= sum(param.numel() for param in model.parameters()) // 4 + 1


def test_a_reordered_sequence_needs_a_context_entry(mesh):
    model = TwoLinears()
    message = r"sequence.*expected a context\(\) entry along 'dp'.*order='contiguous'"
    _refused(model, Plan(mesh).sequence("<in>", "dp"), message)
    _refused(model, Plan(mesh).sequence("<in>", "dp").context("", "tp"), message)
    assert lower(Plan(mesh).sequence("<in>", "dp", order="contiguous"), model).sites
    assert lower(Plan(mesh).sequence("<in>", "dp").context("", "dp"), model).sites


def _text(mesh, change):
    rows = pytest.importorskip("fsdp").Rows(2)
    plan = Plan(mesh).shard("w", S0, "tp", unit=2).fully_shard("", "dp", rows)
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
    found = json.loads(plan.to_json())
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.update(covers=True), "the plan: .*got 'covers'; did you mean 'cover'"),
        (lambda found: found.pop("cover"), "the plan: expected 'cover', got none"),
        (lambda found: found["entries"][0].update(verb="shards"), "entry 0: .*'shard'"),
        (lambda found: found["entries"][1].update(phases="run"), "entry 1: .*mean 'phase'"),
        (lambda found: found["entries"][1].update(phase="runs"), "phase: .*got 'runs'"),
        (lambda found: found["entries"][0].pop("dst"), "entry 0: expected 'dst', got none"),
        (
            lambda found: found["entries"][0].update(options={"units": 2}),
            r"shard\('w'\): options: expected 'unit', got 'units'",
        ),
        (
            lambda found: found["entries"][1]["options"].update(flatten=True),
            r"fully_shard\(''\): options: .*got 'flatten'",
        ),
    ],
    ids=["a plan's", "a plan's missing", "verb", "an entry's", "phase", "an entry's missing",
         "option of shard", "option of fully_shard"],
)  # fmt: skip
def test_unknown_names_in_json_are_refused(mesh, change, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_json(_text(mesh, change), mesh)


def test_text_without_json_is_refused(mesh):
    with pytest.raises(ValueError, match="got no JSON"):
        Plan.from_json("{", mesh)
