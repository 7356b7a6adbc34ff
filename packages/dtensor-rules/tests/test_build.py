"""Configuring where the building Python has no torch, as in pip's isolated environments."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

HERE = Path(__file__).parent


def test_a_build_without_torch_ends_in_the_remedy(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
    configured = subprocess.run(
        [
            cmake, "-S", HERE.parent, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={python}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert configured.returncode != 0
    output = re.sub(r"\s+", " ", configured.stderr)
    assert f"expected torch in the Python that builds it, {python}" in output
    assert "pip install --no-build-isolation" in output
