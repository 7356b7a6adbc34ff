"""A package's tests with its C++ under ASAN and UBSAN: ``python -m tools.sanitize PACKAGE [...]``.

The package is compiled once more, into ``.nox/sanitize/``, and stands before the installed one on
the path. Further arguments go to pytest, in place of the test folder where a test file is among
them. Reports go to files, because pytest keeps what a test prints and a rank's parent may forgive
its death; a report fails the run whatever the tests say.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.workspace import ROOT, Project, packages

FOLDER = ROOT / ".nox" / "sanitize"
SANITIZERS = "address,undefined"
OPTIONS = {
    # Python and torch never free what lives as long as the process: all of it would be a leak.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Python's own allocator reuses objects at once; malloc lets ASAN see one that is used too late.
    "PYTHONMALLOC": "malloc",
}


def build(project: Project, site: Path) -> None:
    """Compiles the package with the sanitizers and installs it into ``site``."""
    option = f"{project.source.name.upper()}_SANITIZE"
    recipe = project.folder / "CMakeLists.txt"
    if not recipe.is_file() or option not in recipe.read_text():
        sys.exit(f"{project.name}: its CMakeLists.txt has no {option}")
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--no-build-isolation", "-c", "constraints.txt", "--target", str(site)]
    command += ["-C", f"cmake.define.{option}={SANITIZERS}"]
    # Its own, so that neither build recompiles the other's.
    command += ["-C", f"build-dir={site.with_name('build')}", str(project.folder)]
    subprocess.run(command, cwd=ROOT, check=True)


def core_module(site: Path) -> str:
    """The name of the compiled module that was installed into ``site``."""
    (path,) = site.rglob("_core*.so")
    return ".".join((*path.relative_to(site).parent.parts, "_core"))


def runtime(name: str) -> str:
    """The path of one of the compiler's libraries."""
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"{compiler} has no {name}: install its sanitizers, or name a GCC in CXX")
    return str(Path(path).resolve())


def environment(site: Path, reports: Path) -> dict[str, str]:
    """What the tests, and the processes that they start, run under."""
    # Loaded before Python, which was linked without them; libstdc++ too, for ASAN looks for the
    # C++ runtime's functions before torch brings it.
    asan, ubsan, cpp = map(runtime, ("libasan.so", "libubsan.so", "libstdc++.so"))
    # GCC's UBSAN ignores log_path where ASAN is: Python tells it, in every process.
    call = f"ctypes.CDLL({ubsan!r}).__sanitizer_set_report_path({bytes(reports / 'ubsan')!r})"
    (site / "sitecustomize.py").write_text(f"import ctypes\n\n{call}\n")
    asan_options = f"{OPTIONS['ASAN_OPTIONS']}:log_path={reports / 'asan'}"
    paths = {"LD_PRELOAD": f"{asan}:{ubsan}:{cpp}", "PYTHONPATH": str(site)}
    return os.environ | OPTIONS | {"ASAN_OPTIONS": asan_options} | paths


def reported(reports: Path) -> str:
    """What the sanitizers found, in all processes; nothing is good."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(reports.iterdir()))


def main(arguments: list[str]) -> int:
    """Builds and tests; the exit status."""
    name, *passed_on = arguments
    project = {project.name: project for project in packages()}[name]
    site, reports = FOLDER / name / "site", FOLDER / name / "reports"
    build(project, site)
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    under = environment(site, reports)
    code = f"import torch, {core_module(site)} as core; print(core.__file__)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=under, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    if not loaded.startswith(str(site)) or b"__asan_init" not in Path(loaded).read_bytes():
        sys.exit(f"{name}: the tests would run {loaded}, which is not compiled with the sanitizers")
    if not any(Path(argument.partition("::")[0]).exists() for argument in passed_on):
        passed_on.append(str(project.folder / "tests"))
    pytest = Path(sys.executable).with_name("pytest")
    tests = subprocess.run([str(pytest), *passed_on], cwd=ROOT, env=under, check=False)
    if found := reported(reports):
        print(f"{found}\n{name}: the sanitizers found something, see above", file=sys.stderr)
        return 1
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
