"""Hosts that are network namespaces of this machine, with a link that can fail or be slow."""

import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


def _run_ip(*words: str) -> str:
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=20
    ).stdout


@functools.cache
def no_network_hosts() -> str | None:
    """Returns why this machine cannot make namespaces; None if it can."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    name = f"spmd-try-{os.getpid()}"
    try:
        _run_ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    _run_ip("netns", "del", name)
    return None


class NetworkHosts:
    """Two hosts with one link between them; needs `no_network_hosts` to return None.

    A context manager: on exit it kills the hosts' processes and removes the hosts.

    Attributes:
        addresses: of host 0 and host 1, in one network.
    """

    def __init__(self) -> None:
        mark = os.getpid()
        self._names = [f"spmd-{mark}-{host}" for host in range(2)]
        self._links = [f"sp{mark}h{host}" for host in range(2)]
        self.addresses = [f"10.213.{mark % 256}.{host + 1}" for host in range(2)]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "NetworkHosts":
        """Creates the hosts and their link."""
        for name in self._names:
            _run_ip("netns", "add", name)
        ends = [[link, "netns", name] for link, name in zip(self._links, self._names, strict=True)]
        _run_ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host in range(2):
            self._ip(host, "addr", "add", f"{self.addresses[host]}/24", "dev", self._links[host])
            self._ip(host, "link", "set", self._links[host], "up")
            self._ip(host, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the hosts' processes and removes the hosts."""
        try:
            for host in range(2):
                self.kill(host)
            for process in self._processes:
                process.wait(20)
        finally:
            for name in self._names:  # which removes the link too
                _run_ip("netns", "del", name)

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """Returns the command that runs ``words`` on a host."""
        return ["ip", "netns", "exec", self._names[host], *words]

    def start(
        self, host: int, words: Sequence[str], log: Path, **environment: str
    ) -> "subprocess.Popen[str]":
        """Starts a process on a host, with its output in ``log``."""
        with log.open("w") as file:
            process = subprocess.Popen(
                self.command(host, words),
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=os.environ | environment,
            )
        self._processes.append(process)
        return process

    def disconnect(self) -> None:
        """Disables the link: messages are lost, and no process gets an error."""
        self._ip(0, "link", "set", self._links[0], "down")

    def reconnect(self) -> None:
        """Enables the link again."""
        self._ip(0, "link", "set", self._links[0], "up")

    def slow_down(self, *, kbit: int) -> str | None:
        """Limits what both hosts send per second; returns the kernel's error if it cannot."""
        for host in range(2):
            try:
                subprocess.run(
                    self.command(
                        host,
                        f"tc qdisc add dev {self._links[host]} root tbf rate {kbit}kbit"
                        " burst 16kb latency 1s".split(),
                    ),
                    check=True,
                    capture_output=True,
                    text=True,
                )
            except subprocess.CalledProcessError as error:
                return str(error.stderr)
        return None

    def sent(self, host: int) -> int:
        """Returns the bytes that a host has sent over the link."""
        words = ["cat", f"/sys/class/net/{self._links[host]}/statistics/tx_bytes"]
        return int(subprocess.run(self.command(host, words), capture_output=True).stdout)

    def kill(self, host: int) -> None:
        """Kills every process of a host."""
        for pid in _run_ip("netns", "pids", self._names[host]).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has exited

    def _ip(self, host: int, *words: str) -> None:
        _run_ip("-n", self._names[host], *words)
