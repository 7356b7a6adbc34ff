"""Faults, and a run that gets over them with the losses of an undisturbed one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from integration.soak.__main__ import main
from integration.soak.fault_schedule import KINDS, Fault, draw_fault_schedule
from integration.soak.report import compare, describe, soak_of, soak_report, write_soak
from integration.soak.supervisor import Incident
from integration.train.metrics import StepRecord, read_metrics


def draw(seed, *, kinds=KINDS, steps=500):
    return draw_fault_schedule(steps=steps, every=50, ranks=2, kinds=kinds, seed=seed)


def test_faults_come_every_so_many_steps_of_every_kind_to_every_rank():
    fault_schedule = draw(0)
    assert [fault.step for fault in fault_schedule] == list(range(50, 500, 50))
    for start in range(0, 9, 3):
        assert {fault.kind for fault in fault_schedule[start : start + 3]} == set(KINDS)
    assert {fault.rank for fault in fault_schedule} == {0, 1}
    assert fault_schedule == draw(0)
    assert fault_schedule != draw(1)
    assert {fault.kind for fault in draw(0, kinds=["stop"])} == {"stop"}


def records(losses):
    return [
        StepRecord(step=step, loss=loss, seconds=1.0, tokens=1)
        for step, loss in enumerate(losses, start=1)
    ]


def test_losses_are_compared_by_their_bits_and_by_their_number():
    whole = records([0.1, 0.2, 0.0])
    assert compare(whole, whole, 3).differing == ()
    assert str(compare(whole, whole, 3)) == "the losses of all 3 steps are equal, bit for bit"
    closest = [whole[0], replace(whole[1], loss=0.2 + 2**-55), replace(whole[2], loss=-0.0)]
    assert compare(whole, closest, 3).differing == (2, 3)
    assert compare(whole, whole[:2], 3).differing == (3,)
    assert compare(whole[1:], whole[1:], 3).differing == (1,)
    assert compare(whole, [*whole, whole[1]], 3).differing == (2,)
    message = str(compare(whole, closest, 3))
    assert message == "the losses of 2 of 3 steps differ or are missing, the first at 2, 3"


@pytest.fixture
def incident():
    """A fault that was recovered from."""
    return Incident(Fault(50, 1, "kill"), 51, 1.04, "torchrun", 9.0, "step-00000040", 40, 12.25)


def test_a_report_has_the_verdict_then_a_row_per_fault(incident, tmp_path):
    soak = soak_of(["--every", "50"], 2, [incident], compare(records([0.1]), records([0.1]), 1))
    path = write_soak(soak, tmp_path)
    lines = path.read_text().splitlines()
    assert lines[2] == "**Passes.**"
    assert lines[6].endswith(
        "| Recovered from 1 of 2 faults; the losses of all 1 steps are equal, bit for bit. |"
    )
    assert "| 51 | 1 | kill | 1.0 s, by torchrun | 9.0 s | step-00000040 | 12.2 s |" in lines
    assert "python -m integration.soak --every 50" in lines
    assert json.loads((tmp_path / "soak.json").read_text())["incidents"][0]["at_step"] == 51
    assert describe(incident).startswith("step 51, rank 1, fault kill, detected after 1.0 s, by")


@pytest.mark.parametrize("outcome", ["rank 1 did not end", compare(records([0.1]), [], 1)])
def test_a_soak_that_did_not_finish_or_differs_does_not_pass(outcome, incident):
    report = soak_report(soak_of([], 1, [incident], outcome))
    assert not report.passes
    assert f"; {outcome}." in report.verdicts[0].finding


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "1"], "--ranks: expected at least 2"),
        (["--every", "20"], "got 20, 20 and 500"),
        (["--steps", "50"], "got 20, 50 and 50"),
        (["--kinds", "kill,trip"], "--kinds: expected some of kill, stop, raise, got 'trip'"),
        (["--model", "gpt"], "unknown model 'gpt'"),
        (["--system", "single"], "expected 1 rank, got 2"),
        (["--config", "a.toml", "--system", "fsdp"], "--system fsdp: expected it in --config a.t"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(arguments, sentence, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*arguments, "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert sentence in message
    assert message.count("\n") == 1
    assert not out.exists()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_recovers_from_faults_of_every_kind(tmp_path, capsys):
    out, count = tmp_path / "soak", len(KINDS)
    steps = 10 * (count + 1)
    short = ["--steps", str(steps), "--every", "10", "--checkpoint-every", "4", "--timeout", "8"]
    short += ["--kinds", ",".join(KINDS)]
    code = main([*short, "--out", str(out), "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert f"the losses of all {steps} steps are equal, bit for bit" in printed.err
    found = json.loads((out / "soak.json").read_text())
    assert json.loads(printed.out) == found | {"log": str(out / "soak.md")}
    assert found["passed"]
    incidents = found["incidents"]
    assert [one["fault"]["step"] for one in incidents] == list(range(10, steps, 10))
    assert {one["fault"]["kind"] for one in incidents} == set(KINDS)
    for one in incidents:
        fault = one["fault"]
        assert one["at_step"] >= fault["step"] > one["from_step"]
        assert one["from_step"] % 4 == 0
        assert one["checkpoint"] == f"step-{one['from_step']:08d}"
        assert 0 <= one["noticed"] < one["restarted"] < one["went_on"]
        if fault["kind"] == "stop":  # torchrun knows nothing of it
            assert one["noticed_by"] == f"watchdog of rank {1 - fault['rank']}"
            assert 5 < one["noticed"] < 8 + 5
            # It waits half a minute for the end of a rank that cannot hear of it.
            assert one["restarted"] - one["noticed"] > 5
    log = (out / "disturbed.log").read_text()
    assert "integration.soak made this rank raise" in log
    assert len(re.findall(r"^resumed from ", log, re.MULTILINE)) == count
    runs = [read_metrics(out / run) for run in ("undisturbed", "disturbed")]
    assert [[each.step for each in run] for run in runs] == [list(range(1, steps + 1))] * 2
    text = (out / "soak.md").read_text()
    assert text.count(" | step-000000") == count
    assert f"Recovered from {count} of {count} faults; the losses of all {steps} steps" in text
    # What is there is neither written over nor taken for a soak.
    assert main([*short, "--out", str(out)]) == 2
    assert "already contains a run" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.slow
def test_a_product_of_parallelism_recovers_from_a_killed_rank(tmp_path, capsys):
    """PP x FSDP x TP on 8 ranks, with dropout: the losses are those of a run without the fault."""
    recipe = Path(__file__).parents[1] / "recipes" / "llama-pp2-fsdp2-tp2.toml"
    out = tmp_path / "soak"
    code = main(
        [
            *("--config", str(recipe), "--ranks", "8", "--kinds", "kill", "--timeout", "60"),
            *("--steps", "12", "--every", "8", "--checkpoint-every", "4", "--out", str(out)),
        ]
    )
    assert code == 0, capsys.readouterr().out
    (incident,) = json.loads((out / "soak.json").read_text())["incidents"]
    assert incident["fault"]["kind"] == "kill"
    assert 0 < incident["from_step"] <= incident["at_step"]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_does_not_recover_from_a_fault_is_exit_code_1(tmp_path, capsys, monkeypatch):
    """torchrun may not restart the ranks."""
    import integration.soak.__main__ as command

    class Once(command.Torchrun):
        def __init__(self, options, run, *, restarts):
            super().__init__(options, run, restarts=0)

    monkeypatch.setattr(command, "Torchrun", Once)
    out = tmp_path / "soak"
    options = ["--steps", "12", "--every", "10", "--checkpoint-every", "9", "--kinds", "kill"]
    assert main([*options, "--out", str(out)]) == 1
    assert "torchrun ended with exit code 1 and did not " in capsys.readouterr().out
    assert "Recovered from 0 of 1 faults; torchrun ended" in (out / "soak.md").read_text()
