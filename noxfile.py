"""The workspace's commands: ``nox -l`` lists them, bare ``nox`` runs lint, types and tests.

``tests``, ``types``, ``docs``, ``sanitize``, ``integration`` and ``bench`` share one environment,
``.nox/dev``, which ``tools/dev_env.py`` keeps equal to the working tree; ``lint`` has its own
small one.
"""

import os
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
DEV = ROOT / ".nox" / "dev"
RESULTS = ROOT / ".nox" / "test-results"

PACKAGES = {
    path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
# Those whose CMakeLists.txt can compile for ASAN and UBSAN.
SANITIZED = ("dtensor-rules", "fsdp")
# Supported, but not the one that the workspace pins (constraints.txt).
OTHER_TORCHES = ("2.11", "2.12", "2.14", "2.15")
# Supported, too, and not that of constraints.txt's torch on disk.
OTHER_PYTHONS = ("3.12", "3.13")
PROJECTS = PACKAGES | {name: ROOT / name for name in ("testkit", "tools", "integration")}


def dev_env(session: nox.Session) -> str:
    """Brings the shared environment up to date; the path of its Python."""
    session.run(sys.executable, "-m", "tools.dev_env", str(DEV), external=True)
    return str(DEV / "bin" / "python")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The fast tests of the project named, of those named, or of all; arguments go to pytest.

    ``-n 0`` among them runs one project's tests in one process, as a debugger needs.
    """
    session.run(dev_env(session), "-m", "tools.run_tests", *session.posargs)


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """The slow tier: tests marked slow, then other torches, other Pythons and all examples.

    docs/support/nightly.md records what they came to. Arguments are those of `tests`: of projects
    that are named the slow tests alone run and are recorded, with options of pytest nothing is.
    """
    python = dev_env(session)
    command = (python, "-m", "tools.run_tests", "--slow", *session.posargs)
    if any(word.startswith("-") for word in session.posargs):
        session.run(*command)
        return
    session.run(*command, success_codes=(0, 1))  # failed tests are recorded too
    for torch in () if session.posargs else (OTHER_TORCHES[0], OTHER_TORCHES[-1]):
        session.notify(f"compat({torch})")
    if not session.posargs:
        for version in OTHER_PYTHONS:
            session.notify(f"pythons({version})")
        session.notify("examples", ["--ranks", "2", "--steps", "4"])
    reports = [RESULTS / f"slow-{name}.xml" for name in session.posargs or PROJECTS]
    ran = [str(report) for report in reports if report.is_file()]
    session.run(python, "-m", "tools.nightly_record", *ran)


@nox.session
@nox.parametrize("torch", [nox.param(version, id=version) for version in OTHER_TORCHES])
def compat(session: nox.Session, torch: str) -> None:
    """The packages named, or all, with another torch: each wheel alone, then the tests.

    Several GB from PyPI. ``alone`` among the names leaves the tests out. docs/support/nightly.md
    records what the tests came to.
    """
    names = [name for name in session.posargs if name != "alone"]
    if unknown := set(names) - set(PACKAGES):
        session.error(f"no package {sorted(unknown)}; there are {sorted(PACKAGES)}")
    made = Path(session.create_tmp())
    pins, dist = made / "constraints.txt", made / "dist"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    # torch 2.11 needs an older setuptools than the pinned one.
    others = (line for line in lines if not line.startswith(("torch==", "setuptools==")))
    pins.write_text("".join(others))
    groups = nox.project.load_toml(ROOT / "pyproject.toml")
    tools = nox.project.dependency_groups(groups, "build", "dev")
    # Of an earlier call; wheels are tried where no package is.
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", *PACKAGES, silent=True)
    session.install("-c", str(pins), f"torch=={torch}.*", *tools)
    session.install("--no-build-isolation", "-c", str(pins), str(ROOT / "testkit"))
    options = ("--stacked", "--dist", str(dist), "--pins", str(pins))
    session.run("python", "-m", "tools.check_wheels", *options, *names)
    if "alone" in session.posargs:
        return
    built = {path.name.partition("-")[0].replace("_", "-"): path for path in dist.glob("*.whl")}
    local = [str(built.get(name, folder)) for name, folder in PACKAGES.items()]
    session.install("--no-build-isolation", "-c", str(pins), *local)
    failed = []
    for name in names or PACKAGES:
        report = RESULTS / f"{name}-{torch}.xml"
        report.unlink(missing_ok=True)
        # Other versions warn of other things; their warnings are not for this repository to repair.
        junit = f"--junit-xml={report}"
        try:
            session.run("pytest", "-W", "default", junit, str(PACKAGES[name] / "tests"))
        except CommandFailed:  # the next package is tested all the same
            failed.append(name)
        record = ("tools.nightly_record", str(report), "--package", name)
        session.run("python", "-m", *record, success_codes=(0, 1))
    if failed:
        session.error(f"with torch {torch} these packages' tests fail: {failed}")


@nox.session(venv_backend="none")
@nox.parametrize("python", [nox.param(version, id=version) for version in OTHER_PYTHONS])
def pythons(session: nox.Session, python: str) -> None:
    """What needs no torch, built and tested with another Python; all packages' metadata."""
    session.run(dev_env(session), "-m", "tools.other_pythons", python)


@nox.session
def examples(session: nox.Session) -> None:
    """The examples with other frameworks, each compared with the framework's own FSDP2.

    The environment has the frameworks (examples/requirements.txt) and what the shared one has.
    docs/benchmarks/examples.md gets the results. Arguments are those of each example; ``--tiny``
    among them, with which continuous integration runs them, leaves the page as it is. Where
    ACCELERATE_CLONE is a clone of huggingface/accelerate, its own scripts are compared too.
    """
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = dev_env(session)
    shared = str(session.run(python, "-c", site, external=True, silent=True)).strip()
    own = str(session.run("python", "-c", site, silent=True)).strip()
    (Path(own) / "shared.pth").write_text(f"{shared}\n")
    results = Path(session.create_tmp())
    pins = results / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    # torchtitan, and the datasets that it accepts, need older ones than those pinned.
    older = ("fsspec==", "huggingface_hub==", "spmd_types==")
    pins.write_text("".join(line for line in lines if not line.startswith(older)))
    # Of the frameworks a part is imported, whose bytecode the first process writes.
    session.install("--no-compile", "-c", str(pins), "-r", "examples/requirements.txt")
    commands = {
        script.parent.name: (
            script,
            *session.posargs,
            "--json",
            f"{results}/{script.parent.name}.json",
        )
        for script in sorted((ROOT / "examples").glob("*/train.py"))
    }
    if clone := os.environ.get("ACCELERATE_CLONE"):
        own_scripts = ("examples/accelerate/own_scripts.py", "--accelerate", clone)
        commands["accelerate's own scripts"] = own_scripts
    failed = []
    for name, command in commands.items():
        try:
            session.run("python", *map(str, command), env={"PYTHONDONTWRITEBYTECODE": ""})
        except CommandFailed:  # the next example is compared all the same
            failed.append(name)
    if failed:
        session.error(f"these examples fail, or differ from native FSDP2: {failed}")
    if "--tiny" in session.posargs:
        return
    session.run(
        python, "-m", "tools.example_results", str(results), *session.posargs, external=True
    )


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def release(session: nox.Session, package: str) -> None:
    """One package's sdist, wheel and release notes in dist/release, checked; uploads nothing."""
    groups = nox.project.load_toml(ROOT / "pyproject.toml")
    session.install("-c", "constraints.txt", *nox.project.dependency_groups(groups, "release"))
    session.run(dev_env(session), "-m", "tools.release", package, external=True)
    made = (ROOT / "dist" / "release").glob(f"{package.replace('-', '_')}-*")
    uploaded = sorted(str(path) for path in made if path.suffix != ".md")  # those are the notes
    session.run("twine", "check", "--strict", *uploaded)


@nox.session
def index(session: nox.Session) -> None:
    """The packages named, or all, built in the order of their dependencies, as a local index.

    It is in dist/index. `-- --try fsdp` installs fsdp from it alone, and runs its smoke test and
    examples.
    """
    groups = nox.project.load_toml(ROOT / "pyproject.toml")
    session.install(*nox.project.dependency_groups(groups, "wheels"))
    own = str(Path(session.virtualenv.location) / "bin" / "python")
    command = ("-m", "tools.local_index", "--auditwheel", own, *session.posargs)
    session.run(dev_env(session), *command, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's checks and format, the direction of imports, the size of modules, the terminology."""
    groups = nox.project.load_toml(ROOT / "pyproject.toml")
    session.install("-c", "constraints.txt", *nox.project.dependency_groups(groups, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "-m", "tools.check_deps")
    session.run("python", "-m", "tools.check_size")
    session.run("python", "-m", "tools.check_language")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, on every src, the tools and this file."""
    mypy = [dev_env(session), "-m", "mypy", "--strict"]
    sources = [folder / "src" for name, folder in PROJECTS.items() if name != "tools"]
    checked = [*sources, *sorted(ROOT.glob("tools/*.py"))]
    session.run(*mypy, *(str(path.relative_to(ROOT)) for path in checked))
    # nox itself is found where it runs, not in the shared environment.
    session.run(*mypy, "--python-executable", sys.executable, "noxfile.py")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The site, into site/: open site/index.html; `-- serve` shows it while pages are edited."""
    command = session.posargs or ["build"]
    session.run(dev_env(session), "-m", "mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Builds every package's sdist and wheel, and tries each wheel alone in a clean environment."""
    session.run(dev_env(session), "-m", "tools.check_wheels", *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("project", [nox.param(name, id=name) for name in SANITIZED])
def sanitize(session: nox.Session, project: str) -> None:
    """One package's tests, its C++ under ASAN and UBSAN, in some 20 minutes; takes pytest's."""
    session.run(dev_env(session), "-m", "tools.sanitize", project, *session.posargs)


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """The main job: trains under every system and compares; `-- full` longer.

    `-- scale` simulates many ranks, `-- soak` disturbs a run over and over. Further arguments are
    options of what runs.
    """
    arguments, command = [*session.posargs], "compare"
    if arguments[:1] in (["scale"], ["soak"]):
        command = arguments.pop(0)
    session.run(dev_env(session), "-m", f"integration.{command}", *arguments)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Benchmarks of the packages named, or of all: bench-results/<package>.json and a table."""
    session.run(dev_env(session), "-m", "tools.run_bench", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The CUDA tests, with the Python and torch of the machine; needs no network."""
    session.run("bash", "tools/gpu.sh", *session.posargs)
