"""nvcc compiles the kernels without a device, and the library loads."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dist_rng.cuda.library import FillParams, KernelLibrary

SOURCE = Path(__file__).parent.parent / "src" / "cuda"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if NVCC is None or not SOURCE.is_dir():
        pytest.skip("needs nvcc and the package's source")
    path = tmp_path_factory.mktemp("cuda") / "libdist_rng_cuda.so"
    subprocess.run(
        [
            NVCC, "--shared", "-cudart", "static", "-std=c++17", "-O3", "-Xcompiler=-fPIC",
            "-Werror", "all-warnings", "-DDIST_RNG_ISA=device", "-arch=sm_90",
            *sorted(str(file) for file in SOURCE.glob("*.cu")), "-o", str(path),
        ],
        check=True,
    )  # fmt: skip
    return path


def test_the_library_loads_without_a_device_and_has_the_same_params_layout(built):
    symbols = ctypes.CDLL(str(built))
    assert symbols.dist_rng_params_bytes() == ctypes.sizeof(FillParams)
    assert callable(symbols.dist_rng_fill)
    assert callable(symbols.dist_rng_error_text)


def test_the_library_links_no_torch(built):
    needed = subprocess.run(
        ["ldd", str(built)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    assert "torch" not in needed
    assert "cudart" not in needed


def test_a_launch_without_a_device_raises(built):
    if "CUDA_VISIBLE_DEVICES" in os.environ or Path("/dev/nvidia0").exists():
        pytest.skip("this is about machines without a CUDA driver, and here one may be")
    with pytest.raises(RuntimeError, match=r"dist-rng's CUDA kernel was not launched: .* \(\d+\)"):
        KernelLibrary(built).fill(
            FillParams(kind=0, dtype=0, unroll=4, threads=256, stop=1, count=1), 0
        )
