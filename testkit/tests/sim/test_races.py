"""The race checker finds accesses that nothing orders, and nothing else."""

import gc

import pytest
import torch

from testkit.ranks.run import RankError
from testkit.sim.races import RaceChecker, RaceError
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks


def on_two_streams(write, read, wait=lambda current, side: None):
    """A buffer of 100 elements that a side stream writes and the current one reads."""
    device = torch.get_device_module("sim")
    buffer, side = torch.zeros(100, device="sim"), device.Stream()
    side.wait_stream(device.current_stream())
    with device.stream(side):
        write(buffer)
    wait(device.current_stream(), side)
    read(buffer)
    device.synchronize()


def by_event(current, side):
    event = side.record_event()
    current.wait_event(event)


CASES = {
    "overlapping views": (lambda b: b[10:60].fill_(1), lambda b: b[50:].sum(), None, 1),
    "views that touch": (lambda b: b[10:50].fill_(1), lambda b: b[50:].sum(), None, 0),
    "two reads": (lambda b: b.sum(), lambda b: b.max(), None, 0),
    "a write after a read": (lambda b: b.sum(), lambda b: b[3].fill_(1), None, 1),
    "a write after a write": (lambda b: b.fill_(1), lambda b: b.fill_(2), None, 1),
    "a stream that waits": (
        lambda b: b.fill_(1), lambda b: b.sum(), lambda current, side: current.wait_stream(side), 0,
    ),
    "a stream that waits for an event": (lambda b: b.fill_(1), lambda b: b.sum(), by_event, 0),
    "a host that waits": (
        lambda b: b.fill_(1), lambda b: b.sum(), lambda current, side: side.synchronize(), 0,
    ),
    "the wrong stream waits": (
        lambda b: b.fill_(1), lambda b: b.sum(), lambda current, side: side.wait_stream(current), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_accesses_on_two_streams(name):
    write, read, wait, races = CASES[name]

    def check():
        try:
            with RaceChecker() as checker:
                on_two_streams(write, read, *([wait] if wait else []))
        except RaceError as error:
            return len(error.races), str(error), checker.accesses
        return 0, "", checker.accesses

    ((found, message, accesses),) = run_sim_ranks(check, 1, races=False)
    assert found == races, message
    assert accesses >= 3
    if races:
        assert "and nothing orders it behind" in message
        assert message.count("test_races.py") >= 2


@pytest.mark.parametrize(
    ("remedy", "races"),
    [
        ("none", 1),
        ("record_stream", 0),
        ("record_stream of a stream that waits", 0),
        ("wait before the next use", 0),
    ],
)
def test_memory_that_is_freed_while_another_stream_reads_it(remedy, races):
    def check():
        device = torch.get_device_module("sim")
        side = device.Stream()
        try:
            with RaceChecker():
                buffer = torch.zeros(100, device="sim")
                side.wait_stream(device.current_stream())
                with device.stream(side):
                    buffer.sum()
                if remedy == "record_stream":
                    buffer.record_stream(side)
                if remedy == "record_stream of a stream that waits":
                    other = device.Stream()
                    other.wait_stream(side)
                    buffer.record_stream(other)
                del buffer
                if remedy == "wait before the next use":
                    device.current_stream().wait_stream(side)
                torch.zeros(100, device="sim")  # may get the memory
        except RaceError as error:
            return len(error.races), str(error)
        return 0, ""

    ((found, message),) = run_sim_ranks(check, 1, races=False)
    assert found == races, message
    assert ("may reuse" in message) == bool(races)


def test_a_storage_that_is_resized_to_nothing_is_freed():
    def check():
        device = torch.get_device_module("sim")
        side, checker = device.Stream(), RaceChecker()
        try:
            with checker:
                buffer = torch.zeros(100, device="sim")
                side.wait_stream(device.current_stream())
                with device.stream(side):
                    buffer.sum()
                buffer.untyped_storage().resize_(0)
                torch.zeros(100, device="sim")
        except RaceError as error:
            assert "may reuse" in str(error)  # noqa: PT017 - the block is of several statements
        return len(checker.races)

    assert run_sim_ranks(check, 1, races=False) == [1]


def test_memory_that_garbage_collection_frees_within_a_report():
    def check():
        class Cycle:
            def __init__(self):
                self.me, self.tensor = self, torch.zeros(100, device="sim")

        class Collecting(RaceChecker):
            depth, depths = 0, set()

            def _handle(self, *report):
                self.depth += 1
                self.depths.add(self.depth)
                gc.collect()  # frees the cycles' tensors, each of which is another report
                super()._handle(*report)
                self.depth -= 1

        gc.disable()  # until a report
        try:
            with Collecting() as checker:
                for _ in range(3):
                    Cycle()
                torch.zeros(1, device="sim")
        finally:
            gc.enable()
        return checker.depths

    assert run_sim_ranks(check, 1, races=False, timeout=20) == [{1}]


def test_a_race_on_a_rank_fails_the_call():
    def check():
        on_two_streams(lambda b: b.fill_(1), lambda b: b.sum())

    with pytest.raises(RankError, match=r"(?s)RaceError: race: aten::sum reads 400 bytes"):
        run_sim_ranks(check, 1)


def test_memory_that_an_error_frees_is_reported_and_the_error_stays():
    def check():
        param = torch.nn.Parameter(torch.ones(2))
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            param.data = torch.ones(2).to("sim")

    run_sim_ranks(check, 1)
