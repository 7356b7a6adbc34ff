"""Compiles the simulated device's extension for the installed torch, once per content and torch.

It is kept in ``SIM_CACHE``, by default ``~/.cache/testkit-sim``, in a folder named after the
sources, torch and Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "cpp"


def compile_extension() -> None:
    """Compiles it if no process has, in half a minute; this process does not load the device.

    Raises:
        subprocess.CalledProcessError: the compiler fails; its output is on stderr.
        OSError: the cache cannot be written.
    """
    name = _name()
    if _compiled(_folder(name), name).exists():
        return
    command = [sys.executable, "-P", "-c", "from testkit.sim import build; build.extension()"]
    path = os.pathsep.join(sys.path)
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})


def extension() -> ModuleType:
    """Returns the compiled extension, which registers the device; compiles it if necessary.

    One process compiles and others wait.

    Raises:
        RuntimeError: the compiler fails.
        OSError: the cache cannot be written.
    """
    name = _name()
    folder = _folder(name)
    with (folder / "flock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _compiled(folder, name).exists():
            return _compile(folder, name)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(folder: Path, name: str) -> ModuleType:
    # torch's own lock stays behind a process that is killed, and would be waited for forever.
    (folder / "lock").unlink(missing_ok=True)
    with _ninja_of_this_environment():
        module: ModuleType = cpp_extension.load(
            name=name,
            sources=[str(_one_source(folder))],
            extra_cflags=["-O1", "-std=c++20"],
            extra_include_paths=[str(SOURCES)],
            build_directory=str(folder),
        )
    _compiled(folder, name).touch()
    return module


def _one_source(folder: Path) -> Path:
    """Writes a file that includes all sources, in half of whose time torch's headers are parsed."""
    whole = folder / "all.cpp"
    names = (file.name for file in sorted(SOURCES.glob("*.cpp")))
    whole.write_text("".join(f'#include "{name}"\n' for name in names))
    return whole


def _compiled(folder: Path, name: str) -> Path:
    """A file that is there once the extension is complete."""
    return folder / f"{name}.complete"


def _name() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.implementation.cache_tag}".encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return f"testkit_sim_{digest.hexdigest()[:16]}"


def _folder(name: str) -> Path:
    user = Path(os.environ.get("SIM_CACHE", Path.home() / ".cache" / "testkit-sim"))
    temporary = Path(tempfile.gettempdir()) / f"testkit-sim-{os.getuid()}"
    for cache in (user, temporary):  # a home folder may not be writable
        try:
            (cache / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        return cache / name
    raise OSError(f"testkit.sim: cannot write {user} or {temporary}; set SIM_CACHE to a folder")


@contextmanager
def _ninja_of_this_environment() -> Iterator[None]:
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
