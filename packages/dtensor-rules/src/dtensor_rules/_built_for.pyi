"""Written by CMake (cmake/built_for.py.in): the torch that the extension module was compiled for."""

TORCH_VERSION: str
