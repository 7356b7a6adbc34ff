"""The compiled CUDA kernels, loaded when the first CUDA tensor is filled.

The library stands alone: no torch in it, and a CUDA runtime of its own. It is there where nvcc was
when the package was built.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

from dist_rng.cuda_boxes import MAX_DIMS

LIBRARY = Path(__file__).with_name("libdist_rng_cuda.so")


class JobDim(ctypes.Structure):
    """``JobDim`` of src/cuda/job.h."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("period", ctypes.c_int64),
        ("draw_stride", ctypes.c_int64),
        ("local_stride", ctypes.c_int64),
    )


class Job(ctypes.Structure):
    """``Job`` of src/cuda/job.h, where each field is explained."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("probabilities", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("unroll", ctypes.c_int32),
        ("vector", ctypes.c_int32),
        ("a", ctypes.c_double),
        ("b", ctypes.c_double),
        ("modulus", ctypes.c_uint64),
        ("base", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("seed_address", ctypes.c_uint64),
        ("offset_address", ctypes.c_uint64),
        ("after", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("draw", ctypes.c_int64),
        ("local", ctypes.c_int64),
        ("device", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("dim", JobDim * MAX_DIMS),
    )


class Library:
    """The symbols of src/cuda/library.cu."""

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            OSError: it cannot be loaded.
            RuntimeError: it was built from another version of this package.
        """
        symbols = ctypes.CDLL(str(path))
        self._fill = symbols.dist_rng_fill
        self._fill.argtypes = (ctypes.POINTER(Job), ctypes.c_void_p)
        self._fill.restype = ctypes.c_int
        self._text = symbols.dist_rng_error_text
        self._text.argtypes = (ctypes.c_int,)
        self._text.restype = ctypes.c_char_p
        if symbols.dist_rng_job_bytes() != ctypes.sizeof(Job):
            raise RuntimeError(f"{path} is of another version of dist-rng: install it again")

    def fill(self, job: Job, stream: int) -> None:
        """Launch a kernel on a stream of the job's device, which must be the current one.

        Raises:
            RuntimeError: CUDA refused the launch.
        """
        error = self._fill(job, stream)
        if error:
            text = self._text(error).decode()
            raise RuntimeError(f"dist-rng's CUDA kernel was not launched: {text} ({error})")


@lru_cache(maxsize=1)
def load() -> Library:
    """Return the library of this installation.

    Raises:
        RuntimeError: it was built without one.
    """
    if not LIBRARY.exists():
        raise RuntimeError(
            "dist-rng was built without its CUDA kernels: install it again where nvcc is on the"
            " path (or CUDACXX names it), or draw on the CPU and move the result"
        )
    return Library(LIBRARY)
