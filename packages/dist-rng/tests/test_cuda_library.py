"""What nvcc makes of the kernels, in PTX and in machine code, and that the library loads."""

import ctypes
import os
import re
import struct
import subprocess
from pathlib import Path

import pytest

from dist_rng.cuda.library import FillParams, KernelLibrary

from .conftest import OPTIONS, SOURCE, compiled_for

# What ptxas says of a kernel.
USAGE = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for 'sm_(?P<architecture>\d+)'"
    r".*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@pytest.fixture(scope="module", params=["90", pytest.param("80", marks=pytest.mark.slow)])
def of_architecture(request, tmp_path_factory):
    return compiled_for(request.param, tmp_path_factory)


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


def test_kernels_use_registers_only(of_architecture):
    """No local memory, of arrays or spills; 64 registers let a multiprocessor run 1,024 threads."""
    usages = list(USAGE.finditer(of_architecture.resource_usage))
    assert {usage["architecture"] for usage in usages} == {of_architecture.architecture}
    for kernel in ("boxes_kernel", "strides_kernel", "vectors_kernel"):
        assert any(kernel in usage["kernel"] for usage in usages), kernel
    for usage in usages:
        assert [usage[name] for name in ("stack", "stores", "loads")] == ["0", "0", "0"], usage
        assert int(usage["registers"]) <= 64, usage


def test_ptx_has_the_launch_bounds_and_neither_local_memory_nor_fast_math(of_architecture):
    texts = [path.read_text() for path in of_architecture.folder.glob("fill_*.ptx")]
    assert len(texts) == len(list(SOURCE.glob("fill_*.cu")))
    for text in texts:
        assert f".target sm_{of_architecture.architecture}" in text
        kernels = text.count(".entry ")
        # The bound that cpp/cuda_runtime_on_host.cpp checks.
        assert len(re.findall(r"\.maxntid 256\b", text)) == kernels
        assert len(re.findall(r"\.minnctapersm 4\b", text)) == kernels
        assert ".local" not in text
        # __sinf, __cosf and __logf, which torch calls; the reciprocal begins a division of doubles.
        rough = set(re.findall(r"\w+\.(?:approx|full)[.\w]*|\w+\.ftz[.\w]*", text))
        assert rough <= {
            "sin.approx.f32", "cos.approx.f32", "lg2.approx.f32", "rcp.approx.ftz.f64",
        }  # fmt: skip


def test_no_value_depends_on_what_nvcc_contracts(of_architecture, tmp_path):
    """Without contraction the machine code is the same: philox/formulas.h calls every fma itself.

    Only logarithms of doubles differ, which are CUDA's; the emulator documents their error.
    """
    subprocess.run(
        [
            of_architecture.nvcc, *OPTIONS, f"-arch=sm_{of_architecture.architecture}",
            "--fmad=false", "-cubin", str(SOURCE / "fill_floating.cu"), "-o", "separate.cubin",
        ],
        check=True, cwd=tmp_path,
    )  # fmt: skip
    contracted = machine_code(of_architecture.folder / "fill_floating.cubin")
    separate = machine_code(tmp_path / "separate.cubin")
    assert contracted.keys() == separate.keys()
    different = {name for name in contracted if contracted[name] != separate[name]}
    logarithms_of_doubles = {
        name for name in contracted if "NormalOfIdE" in name or "ExponentialOfIdE" in name
    }
    assert len(contracted) == 24
    assert different == logarithms_of_doubles


def machine_code(path):
    """Returns the code of each kernel in a cubin, which is a 64-bit ELF file."""
    data = path.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<3H", data, 0x3A)
    # Of each section: where its name is among the names, its offset and its number of bytes.
    sections = [struct.unpack_from("<I20xQQ", data, table + n * size) for n in range(count)]
    code = {}
    for name, start, length in sections:
        first = sections[names][1] + name
        text = data[first : data.index(b"\0", first)].decode()
        if text.startswith(".text."):
            code[text] = data[start : start + length]
    return code
