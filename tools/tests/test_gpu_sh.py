import os
import subprocess
import sys

from tools.workspace import ROOT


def test_without_a_device_it_says_so_and_exits_2():
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    run = subprocess.run(
        ["bash", ROOT / "tools/gpu.sh"], env=hidden, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2, run.stderr
    assert "sees no CUDA device" in run.stderr
