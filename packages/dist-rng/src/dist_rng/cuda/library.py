"""Loads the library of compiled CUDA kernels when the first CUDA tensor is filled.

The library does not link torch and has its own CUDA runtime. It exists if nvcc was found when the
package was built.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

from dist_rng.cuda.boxes import MAX_DIMS

LIBRARY = Path(__file__).parents[1] / "libdist_rng_cuda.so"


class DimParams(ctypes.Structure):
    """``DimParams`` of src/cuda/fill_params.h."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("period", ctypes.c_int64),
        ("draw_stride", ctypes.c_int64),
        ("local_stride", ctypes.c_int64),
    )


class FillParams(ctypes.Structure):
    """``FillParams`` of src/cuda/fill_params.h, which documents each field."""

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
        ("relative_offset", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("draw", ctypes.c_int64),
        ("local", ctypes.c_int64),
        ("device", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("dim", DimParams * MAX_DIMS),
    )


class KernelLibrary:
    """The functions of src/cuda/library.cu."""

    def __init__(self, path: Path) -> None:
        """Loads the library.

        Raises:
            OSError: it cannot be loaded.
            RuntimeError: it was built from another version of this package.
        """
        symbols = ctypes.CDLL(str(path))
        self._fill = symbols.dist_rng_fill
        self._fill.argtypes = (ctypes.POINTER(FillParams), ctypes.c_void_p)
        self._fill.restype = ctypes.c_int
        self._text = symbols.dist_rng_error_text
        self._text.argtypes = (ctypes.c_int,)
        self._text.restype = ctypes.c_char_p
        if symbols.dist_rng_params_bytes() != ctypes.sizeof(FillParams):
            raise RuntimeError(
                f"expected {path} of this version of dist-rng, got one of another version; install"
                " dist-rng again"
            )

    def fill(self, params: FillParams, stream: int) -> None:
        """Launches a kernel on a stream of ``params.device``, which must be the current device.

        Raises:
            RuntimeError: CUDA refused the launch.
        """
        error = self._fill(params, stream)
        if error:
            text = self._text(error).decode()
            raise RuntimeError(f"dist-rng's CUDA kernel was not launched: {text} ({error})")


@lru_cache(maxsize=1)
def load() -> KernelLibrary:
    """Returns the library of this installation.

    Raises:
        RuntimeError: the package was built without the CUDA kernels.
    """
    if not LIBRARY.exists():
        raise RuntimeError(
            "expected dist-rng's CUDA kernels, got a build without them; install dist-rng again"
            " where nvcc is on the path (or CUDACXX names it), or draw on the CPU and move the"
            " result"
        )
    return KernelLibrary(LIBRARY)
