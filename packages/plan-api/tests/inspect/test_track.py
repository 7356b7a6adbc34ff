"""Operators and collectives of a recorded step."""

import contextlib
import json
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

import dtensor_rules
from plan_api import Plan, options, parallelize, track
from plan_api.inspect.track import CollectiveEvent, StepPhase
from plan_api.runtime import attribution
from testkit import CommLog, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
FORWARD, BACKWARD, OPTIMIZER = StepPhase


def sequence_parallel(mesh):
    """Activations are gathered before a block and scattered after it."""
    return (
        Plan(mesh)
        .shard(r"layers\.\d\.up\.(weight|bias)", S0, "tp")
        .shard(r"layers\.\d\.down\.weight", S1, "tp")
        .shard("<in>", [S0, S1])
        .shard(r"layers\.\d.<in>", S0, "dp")
        .shard(r"layers\.\d.<in>", R, "tp")  # gathers
        .shard(r"layers\.\d.<out>", S1, "tp")  # scatters
    )


def step_of(model, optimizer):
    x = torch.ones(4, 4, requires_grad=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def step(mesh, model):
    parallelize(model, sequence_parallel(mesh))
    optimizer = torch.optim.AdamW(model.parameters())
    step_of(model, optimizer)  # fused-comm allocates its buckets
    return lambda: step_of(model, optimizer)


def line_of(text):
    with open(__file__, encoding="utf-8") as file:
        return next(f"test_track.py:{n}" for n, one in enumerate(file, 1) if text in one)


def summary(record):
    return [
        f"{one.phase.value} {one.site} {one.name} {one.axis} {one.before}->{one.after} {one.cause}"
        for one in record.collectives
    ]


# The step of three equal blocks; the first and the last share a weight.
STEP = [
    *(
        f"forward layers.{n} {what}"
        for n in range(3)
        for what in (
            "all_gather tp S(0),S(1)->S(0),R plan",
            "reduce_scatter tp S(0),P->S(0),S(1) plan",
        )
    ),
    *(
        f"backward layers.{n} {what} tp -> plan"
        for n in (2, 1, 0)
        for what in ("all_gather", "reduce_scatter")
    ),
    "backward  all_gather tp -> plan",  # of the gradient of the input, which is replicated
    "backward  all_gather dp -> plan",
]


def test_collectives_have_site_phase_axis_placements_and_cause(model, step):
    with track(model) as record:
        step()
    reduction = "backward None all_reduce dp -> gradients"
    found = summary(record)
    assert found.count(reduction) == 1
    found.remove(reduction)
    assert found == STEP
    assert {one.ranks for one in record.collectives} == {2}


def test_dtensor_rules_gather_over_both_axes_at_once(model, step):
    with dtensor_rules.enabled(), track(model) as record:
        step()
    gathers = {(one.axis, one.ranks) for one in record.collectives if one.site == ""}
    assert gathers == {("dp+tp", 4)}


def test_forward_and_backward_have_the_line_of_the_entry(model, step):
    with track(model) as record:
        step()
    lines = {(one.phase, one.name): one.line for one in record.collectives if one.site}
    gathers, scatters = line_of("# gathers"), line_of("# scatters")
    assert lines == {
        (FORWARD, "all_gather"): gathers,
        (FORWARD, "reduce_scatter"): scatters,
        (BACKWARD, "all_gather"): scatters,
        (BACKWARD, "reduce_scatter"): gathers,
    }


def test_a_gradient_without_a_bucket_is_named(mesh, model, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    parallelize(model, sequence_parallel(mesh))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="one by one"), track(model) as record:
        step_of(model, optimizer)
    of_gradients = {one.cause: one for one in record.collectives if "gradient" in one.cause}
    assert set(of_gradients) == {f"gradient of {name}" for name, _ in model.named_parameters()}
    bias = of_gradients["gradient of layers.1.down.bias"]
    assert (bias.site, bias.axis, bias.before, bias.after) == ("layers.1.down", "dp", "P,R", "R,R")


def test_an_operator_that_redistributes_its_arguments_is_the_cause(mesh):
    plan = Plan(mesh).shard("weight", S1, "tp").shard("<in>", R, "tp")
    model = parallelize(nn.Linear(4, 4), plan)
    with track(model) as record:
        torch.relu(model(torch.ones(2, 4)))  # of a Partial
    (found,) = record.collectives
    assert (found.name, found.axis, found.cause, found.line) == (
        "all_reduce",
        "tp",
        "aten.relu",
        "",
    )
    names = [one.name for one in record.events]
    assert names.index("aten.relu") == names.index("all_reduce") - 1


def test_operators_are_those_that_dtensor_sees(model, step):
    with track(model) as record:
        step()
    block = [one for one in record.operators if (one.site or "").startswith("layers.1")]
    forward = [one for one in block if one.phase is FORWARD]
    assert [(one.site, one.name) for one in forward] == [
        ("layers.1.up", "aten.t"),
        ("layers.1.up", "aten.addmm"),
        ("layers.1", "aten.relu"),
        ("layers.1", "aten.detach"),  # autograd's, of a saved tensor
        ("layers.1.down", "aten.t"),
        ("layers.1.down", "aten.addmm"),
        ("layers.1", "aten.mul"),
    ]
    assert (forward[1].before, forward[1].after) == ("R,S(0) S(0),R R,S(1)", "S(0),S(1)")
    assert forward[1].bytes == 4 * 2 * 4  # half the rows and half the columns of 4 x 8 numbers
    back = [(one.site, one.name) for one in block if one.phase is BACKWARD]
    for site in ("layers.1.down", "layers.1.up"):
        assert back.count((site, "aten.mm")) == 2
    assert ("layers.1", "aten.threshold_backward") in back
    updates = [one.name for one in record.operators if one.phase is OPTIMIZER]
    assert updates.count("aten.addcdiv_") == len(list(model.parameters()))


def test_operators_on_plain_tensors_are_recorded():
    model = nn.Linear(2, 2)
    with track(model) as record:
        model(torch.ones(1, 2)).sum().backward()
    found = [(one.phase, one.site, one.name, one.before) for one in record.operators]
    assert (FORWARD, "", "aten.addmm", "3x local") in found
    assert (BACKWARD, "", "aten.mm", "2x local") in found
    assert (FORWARD, None, "aten.sum", "local") in found


def test_recomputation_is_part_of_backward_at_its_own_site():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Again()
    with track(model) as record:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    phases = [(one.phase, one.site) for one in record.operators if one.name == "aten.tanh"]
    assert phases == [(FORWARD, "inner.1"), (BACKWARD, "inner.1")]
    assert [one.phase for one in record.calls if one.site == "inner.1"] == [FORWARD, BACKWARD]


def test_table_json_and_rich_table_agree(model, step, capsys):
    with track(model) as record:
        step()
    lines = str(record).splitlines()
    assert len(lines) == 1 + len(record.events)
    gather = next(one for one in lines if "all_gather" in one)
    pattern = r"forward +layers\.0 +all_gather +S\(0\),S\(1\) -> S\(0\),R +32 +tp of 2 +\d+ +{}"
    assert re.fullmatch(pattern.format(line_of("# gathers")), gather)
    assert record.table().row_count == len(record.events)
    assert record.table(collectives_only=True).row_count == len(record.collectives)
    data = json.loads(record.to_json())
    assert [one["name"] for one in data["events"]] == [one.name for one in record.events]
    assert {one["kind"] for one in data["events"]} == {"operator", "collective"}
    assert (data["model"], data["rank"], len(data["calls"])) == ("Model", 0, len(record.calls))


def test_the_chrome_trace_nests_on_every_thread(model, step):
    with track(model) as record:
        step()
    events = json.loads(record.to_chrome_trace())["traceEvents"]
    spans = [one for one in events if one["ph"] == "X"]
    assert len(spans) == len(record.events) + len(record.calls)
    assert {one["ph"] for one in events} == {"M", "X"}
    named = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert {named[one["tid"]] for one in spans if one["name"] == "all_gather"} == {"collectives 0"}
    for thread in named:
        open_until = []
        for one in (one for one in spans if one["tid"] == thread):  # sorted by start
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1], one
            open_until.append(one["ts"] + one["dur"])
    up = next(one for one in spans if one["name"] == "layers.0.up")
    mm = next(one for one in spans if one["name"] == "aten.addmm")
    assert up["ts"] <= mm["ts"]
    assert mm["ts"] + mm["dur"] <= up["ts"] + up["dur"]
    assert mm["dur"] < 60e6  # microseconds


