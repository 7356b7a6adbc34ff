"""A breakpoint on one rank, with commands from a script, while the others wait."""

import contextlib
import io
import os
import re
import sys
import time
from bdb import BdbQuit
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import plan_api
from testkit import run_ranks, start_python

TIMEOUT = 1.0  # seconds, of the group and of its store
DELAY = 2.5  # seconds, before the first command


class Script(io.StringIO):
    """Commands that can be read after some time."""

    def __init__(self, *commands, delay=0.0):
        super().__init__("".join(f"{one}\n" for one in commands))
        self.delay = delay

    def readline(self, *size):
        time.sleep(self.delay)
        self.delay = 0.0
        return super().readline(*size)


@contextlib.contextmanager
def scripted(*commands, delay=0.0):
    """Runs commands at the prompt, and yields what it prints."""
    before, sys.stdin = sys.stdin, Script(*commands, delay=delay)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            yield printed
    finally:
        sys.stdin = before


# Its name until torch 2.15.
set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


@contextlib.contextmanager
def short_timeout():
    """Sets timeouts of the group and its store that are shorter than the session at the prompt."""
    group, store = dist.group.WORLD, _get_default_store()
    before = store.timeout
    dist.barrier()
    set_timeout(timedelta(seconds=TIMEOUT), group)
    store.set_timeout(timedelta(seconds=TIMEOUT))
    try:
        yield
    finally:
        set_timeout(timedelta(seconds=60), group)
        store.set_timeout(before)


@pytest.fixture
def sharded(mesh):
    """DTensors of two axes, on a fake mesh."""
    return distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0), Replicate()], src_data_rank=None)


