"""Snapshots of ranks in a store, also in one that does not answer."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from fused_comm.diagnosis import Watch, store_channel, take_snapshot
from fused_comm.diagnosis.stack import frames_of_thread
from fused_comm.diagnosis.store_channel import StoreChannel
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
def snapshot():
    return take_snapshot(frames_of_thread(threading.get_ident()), activity="a test")


def test_a_stopped_store_blocks_no_request_and_gets_the_next_when_it_continues(
    host_of_the_store, snapshot, monkeypatch
):
    monkeypatch.setattr(store_channel, "_REQUEST_SECONDS", 0.3)
    channel = StoreChannel()
    channel.publish(snapshot)
    assert channel.poll(()) == {0: snapshot}
    assert channel.poll([0]) == {}
    host_of_the_store.send_signal(signal.SIGSTOP)
    os.waitpid(host_of_the_store.pid, os.WUNTRACED)  # all of its threads have stopped
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the store has not answered within 0\.3 s"):
        channel.poll(())
    assert 0.3 <= time.monotonic() - started < 5
    with pytest.raises(RuntimeError, match="has not answered"):
        channel.withdraw()
    requests = [thread for thread in threading.enumerate() if thread.name == "store request"]
    assert len(requests) == 1, "a request was made while the last one was pending"
    host_of_the_store.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 30
    while True:
        try:
            channel.withdraw()
            break
        except RuntimeError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert channel.poll(()) == {}


def test_a_store_whose_host_has_ended_is_an_error(host_of_the_store, snapshot):
    channel = StoreChannel()
    host_of_the_store.kill()
    host_of_the_store.wait()
    with pytest.raises(dist.DistNetworkError):
        channel.poll(())


@pytest.mark.parametrize(("owner", "slow"), [(Watch, "_write"), (StoreChannel, "publish")])
def test_a_snapshot_that_is_being_published_is_withdrawn_by_the_next_step(
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
        if slow == "publish":
            threading.Timer(0.3, go_on.set).start()
            watch.step("the next")  # waits until the snapshot is published
            assert go_on.is_set()
        else:
            watch.step("the next")
            go_on.set()
        watch.step("and the next")
    assert watch._channel.poll(()) == {}


@pytest.mark.ranks
def test_ranks_that_were_in_other_groups_find_each_others_snapshots():
    def one_rank():
        StoreChannel()

    def both():
        channel = StoreChannel()
        channel.publish(take_snapshot(frames_of_thread(threading.get_ident()), activity="a test"))
        dist.barrier()
        found = sorted(channel.poll(()))
        again = sorted(StoreChannel().poll(()))
        dist.barrier()
        return found, again

    run_ranks(one_rank, 1)
    assert run_ranks(both, 2) == [([0, 1], [])] * 2


def test_a_snapshot_from_before_a_restart_is_removed(host_of_the_store, snapshot):
    """torchrun keeps its store over restarts, and the processes start to count again."""
    StoreChannel().publish(snapshot)
    store_channel._numbers.clear()
    assert StoreChannel().poll(()) == {}