def overlapping():
    def event(start, duration):
        return CollectiveEvent(
            "all_reduce", None, BACKWARD, "dp", 2, "", "", 4, "gradients", "", start, duration
        )

    return event(0.0, 10.0), event(5.0, 10.0), event(11.0, 1.0)


def test_overlapping_collectives_are_on_separate_threads():
    from plan_api.inspect.track.record import chrome_trace

    events = chrome_trace(overlapping(), (), "Model", 3)["traceEvents"]
    assert [(one["tid"], one["pid"]) for one in events if one["ph"] == "X"] == [
        (1, 3),
        (2, 3),
        (1, 3),
    ]


def leftovers(model):
    hooks = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()]
    return (
        hooks,
        len(_global_optimizer_pre_hooks),
        _get_current_dispatch_mode(),
        attribution.observer,
    )


def test_all_hooks_are_removed_when_the_step_raises(mesh, model, step):
    before = leftovers(model)
    with pytest.raises(ZeroDivisionError), track(model) as record:  # noqa: PT012
        assert leftovers(model) != before
        model(torch.ones(4, 4))
        raise ZeroDivisionError
    assert leftovers(model) == before
    assert summary(record) == STEP[:6]
    with track(model) as again:
        step()
    assert len(again.collectives) == len(STEP) + 1


