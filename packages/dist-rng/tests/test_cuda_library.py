"""nvcc compiles the kernels without a device, to registers only, and the library loads."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dist_rng.cuda.library import FillParams, KernelLibrary

SOURCE = Path(__file__).parent.parent / "src" / "cuda"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
ARCHITECTURES = ("80", "90")
# What ptxas says of a kernel.
USAGE = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for 'sm_(?P<architecture>\d+)'"
    r".*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The library, and what ptxas says of its kernels."""
    if NVCC is None or not SOURCE.is_dir():
        pytest.skip("needs nvcc and the package's source")
    path = tmp_path_factory.mktemp("cuda") / "libdist_rng_cuda.so"
    ran = subprocess.run(
        [
            NVCC, "--shared", "-cudart", "static", "-std=c++17", "-O3", "-Xcompiler=-fPIC",
            "-Werror", "all-warnings", "-DDIST_RNG_ISA=device", "--resource-usage", "--threads=2",
            *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES),
            *sorted(str(file) for file in SOURCE.glob("*.cu")), "-o", str(path),
        ],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return path, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def built(compiled):
    return compiled[0]


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_use_registers_only(compiled, architecture):
    """No local memory, of arrays or spills; 64 registers let a multiprocessor run 1,024 threads."""
    usages = [one for one in USAGE.finditer(compiled[1]) if one["architecture"] == architecture]
    for kernel in ("boxes_kernel", "strides_kernel", "vectors_kernel"):
        assert any(kernel in usage["kernel"] for usage in usages), kernel
    for usage in usages:
        assert [usage[name] for name in ("stack", "stores", "loads")] == ["0", "0", "0"], usage
        assert int(usage["registers"]) <= 64, usage
