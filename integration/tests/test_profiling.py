"""Profiles of the steps that were asked for, and of no others."""

import json

import pytest
import torch

from integration.errors import UsageError
from integration.train.measurement.profiling import FOLDER, StepProfiler, StepRange, live_tensors
from plan_api import Float8Block, GatheredOperand


@pytest.mark.parametrize(("text", "steps"), [("10:13", (10, 13)), ("4", (4, 4)), ("1:1", (1, 1))])
def test_ranges(text, steps):
    assert StepRange.parse(text) == StepRange(*steps)


@pytest.mark.parametrize("text", ["", "a", "3:", ":3", "3-4", "-1:2", "1:2:3"])
def test_a_text_of_another_form_is_refused(text):
    with pytest.raises(UsageError, match="expected a range such as 10:13, got"):
        StepRange.parse(text)


@pytest.mark.parametrize("text", ["0:2", "0", "3:2"])
def test_ranges_without_steps_are_refused(text):
    with pytest.raises(UsageError, match="expected a first step of at least 1"):
        StepRange.parse(text)


def profiled_steps(folder, rank):
    trace = json.loads((folder / FOLDER / f"rank{rank}.pt.trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert "aten::mm" in names
    return {name for name in names if name.startswith("step ")}


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(1, 6, {"step 2", "step 3"}), (3, 6, {"step 3"}), (1, 2, {"step 2"})],
    ids=["all", "resumed within", "ended within"],
)
def test_the_trace_holds_the_steps_of_the_range(tmp_path, first, last, expected):
    profiler = StepProfiler(StepRange(2, 3), tmp_path, rank=1)
    tensors = []
    for number in range(first, last + 1):
        with profiler.step(number):
            tensors.append(torch.ones(16, 16) @ torch.ones(16, 16))
    profiler.close()
    assert profiled_steps(tmp_path, 1) == expected
    assert (tmp_path / FOLDER / "rank1.memory.txt").read_text().count("MiB") >= 2


@pytest.mark.parametrize("steps", [None, StepRange(5, 6)])
def test_without_a_step_to_profile_nothing_is_written(tmp_path, steps):
    profiler = StepProfiler(steps, tmp_path, rank=0)
    with profiler.step(1):
        pass
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_live_tensors_count_memory_once():
    tensors = [torch.zeros(1024, 257) for _ in range(3)]
    views = [tensor[:5] for tensor in tensors]
    (row,) = [line for line in live_tensors().splitlines() if "257)" in line]
    assert len(views) == 3
    size, _, count = row.split()[:3]
    assert (float(size), int(count)) == (pytest.approx(3 * 257 / 256, abs=1e-3), 3)


def test_live_tensors_count_the_operands_of_a_weight_without_memory_of_its_own():
    device, form = torch.device("cpu"), GatheredOperand(Float8Block("reference", 16))
    weight = form.unsharded((32, 2064), torch.float32, device, lambda direction: None)
    assert "2064)" not in live_tensors()
    shape = (32, 2064)
    rows = form.quantize(torch.ones(shape), None, "forward", begin=0, shape=shape)
    form.fill(weight, rows, None, "forward")
    (row,) = [line for line in live_tensors().splitlines() if "float8" in line]
    assert row.split()[:4] == ["0.063", "MiB", "1", "x"]  # under the shape of any of its views
