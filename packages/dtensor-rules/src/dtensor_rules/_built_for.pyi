"""Written by CMake (cmake/built_for.py.in): the torch that the extension was compiled for."""

TORCH_VERSION: str