@pytest.mark.ranks
@pytest.mark.parametrize("stops", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_other_ranks_wait_longer_than_the_timeout_and_all_continue(stops):
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        numbers = torch.arange(8.0).reshape(4, 2)
        x = distribute_tensor(numbers, mesh, [Shard(0)])
        commands = ("ranks", "p x", "!x = x * 2", "c")
        with short_timeout(), scripted(*commands, delay=DELAY) as printed:
            began = time.monotonic()
            plan_api.breakpoint(stops)
            waited = time.monotonic() - began
        return waited, printed.getvalue(), x.full_tensor().tolist()

    ranks = run_ranks(check, 2)
    stopped, other = ranks[stops], ranks[1 - stops]
    assert DELAY <= other[0] < DELAY + 30
    assert other[1] == ""
    assert f"rank {stops} has stopped; others wait" in stopped[1]
    assert f"rank {stops} is here" in stopped[1]
    waits = rf"rank {1 - stops} waits at test_breakpoint\.py:\d+ in check, for \d+ s"
    assert re.search(waits, stopped[1])
    assert "local (2, 2) at tp=" + str(stops) in stopped[1]
    assert str(torch.arange(8.0).reshape(4, 2)[2 * stops :][:2]) in stopped[1]
    doubled = torch.arange(8.0).reshape(4, 2)
    doubled[2 * stops :][:2] *= 2  # on this rank only
    assert stopped[2] == other[2] == doubled.tolist()


@pytest.mark.ranks
def test_a_barrier_would_have_timed_out():
    """So the previous test would fail if the ranks waited in a barrier."""

    def check():
        with short_timeout():
            if dist.get_rank() == 0:
                time.sleep(DELAY)
                return True
            with pytest.raises(RuntimeError, match=r"[Tt]imed out|[Tt]imeout"):
                dist.barrier()
        return True

    assert run_ranks(check, 2) == [True, True]


@pytest.mark.ranks
def test_collectives_at_the_prompt_are_refused():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        commands = (
            "full x", "p x.full_tensor()", "pp torch.relu(x.sum())", "torch.distributed.barrier()",
            "p (x * 3).to_local().sum()", "c",
        )  # fmt: skip
        with scripted(*commands) as printed:
            plan_api.breakpoint()
            total = x.sum().full_tensor().item()  # the ranks are in step
        return printed.getvalue(), total

    (printed, total), (_, again) = run_ranks(check, 2)
    assert total == again == 6.0
    assert "Put full = x.full_tensor() in front of breakpoint()" in printed
    refused = re.findall(
        r"\*\*\* RuntimeError: breakpoint: this runs a collective \((\w+)", printed
    )
    assert refused == ["all_gather", "all_reduce", "barrier"]
    assert "tensor(3.)" in printed  # 3 * (0 + 1), of this rank


@pytest.mark.ranks
def test_other_ranks_continue_after_a_step():
    def check():
        value = torch.ones(1)
        with scripted("n", "p value.item()", "ranks", "n", "c") as printed:
            plan_api.breakpoint()
            value = value + 1
            value = value + 1
            dist.all_reduce(value)
        return printed.getvalue(), value.item()

    (printed, value), (_, again) = run_ranks(check, 2)
    assert value == again == 6.0
    assert "2.0" in printed
    assert "rank 1 has gone on" in printed
    assert printed.count("has stopped") == 1


@pytest.mark.ranks
def test_several_stops_follow_one_another():
    def check():
        found = []
        for rank in (0, 1, 0):
            with scripted("p rank", "c") as printed:
                plan_api.breakpoint(rank)
                found.append(rank)
            found.append("has stopped" in printed.getvalue())
        return found

    first, second = run_ranks(check, 2)
    assert first == [0, True, 1, False, 0, True]
    assert second == [0, False, 1, True, 0, False]


@pytest.mark.ranks
def test_quitting_ends_all_ranks():
    def check():
        with scripted("q"), pytest.raises(BdbQuit) as raised:  # noqa: PT012  # pdb stops after it
            plan_api.breakpoint()
            time.sleep(0)
        sys.settrace(None)
        return str(raised.value)

    first, second = run_ranks(check, 2)
    assert first == ""
    assert second == "rank 0 has quit the debugger, so rank 1 ends"


@pytest.mark.ranks
def test_a_rank_without_input_raises_and_stops_no_other():
    def check():
        rank = dist.get_rank()
        before = sys.stdin
        with open(os.devnull) as sys.stdin:
            try:
                plan_api.breakpoint()
            except (RuntimeError, BdbQuit) as error:
                return rank, f"{type(error).__name__}: {error}"
            finally:
                sys.stdin = before
        return rank, "went on"

    (_, first), (_, second) = run_ranks(check, 2)
    assert first.startswith("RuntimeError: breakpoint: expected a standard input or a terminal")
    assert second.startswith("BdbQuit: rank 0 has quit")


@pytest.mark.ranks
def test_a_rank_that_does_not_exist_is_refused_on_all_ranks():
    def check():
        with pytest.raises(ValueError, match="rank=2 must be from 0 to 1"):
            plan_api.breakpoint(2)
        return True

    assert run_ranks(check, 2) == [True, True]


def test_without_a_group_it_is_pdb():
    value = 1
    with scripted("!value = 2", "ranks", "p value + 1", "c") as printed:
        plan_api.breakpoint()
        value = value + 0
    assert "(Pdb) " in printed.getvalue()
    assert "this is the only process" in printed.getvalue()
    assert "\n(Pdb) 3\n" in printed.getvalue().replace("(Pdb) this", "this")


def test_a_process_without_input_uses_its_terminal():
    """As for ranks of torchrun: /dev/null as the input, and a controlling terminal."""
    master, terminal = os.openpty()
    code = (
        f"import os; os.open({os.ttyname(terminal)!r}, os.O_RDWR)\n"  # it becomes the session's
        "import plan_api\n"
        "value = 41\n"
        "plan_api.breakpoint()\n"
        "value += 1\n"
    )
    started = start_python("-c", code)  # without input, in a session of its own
    os.write(master, b"!value += 100\np 'it is', value\nc\n")
    assert started.wait(timeout=120).returncode == 0
    os.set_blocking(master, False)
    assert "('it is', 141)" in os.read(master, 10_000).decode()
    os.close(master)
    os.close(terminal)


def test_a_dtensor_prints_its_local_tensor_without_communication(sharded):
    with scripted("p sharded", "pp [1, 2]", "p missing", "c") as printed:
        plan_api.breakpoint()
        shape = sharded.shape
    assert shape == (4, 6)
    assert (
        "DTensor (4, 6) float32 on cpu, mesh dp=2, tp=2\n"
        "placements dp=S(0), tp=R\n"
        "local (2, 6) at dp=0, tp=0:\n"
        f"{torch.zeros(2, 6)}\n"
    ) in printed.getvalue()
    assert "[1, 2]" in printed.getvalue()
    assert "*** NameError: name 'missing' is not defined" in printed.getvalue()


def test_partials_and_gradients_are_printed(mesh):
    leaf = distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()], src_data_rank=None)
    leaf.requires_grad_()
    total = leaf.sum()
    total.backward()
    with scripted("p total", "p leaf", "c") as printed:
        plan_api.breakpoint()
        kind = total.placements[0]
    assert isinstance(kind, Partial)
    assert "placements dp=P, tp=R\nlocal () at dp=0, tp=0:\ntensor(2.)\nmade by SumBackward0" in (
        printed.getvalue()
    )
    assert "has a gradient: see .grad" in printed.getvalue()
