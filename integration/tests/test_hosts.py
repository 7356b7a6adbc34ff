"""Several hosts, as network namespaces: they join, train as one host does, and lose each other."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration.train.metrics import read_metrics

pytestmark = pytest.mark.ranks

STEPS = 100  # so many that a test which is late still finds the run under way
TINY = ["--model", "llama-tiny", "--system", "ddp", "--checkpoint-every", "4", "--micro-batch", "2"]
TINY += ["--timeout", "15", "--no-tensorboard"]
TRAIN = [sys.executable, "-m", "integration.train"]
PORT = 29517
SCRIPTS = Path(__file__).parents[1] / "launch"


def losses(out):
    return [(record.step, record.loss) for record in read_metrics(out)]


def start(hosts, out, *options, steps=STEPS, only=(0, 1), **environment):
    """Start torchrun.sh on each of several hosts; return its processes and their logs."""
    out.parent.mkdir(exist_ok=True)
    logs = [out.with_name(f"{out.name}.host{host}") for host in range(2)]
    settings = {
        "HOSTS": "2",
        "JOIN_TIMEOUT": "90",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RENDEZVOUS": f"{hosts.addresses[0]}:{PORT}",
    }
    words = [str(SCRIPTS / "torchrun.sh"), "--out", str(out), *TINY, "--steps", str(steps)]
    return [
        hosts.start(host, [*words, *options], logs[host], **settings | environment) for host in only
    ], logs


def codes(processes, *, within=120):
    deadline = time.monotonic() + within
    return [process.wait(max(1, deadline - time.monotonic())) for process in processes]


def wait_for_step(out, step, processes):
    deadline = time.monotonic() + 120
    while not (records := read_metrics(out)) or records[-1].step < step:
        assert all(process.poll() is None for process in processes), "ended before it was disturbed"
        assert time.monotonic() < deadline, f"no step {step} within two minutes"
        time.sleep(0.02)


def sentence(log):
    """The one sentence that a host ended with."""
    found = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(found) == 1, log.read_text()
    assert "Traceback" not in log.read_text()
    return found[0]


@pytest.fixture(scope="module")
def one_host(tmp_path_factory):
    """The same training by two ranks of one host."""
    out = tmp_path_factory.mktemp("one") / "run"
    command = [*TRAIN, "--out", str(out), *TINY, "--steps", str(STEPS), "--ranks", "2"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return losses(out)


@pytest.mark.slow
def test_a_slow_link_delays_and_changes_nothing(hosts, one_host, tmp_path):
    reason = hosts.slow_down(kbit=8000)
    if reason is not None:
        pytest.skip(f"this kernel cannot slow a link: {reason}")
    started = time.monotonic()
    processes, _ = start(hosts, tmp_path / "run", steps=4)
    assert codes(processes) == [0, 0]
    assert losses(tmp_path / "run") == one_host[:4]
    # 8 Mbit/s are 1 MB/s: what was sent cannot have taken less.
    sent = hosts.sent(0)
    seconds = sum(record.seconds for record in read_metrics(tmp_path / "run"))
    assert time.monotonic() - started > sent / 1.0e6 - 0.1
    assert seconds > 4 * 80_000 / 1.0e6


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both_hosts_with_a_sentence(hosts, tmp_path):
    out = tmp_path / "run"
    processes, logs = start(hosts, out, steps=100_000)
    wait_for_step(out, 5, processes)
    hosts.disconnect()
    # Ranks end after 15 s, the timeout of collectives; the agent without the store waits for it.
    assert codes(processes, within=60) == [1, 1]
    for host, log in enumerate(logs):
        other = hosts.addresses[1 - host]
        assert re.search(
            rf"error: rank {host} of 2 stopped: the host of rank {1 - host}, {other} \(.*\),"
            r" does not answer \(.*gloo.*\); restart all ranks",
            log.read_text(),
        )
    without_store = f"and the host of the rendezvous, {hosts.addresses[0]}:{PORT}, does not answer"
    assert without_store in logs[1].read_text()
    assert without_store not in logs[0].read_text()


@pytest.mark.slow
def test_a_host_that_disappears_is_named_and_two_hosts_go_on_as_one_bit_for_bit(
    hosts, one_host, tmp_path
):
    out = tmp_path / "run"
    processes, logs = start(hosts, out)
    wait_for_step(out, 5, processes)
    hosts.disconnect()
    hosts.kill(1)
    assert codes(processes, within=30) == [1, -9]
    assert "error: rank 0 of 2 stopped: the host of rank 1, " in sentence(logs[0])
    reached = len(losses(out))
    assert 5 <= reached < STEPS, "the host went too late to prove anything"
    hosts.reconnect()
    before = hosts.sent(0), hosts.sent(1)
    processes, logs = start(hosts, out)
    assert codes(processes) == [0, 0]
    resumed_at = int(re.search(r"resumed from .* at step (\d+)\n", logs[0].read_text())[1])
    assert 4 <= resumed_at <= reached
    assert losses(out) == one_host
    # Gradients of 80 KB and more cross the link in every step, in both directions.
    sent = min(hosts.sent(0) - before[0], hosts.sent(1) - before[1])
    assert sent > (STEPS - resumed_at) * 80_000


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_at_once(hosts, tmp_path):
    processes, logs = start(hosts, tmp_path / "run", "--timeout", "120")
    wait_for_step(tmp_path / "run", 5, processes)
    hosts.kill(1)
    assert codes(processes, within=30) == [1, -9]
    assert f"of 2 stopped: rank 1 on {hosts.addresses[1]} (" in sentence(logs[0])
    assert ") ended (" in sentence(logs[0])


@pytest.mark.slow
def test_a_host_that_does_not_join_is_one_sentence(hosts, tmp_path):
    processes, logs = start(hosts, tmp_path / "run", only=[0], JOIN_TIMEOUT="3")
    assert codes(processes, within=60) == [2]
    assert sentence(logs[0]).startswith(
        f"error: expected 2 hosts to join {hosts.addresses[0]}:{PORT} within 3 s, got fewer; start"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_unreachable_rendezvous_is_one_sentence(hosts, tmp_path):
    where = f"nowhere.invalid:{PORT}"
    processes, logs = start(hosts, tmp_path / "run", only=[1], JOIN_TIMEOUT="3", RENDEZVOUS=where)
    assert codes(processes) == [2]
    expected = rf"error: expected an agent at {where} within 3 s, got none \(.*name.*\); start"
    assert re.match(expected, sentence(logs[1]))


@pytest.mark.slow
def test_a_wrong_interface_is_one_sentence(hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    processes, logs = start(hosts, tmp_path / "run")
    assert codes(processes) == [2, 2]
    assert "could not connect to the others over interface none0" in sentence(logs[0])
