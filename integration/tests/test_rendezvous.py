"""The rendezvous: its endpoint, and ranks that join it without torchrun's agents."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.errors import UsageError
from integration.train.launch.agent import resolve_rendezvous
from integration.train.launch.endpoint import (
    INTERFACE_VARIABLE,
    Endpoint,
    StoreUnreachableError,
    address_towards,
    answers,
    choose_interface,
    connect,
    endpoint_of_environment,
    wait_for_listener,
)
from testkit import start_python


@pytest.fixture
def port(monkeypatch):
    """A free port, which the environment names."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return port


def test_an_agent_finds_its_address_and_whether_the_rendezvous_is_on_its_host(port):
    assert resolve_rendezvous(f"localhost:{port}", 0) == ("127.0.0.1", True)
    # 127.0.1.1 is what many distributions give a machine's own name.
    assert resolve_rendezvous(f"127.0.1.1:{port}", 0)[1]
    with pytest.raises(UsageError, match=r"expected an agent at 192\.0\.2\.1:"):
        resolve_rendezvous(f"192.0.2.1:{port}", 0.2)


@pytest.fixture(params=["says nothing", "speaks of something else", "hangs up"])
def stranger(request):
    """The port of a service that is no store."""
    server = socket.create_server(("127.0.0.1", 0))
    connections = []

    def serve():
        with contextlib.suppress(OSError):  # closed
            while True:
                connections.append(server.accept()[0])
                if request.param == "speaks of something else":
                    connections[-1].sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                if request.param == "hangs up":
                    connections.pop().close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for connection in connections:
        connection.close()
    thread.join()


def test_a_service_that_is_no_store_is_no_rendezvous(stranger):
    began = time.monotonic()
    with pytest.raises(StoreUnreachableError, match="listens there"):
        connect(Endpoint("127.0.0.1", stranger), 1.5)
    assert time.monotonic() - began < 10


RANK = """
import sys
import torch.distributed as dist
from integration.errors import UsageError
from integration.train.launch.world import process_group
try:
    with process_group(30.0, join_seconds=float(sys.argv[1])) as world:
        dist.barrier()  # the other rank may still connect to this one
        print(world.rank, "of", world.size)
except UsageError as error:
    print(error)
"""


def start_rank(rank, port, seconds):
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(port)
    return start_python("-c", RANK, str(seconds), environment=os.environ | environment)


def test_ranks_of_the_environment_join_without_an_agent(port):
    ranks = [start_rank(rank, port, 60) for rank in range(2)]
    assert [rank.wait(timeout=90).stdout for rank in ranks] == ["0 of 2\n", "1 of 2\n"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_alone_says_that_the_others_are_missing(rank, port):
    message = start_rank(rank, port, 2).wait(timeout=90).stdout
    assert message.startswith(
        f"rank {rank} of 2 could not join the others at 127.0.0.1:{port} within 2 s ("
    )


def test_a_host_answers_if_it_accepts_or_refuses_a_connection(port):
    assert answers(Endpoint("127.0.0.1", port), 1)  # nobody listens
    with socket.create_server(("127.0.0.1", port)):
        assert answers(Endpoint("127.0.0.1", port), 1)


def test_a_host_does_not_answer_if_connections_time_out():
    # As from a host that is gone: the kernel drops what the full queue of a listener cannot take.
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        contextlib.ExitStack() as full,
    ):
        for _ in range(4):
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        assert not answers(Endpoint(*server.getsockname()), 0.3)


def test_a_late_rank_0_is_waited_for(port):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_listener, Endpoint("127.0.0.1", port), 20)
        time.sleep(0.5)
        assert not waiting.done()
        with socket.create_server(("127.0.0.1", port)):
            assert waiting.result() is None


@pytest.mark.parametrize("text", ["node0", ":29500", "node0:", "node0:x", "node0:0", "node0:65536"])
def test_a_rendezvous_of_another_form_is_refused(text):
    with pytest.raises(UsageError, match=f"^rendezvous: expected NAME:PORT, got '{text}'; give"):
        Endpoint.parse(text)


def test_the_interface_is_the_one_towards_the_others_unless_it_is_given(monkeypatch):
    monkeypatch.delenv(INTERFACE_VARIABLE, raising=False)
    monkeypatch.setenv(INTERFACE_VARIABLE, "given")
    choose_interface(Endpoint("127.0.0.1", 1))
    assert os.environ[INTERFACE_VARIABLE] == "given"
    monkeypatch.delenv(INTERFACE_VARIABLE)
    choose_interface(Endpoint("nowhere.invalid", 1))
    assert INTERFACE_VARIABLE not in os.environ
    choose_interface(Endpoint("127.0.0.1", 1))
    assert os.environ[INTERFACE_VARIABLE] == "lo"
    assert address_towards(Endpoint("127.0.0.1", 1)) == "127.0.0.1"


def test_an_environment_without_an_address_is_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="expected MASTER_ADDR in the environment, as RANK is set"):
        endpoint_of_environment()
