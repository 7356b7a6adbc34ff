"""Ranks' word of what they do, in a store that may not answer."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from fused_comm.diagnosis import Watch, board, stand_of
from fused_comm.diagnosis.stack import levels_of_thread
from testkit import run_ranks

_HOST = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def host_of_the_store():
    """A process that has the store of this one's process group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _HOST, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            yield process
        finally:
            process.kill()
            dist.destroy_process_group()


@pytest.fixture
def stand():
    return stand_of(levels_of_thread(threading.get_ident()), doing="a test")


def test_a_store_that_stands_still_keeps_nobody_and_is_asked_again_when_it_goes_on(
    host_of_the_store, stand, monkeypatch
):
    monkeypatch.setattr(board, "_ANSWER_SECONDS", 0.3)
    ours = board.Board()
    ours.put(stand)
    assert ours.news(()) == {0: stand}
    assert ours.news([0]) == {}
    host_of_the_store.send_signal(signal.SIGSTOP)
    os.waitpid(host_of_the_store.pid, os.WUNTRACED)  # all of its threads have stopped
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"their store has not answered within 0\.3 s"):
        ours.news(())
    assert 0.3 <= time.monotonic() - started < 5
    with pytest.raises(RuntimeError, match="has not answered"):
        ours.take_back()
    asking = [thread for thread in threading.enumerate() if thread.name == "ask the store"]
    assert len(asking) == 1, "asked although the last question is open"
    host_of_the_store.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 30
    while True:
        try:
            ours.take_back()
            break
        except RuntimeError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert ours.news(()) == {}


def test_a_store_whose_host_has_ended_is_an_error(host_of_the_store, stand):
    ours = board.Board()
    host_of_the_store.kill()
    host_of_the_store.wait()
    with pytest.raises(dist.DistNetworkError):
        ours.news(())


@pytest.mark.parametrize(("owner", "slow"), [(Watch, "_write"), (board.Board, "put")])
def test_what_a_rank_says_that_goes_on_meanwhile_is_not_left_behind(
    owner, slow, host_of_the_store, monkeypatch, tmp_path
):
    began, go_on = threading.Event(), threading.Event()

    def slowly(method):
        def wait(self, *args, **options):
            if threading.current_thread().name == "watch":
                began.set()
                go_on.wait(30)
            return method(self, *args, **options)

        return wait

    monkeypatch.setattr(owner, slow, slowly(getattr(owner, slow)))
    with Watch(0.1, folder=tmp_path, patience=0) as watch:
        watch.step("slow")
        assert began.wait(30)
        if slow == "put":
            threading.Timer(0.3, go_on.set).start()
            watch.step("the next")  # waits for what is being told
            assert go_on.is_set()
        else:
            watch.step("the next")
            go_on.set()
        watch.step("and the next")
    assert watch._board.news(()) == {}


@pytest.mark.ranks
def test_ranks_that_were_in_other_groups_find_each_others_words():
    def alone():
        board.Board()

    def both():
        ours = board.Board()
        ours.put(stand_of(levels_of_thread(threading.get_ident()), doing="a test"))
        dist.barrier()
        found = sorted(ours.news(()))
        again = sorted(board.Board().news(()))
        dist.barrier()
        return found, again

    run_ranks(alone, 1)
    assert run_ranks(both, 2) == [([0, 1], [])] * 2


def test_what_was_said_before_a_restart_is_gone(host_of_the_store, stand):
    """torchrun keeps its store over restarts, and the processes begin to count anew."""
    board.Board().put(stand)
    board._numbers.clear()
    assert board.Board().news(()) == {}
