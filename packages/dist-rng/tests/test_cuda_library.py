"""nvcc compiles the kernels without a device, to registers only, and the library loads."""

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from dist_rng.cuda.library import FillParams, KernelLibrary

from .conftest import ARCHITECTURES

# What ptxas says of a kernel.
USAGE = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for 'sm_(?P<architecture>\d+)'"
    r".*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@pytest.fixture
def built(compiled_kernels):
    return compiled_kernels.device_library


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
def test_kernels_use_registers_only(compiled_kernels, architecture):
    """No local memory, of arrays or spills; 64 registers let a multiprocessor run 1,024 threads."""
    usages = [
        usage
        for usage in USAGE.finditer(compiled_kernels.resource_usage)
        if usage["architecture"] == architecture
    ]
    for kernel in ("boxes_kernel", "strides_kernel", "vectors_kernel"):
        assert any(kernel in usage["kernel"] for usage in usages), kernel
    for usage in usages:
        assert [usage[name] for name in ("stack", "stores", "loads")] == ["0", "0", "0"], usage
        assert int(usage["registers"]) <= 64, usage
