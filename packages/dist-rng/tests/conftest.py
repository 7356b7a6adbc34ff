"""Compiles the CUDA kernels, once in a session of tests and architecture; no device is needed."""

import fcntl
import importlib.util
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "cuda"
RUNTIME = HERE / "cpp" / "cuda_runtime_on_host.cpp"
OPTIONS = ("-std=c++17", "-O3", "-DDIST_RNG_ISA=device")  # those of cmake/cuda_kernels.cmake


@dataclass(frozen=True)
class CompiledKernels:
    """The library of src/cuda for one architecture: the same objects, linked to two runtimes.

    Attributes:
        architecture: for which it was compiled, ``90`` and the like.
        device_library: linked to NVIDIA's runtime, as in the package.
        host_library: linked to cpp/cuda_runtime_on_host.cpp, which runs the kernels on the host.
        resource_usage: what ptxas reports of each kernel.
        nvcc: the compiler.
        folder: where nvcc's intermediate files are, ``fill_masks.ptx`` and the like.
    """

    architecture: str
    device_library: Path
    host_library: Path
    resource_usage: str
    nvcc: str
    folder: Path


def find_nvcc() -> str | None:
    """Returns the nvcc of CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda or PyPI's package.

    The package is nvidia-cuda-nvcc; it needs the headers of nvidia-cuda-runtime.
    """
    if compiler := os.environ.get("CUDACXX"):
        return compiler
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{toolkit}/bin" for toolkit in toolkits if toolkit)]
    nvidia = importlib.util.find_spec("nvidia")
    for location in (nvidia and nvidia.submodule_search_locations) or ():
        folders += map(str, Path(location).glob("*/bin"))
    return shutil.which("nvcc", path=os.pathsep.join(folders))


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory):
    return compiled_for("90", tmp_path_factory)


def compiled_for(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> CompiledKernels:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip(
            "no nvcc to compile the kernels with; install a CUDA toolkit, or nvidia-cuda-nvcc and "
            "nvidia-cuda-runtime from PyPI"
        )
    # The processes of pytest-xdist have a folder in common; one of them compiles.
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / f"compiled_kernels_{architecture}"
    folder.mkdir(exist_ok=True)
    usage = folder / "resource_usage.txt"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not usage.exists():
            usage.write_text(compile_kernels(nvcc, folder, architecture))
    device_library, host_library = folder / "device.so", folder / "host.so"
    return CompiledKernels(
        architecture, device_library, host_library, usage.read_text(), nvcc, folder
    )


def compile_kernels(nvcc: str, folder: Path, architecture: str) -> str:
    """Compiles and links both libraries; returns what ptxas reports."""

    def run(*arguments: str) -> str:
        command = [nvcc, "-Werror", "all-warnings", *arguments]
        ran = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}{ran.stderr}"
        return ran.stdout + ran.stderr

    sources = sorted(SOURCE.glob("*.cu"))
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    with ThreadPoolExecutor() as compiling:
        kernels = compiling.submit(
            run, *OPTIONS, target, "-Xcompiler=-fPIC", "--resource-usage", "--keep", "-c",
            *map(str, sources),
        )  # fmt: skip
        runtime = compiling.submit(
            run, "-std=c++20", "-O1", "-c", str(RUNTIME),
            "-Xcompiler=-fPIC,-Wall,-Wextra,-Werror,-Wno-unknown-pragmas,-ffp-contract=off",
        )  # fmt: skip
    runtime.result()
    objects = [f"{source.stem}.o" for source in sources]
    run("--shared", "-cudart=static", *objects, "-o", "device.so")
    # All symbols must be defined: what the kernels' launches call, and nothing of cudart.
    run(
        "--shared", "-cudart=none", "-Xlinker=-z,defs", *objects, f"{RUNTIME.stem}.o",
        "-o", "host.so",
    )  # fmt: skip
    return kernels.result()
