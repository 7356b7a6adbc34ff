"""Describes the machine and the versions of a run, and formats its commands."""

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
import transformers

import integration

_LINE = 96


@dataclass(frozen=True)
class Environment:
    """Facts for the last section of the report, formatted.

    Attributes:
        command: the command line as given.
        git_commit: commit of the source tree that this package runs from; None outside of one.
    """

    date: str
    command: str
    git_commit: str | None
    integration: str
    torch: str
    transformers: str
    dist_rng: str
    python: str
    cpu: str
    cores: int
    threads_per_rank: int
    memory: str
    load_average: str
    operating_system: str
    data: str

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, value) pairs in the order of the report."""
        versions = (
            ("integration", self.integration),
            ("torch", self.torch),
            ("transformers", self.transformers),
            ("dist-rng", self.dist_rng),
            ("Python", self.python),
        )
        return [
            ("date", self.date),
            ("git commit", self.git_commit or "not run from a git checkout"),
            *versions,
            ("CPU", self.cpu),
            ("cores", str(self.cores)),
            ("threads per rank", str(self.threads_per_rank)),
            ("memory", self.memory),
            ("load average", self.load_average),
            ("operating system", self.operating_system),
            ("data", self.data),
            ("command", self.command),
        ]


def describe_environment(command: Sequence[str], *, threads: int, data: str) -> Environment:
    """Returns the facts of this process and this machine.

    Args:
        command: the command line.
        threads: threads of a rank.
        data: a description of the data.
    """
    fifteen_minutes = os.getloadavg()[2]
    return Environment(
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        command=shlex.join(command),
        git_commit=git_commit(Path(__file__).parent) or git_commit(Path.cwd()),
        integration=integration.__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        dist_rng=_version("dist-rng"),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        threads_per_rank=threads,
        memory=f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        load_average=f"{fifteen_minutes:.1f} over the last 15 minutes, these runs included",
        operating_system=_operating_system(),
        data=data,
    )


def shell_lines(words: Sequence[str]) -> str:
    """Returns a shell command that is broken into lines before options."""
    lines = [""]
    for index, word in enumerate(words):
        quoted = shlex.quote(word)
        value = shlex.quote(words[index + 1]) if index + 1 < len(words) else ""
        if word.startswith("--") and len(f"{lines[-1]} {quoted} {value} \\") > _LINE:
            lines.append("   ")
        lines[-1] += f" {quoted}"
    return " \\\n".join(lines).lstrip()


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name from the kernel, and the machine's architecture."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'unknown')} ({platform.machine()})"


def git_commit(folder: Path) -> str | None:
    """Returns the commit of this project's checkout that contains ``folder``, if any.

    An environment may be inside the checkout of another project, whose commit is not returned.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or not (Path(top) / "integration/src/integration").is_dir():
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(Path(top), "status", "--porcelain")
    return f"{commit} with uncommitted changes" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _operating_system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, kernel {platform.release()}"
