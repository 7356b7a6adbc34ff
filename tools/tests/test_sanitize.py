import subprocess
import sys

import pytest

from tools import sanitize

ERRORS = """
extern "C" int overflow(int x) { return x + 2147483647; }
extern "C" int use_after_free(int x) {
  int* volatile p = new int(x);
  delete p;
  return *p;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.cpp").write_text(ERRORS)
    command = ["c++", "-shared", "-fPIC", f"-fsanitize={sanitize.SANITIZERS}", "faults.cpp"]
    subprocess.run([*command, "-o", "faults.so"], cwd=folder, check=True)
    return folder / "faults.so"


@pytest.mark.parametrize(
    ("call", "report"),
    [
        ("overflow(0)", ""),
        ("overflow(1)", "signed integer overflow"),
        ("use_after_free(1)", "heap-use-after-free"),
    ],
    ids=["no fault", "overflow", "use after free"],
)
def test_a_fault_is_reported_from_any_process_and_nothing_else_is(tmp_path, library, call, report):
    # In a child of a child, as a rank would be, and forgiven.
    inner = f"import ctypes; ctypes.CDLL({str(library)!r}).{call}"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    reports = tmp_path / "reports"
    reports.mkdir()
    under = sanitize.environment(tmp_path, reports)
    subprocess.run([sys.executable, "-c", code], env=under, check=True, stderr=subprocess.DEVNULL)
    reported = sanitize.reported(reports)
    assert (report in reported) if report else reported == ""


def test_a_package_that_cannot_be_compiled_so_is_named():
    with pytest.raises(SystemExit, match=r"dist-rng: its .* has no DIST_RNG_SANITIZE"):
        sanitize.main(["dist-rng"])


def test_the_compiled_module_is_found_wherever_the_package_keeps_it(tmp_path):
    (tmp_path / "fsdp" / "optim").mkdir(parents=True)
    (tmp_path / "fsdp" / "optim" / "_core.cpython-311-x86_64-linux-gnu.so").touch()
    assert sanitize.core_module(tmp_path) == "fsdp.optim._core"
