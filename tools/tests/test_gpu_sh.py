import os
import subprocess
import sys
import time

import psutil

from tools.gpu_checks import CUDA_TESTS, Outcome, _end, summary
from tools.workspace import ROOT

STARTS_ANOTHER = """
import pathlib, subprocess, sys
other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".part").write_text(str(other.pid))
path.with_suffix(".part").rename(path)
other.wait()
"""


def test_without_a_device_it_says_so_and_exits_2():
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    run = subprocess.run(
        ["bash", ROOT / "tools/gpu.sh"], env=hidden, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2, run.stderr
    assert "sees no CUDA device" in run.stderr


def test_a_part_that_takes_too_long_leaves_no_process(tmp_path):
    path = tmp_path / "pid"
    part = subprocess.Popen([sys.executable, "-c", STARTS_ANOTHER, str(path)])
    while not path.exists():
        assert part.poll() is None
        time.sleep(0.01)
    other = psutil.Process(int(path.read_text()))
    _end(part)
    assert part.poll() is not None
    assert psutil.wait_procs([other], timeout=60)[1] == []


def test_the_last_line_counts_the_parts_by_state():
    states = ("passed", "needs CUDA", "passed", "too slow")
    outcomes = [Outcome(f"part {number}", "", state) for number, state in enumerate(states)]
    assert summary(outcomes) == "2 passed, 1 needs CUDA, 1 too slow"


def test_all_files_with_cuda_tests_are_run():
    marked = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("packages/*/tests/**/*.py")
        if "mark.cuda" in path.read_text()
    }
    assert marked
    assert marked <= {*CUDA_TESTS}
