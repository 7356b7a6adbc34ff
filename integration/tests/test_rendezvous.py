"""Ranks that no agent has brought together: who has not come, and why nobody could."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.errors import UsageError
from integration.train.addresses import (
    INTERFACE_VARIABLE,
    Endpoint,
    address_towards,
    choose_interface,
    wait_for_listener,
)
from integration.train.agent import resolve_rendezvous
from integration.train.config import TrainConfig
from integration.train.hosts import Hosts
from integration.train.rendezvous import join_ranks, ranks
from integration.train.world import World


@pytest.fixture
def port(monkeypatch):
    """A free port, which the environment names."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return port


def join_in_threads(numbers, size, seconds):
    """What ``meet`` comes to in each of the ranks: a store, or a sentence."""

    def one(rank):
        try:
            return join_ranks(rank, size, seconds)
        except UsageError as error:
            return str(error)

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(one, numbers))


def test_an_agent_finds_its_address_and_whether_the_rendezvous_is_on_its_host(port):
    assert resolve_rendezvous(f"localhost:{port}", 0) == ("127.0.0.1", True)
    # 127.0.1.1 is what many distributions give a machine's own name.
    assert resolve_rendezvous(f"127.0.1.1:{port}", 0)[1]
    with pytest.raises(UsageError, match=r"expected an agent at 192\.0\.2\.1:"):
        resolve_rendezvous(f"192.0.2.1:{port}", 0.2)


def test_all_ranks_get_one_store(port):
    stores = join_in_threads([2, 1, 0], 3, 20)
    stores[0].set("said", "by rank 2")
    assert [store.get("said") for store in stores] == [b"by rank 2"] * 3


def test_joined_ranks_name_the_missing_ones(port):
    first, other = join_in_threads([0, 2], 4, 2)
    assert first.startswith(f"ranks 1, 3 of 4 did not join 127.0.0.1:{port} within 2 s; start")
    # Whoever gives up first says it; with rank 0 its store goes.
    assert other.startswith(
        ("ranks 1, 3 of 4 did not join", "rank 0 of 4 ended or hung while rank 2")
    )


def test_a_rank_without_rank_0_names_the_endpoint(port):
    (message,) = join_in_threads([1], 2, 0.5)
    assert message.startswith(
        f"rank 1 of 2 could not join rank 0 at 127.0.0.1:{port} within 0.5 s (Connection refused);"
    )


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


def test_a_service_that_is_no_store_is_no_rendezvous(stranger, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(stranger))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    began = time.monotonic()
    (message,) = join_in_threads([1], 2, 1.5)
    assert message.startswith(
        f"rank 1 of 2 could not join rank 0 at 127.0.0.1:{stranger} within 1.5 s (a process"
    )
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("blow", "timeout", "within"), [(signal.SIGSTOP, 2, 15), (signal.SIGKILL, 60, 15)]
)
def test_a_rank_0_that_hangs_or_ends_is_named(blow, timeout, within, port, monkeypatch):
    # Of a stopped process the store's client would wait for the answer for ever.
    monkeypatch.setattr("integration.train.rendezvous._LAST_QUERY_SECONDS", 0.5)
    code = (
        "import time, torch.distributed as d;"
        f"s = d.TCPStore('localhost', {port}, is_master=True, wait_for_workers=False);"
        "print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "ready\n"
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            waiting = pool.submit(join_in_threads, [1], 2, timeout)
            time.sleep(1)
            first.send_signal(blow)
            (message,) = waiting.result()
        first.kill()
    assert message.startswith("rank 0 of 2 ended or hung while rank 1 waited for others at ")
    assert time.monotonic() - began < within


def test_a_late_rank_0_is_waited_for(port):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_listener, Endpoint("127.0.0.1", port), 20)
        time.sleep(0.5)
        assert not waiting.done()
        with socket.create_server(("127.0.0.1", port)):
            assert waiting.result() is None


def test_a_port_that_is_taken_is_named(port):
    with socket.create_server(("", port)):
        (message,) = join_in_threads([0], 2, 5)
    assert message.startswith(f"rank 0 of 2 cannot listen at port {port} of the rendezvous: ")


def test_an_environment_without_an_address_is_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="expected MASTER_ADDR in the environment, as RANK is set"):
        join_ranks(0, 2, 1)


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


def of(**options):
    return Hosts.of(TrainConfig(**options))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hosts": 2, "rendezvous": "node0:7"}, "--hosts 2: expected --ranks"),
        (
            {"hosts": 2, "ranks": 1, "rendezvous": "node0"},
            "rendezvous: expected NAME:PORT, got 'node0'",
        ),
    ],
    ids=["ranks", "form"],
)
def test_hosts_that_do_not_go_together_are_refused(options, sentence, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match=sentence):
        of(**options)


def test_hosts_are_refused_where_another_has_started_the_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=r"--rendezvous: expected none .* got node0:7"):
        of(hosts=2, rendezvous="node0:7")


def test_ranks_are_counted_host_by_host(monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        monkeypatch.setenv(name, "unset")
    monkeypatch.delenv("RANK")
    assert of() is None
    assert of(rendezvous="node0:7") == Hosts(1, 0, Endpoint("node0", 7))
    hosts = of(hosts=3, host_rank=2, ranks=4, rendezvous="node0:7")
    hosts.declare(local=World(rank=1, size=4))
    environ = os.environ
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("9", "12")
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("node0", "7")
    assert environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_ranks_are_listed_in_order():
    assert (ranks([3]), ranks([3, 1])) == ("rank 3", "ranks 1, 3")