def test_a_module_that_raises_ends_its_site(model, step):
    def fail(*_):
        raise ZeroDivisionError

    handle = model.layers[1].down.register_forward_pre_hook(fail)
    with track(model) as record:
        with pytest.raises(ZeroDivisionError):
            step()
        handle.remove()
        torch.ones(1)
    assert record.events[-1].site is None
    assert [one.site for one in record.calls][:2] == ["", "layers.0"]


def test_a_second_track_is_refused(model):
    with track(model) as record:
        with pytest.raises(RuntimeError, match="other track"), track(model):
            pass
        with pytest.raises(RuntimeError, match="no record yet"):
            record.events  # noqa: B018
        torch.ones(1)
    assert [one.name for one in record.events] == ["aten.ones"]


def test_a_hook_that_redistributes_nothing_reports_no_cause(mesh):
    """Without `track` a hook costs a look at a global only where it redistributes."""
    model = parallelize(nn.Identity(), Plan(mesh).shard("<in>", S0, "dp"))
    x = DTensor.from_local(torch.ones(2, 2), mesh, [S0, R], run_check=False)
    causes = []
    try:
        attribution.set_observer(lambda cause: causes.append(cause) or attribution._NO_OBSERVER)
        model(x)
        assert causes == []
        model(torch.ones(2, 2))
        assert len(causes) == 2  # it becomes a DTensor, and is sharded
    finally:
        attribution.set_observer(None)


def _found(fused):
    """Finds installed packages, and fused-comm only if it is to be used."""
    return lambda name, find=options.find_spec: (
        find(name) if fused or name != "fused_comm" else None
    )


@pytest.mark.ranks
@pytest.mark.parametrize("fused", [True, False], ids=["fused-comm", "one by one"])
def test_collectives_are_those_that_reach_the_process_groups(fused):
    """In number and in bytes, functional ones and those of c10d, also of other packages."""

    def check():
        before, options.find_spec = options.find_spec, _found(fused)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        plan = Plan(mesh).shard("<in>", S0, "dp").shard("2.<out>", S0, "tp")
        plan.shard(r"0\.(weight|bias)", S0, "tp").shard(r"2\.weight", S1, "tp")
        parallelize(model, plan)
        options.find_spec = before
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        with contextlib.nullcontext() if fused else pytest.warns(UserWarning, match="one by one"):
            step()
        with CommLog() as log:
            step()
        with track(model) as record:
            step()
        found = record.collectives
        counts = {name: [one.name for one in found].count(name) for name in log.counts()}
        total = sum(one.bytes for one in found)
        times = all(one.duration > 0 for one in found)
        return log.counts() == counts, log.bytes() == total, len(found), times

    ranks = run_ranks(check, 4)
    assert [one[:2] + one[3:] for one in ranks] == [(True, True, True)] * 4
    assert {one[2] for one in ranks} == {3 if fused else 6}


@pytest.mark.ranks
def test_a_recorded_step_is_bitwise_equal():
    """With dropout, whose random numbers are those of one device where dist-rng is installed."""

    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        plan = Plan(mesh).shard("<in>", [S0, R]).shard("<out>", R, "tp")
        plan.shard(r"0\.(weight|bias)", S0, "tp").shard(r"2\.weight", S1, "tp")
        parallelize(model, plan)
        found = []
        for recorded in (False, True):
            torch.manual_seed(1)
            with track(model) if recorded else contextlib.nullcontext():
                loss = model(torch.ones(4, 8)).square().sum()
                loss.backward()
            found.append([loss.full_tensor(), *(p.grad.full_tensor() for p in model.parameters())])
            model.zero_grad()
        return all(map(torch.equal, *found))

    assert run_ranks(check, 2) == [True, True]
