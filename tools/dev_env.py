"""Makes the development environment, or brings it up to date: ``python -m tools.dev_env DIR``.

Note: a *stamp* inside the environment says what it was made from: the interpreter, the *base*
(pins, tools and the packages' metadata) and one content hash per local project. Another
interpreter recreates it, another base installs everything again with dependencies, another
content hash reinstalls that project alone. An entry is taken out of the stamp before pip runs
and put back after, so an installation that fails or is killed is tried again.
"""

import contextlib
import fcntl
import hashlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.build_wheel import unchanged_wheel
from tools.workspace import ROOT, Project, packages, projects

STAMP = "workspace-stamp.json"
# A third of all lines: tests of other projects, models of which most tests have none, and what is
# compiled to machine code (mypy) or nearly unused (fontTools).
_RARELY_IMPORTED = (
    r"/tests/|/mypyc?/|/fontTools/"
    r"|/transformers/models/(?!__init__|auto/|llama/|mixtral/|qwen3|gemma3|deepseek_v3|gpt_oss|gpt2)"
)


def groups(*names: str) -> list[str]:
    """The requirements of these dependency groups of the root pyproject.toml."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return [requirement for name in names for requirement in table[name]]


def base_hash(local: list[Project]) -> str:
    """A digest of everything that decides which third-party versions are installed."""
    metadata: list[Any] = [project.metadata for project in local]
    constraints = (ROOT / "constraints.txt").read_text()
    text = json.dumps([constraints, groups("build", "dev"), metadata], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def locked(env: Path) -> Iterator[None]:
    """Lets one process at a time change the environment."""
    env.parent.mkdir(parents=True, exist_ok=True)
    with env.with_name(f"{env.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str | Path) -> None:
    """Runs a command at the workspace's root; an exit status other than 0 raises."""
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


def install(env: Path, *what: str | Path) -> None:
    """One pip call, never without the pins."""
    flags = ["--quiet", "--no-build-isolation", "-c", "constraints.txt"]
    run(env / "bin/python", "-m", "pip", "install", *flags, *what)


def compile_all(env: Path) -> None:
    """Bytecode on all cores, a minute less than pip's; a file for a newer Python may fail.

    Of what many processes import: where PYTHONDONTWRITEBYTECODE is set, each would compile it
    again, of sympy and transformers for seconds.
    """
    command = ["-m", "compileall", "-qq", "-j", "0", "-x", _RARELY_IMPORTED, str(env / "lib")]
    subprocess.run([str(env / "bin/python"), *command], cwd=ROOT, check=False)


def synchronise(env: Path) -> list[str]:
    """Makes ``env`` match the working tree; the names of the local projects it reinstalled."""
    local = projects()
    base, hashes = base_hash(local), {project.name: project.content_hash() for project in local}
    path, interpreter = env / STAMP, f"{sys.version} in {sys.base_prefix}"
    stamp = json.loads(path.read_text()) if path.is_file() else {}
    created = stamp.get("interpreter") != interpreter
    if created:
        print(f"creating {env}: some minutes the first time", flush=True)
        run(sys.executable, "-m", "venv", "--clear", env)
        stamp = {"interpreter": interpreter, "base": None, "projects": {}}

    renewed = stamp["base"] != base
    changed = [p for p in local if renewed or stamp["projects"].get(p.name) != hashes[p.name]]
    if not changed:
        return []
    done = {name: seen for name, seen in stamp["projects"].items() if seen == hashes.get(name)}
    stamp |= {"base": None if renewed else base, "projects": {} if renewed else done}
    path.write_text(json.dumps(stamp))
    print("installing", ", ".join(project.name for project in changed), flush=True)
    folders = [project.folder for project in changed]
    if renewed:
        install(env, "--no-compile", *groups("build"))  # a build without isolation needs them
        with ThreadPoolExecutor(max_workers=3) as pool:  # a compiler may take 2 GB
            # Beside the compilers, which have no use for them.
            tools = pool.submit(install, env, "--no-compile", *groups("dev"))
            if created:  # by way of sdists, whose wheels `nox -s wheels` tries afterwards
                published = {project.name for project in packages()}

                def made(project: Project) -> Path:
                    if project.name in published:
                        return unchanged_wheel(project, env / "bin/python")
                    return project.folder

                folders = list(pool.map(made, changed))
            tools.result()
        install(env, "--no-compile", *folders)
        compile_all(env)
    else:
        install(env, "--no-deps", *folders)
    path.write_text(json.dumps(stamp | {"base": base, "projects": hashes}))
    return [project.name for project in changed]


if __name__ == "__main__":
    with locked(Path(sys.argv[1])):
        synchronise(Path(sys.argv[1]).resolve())
