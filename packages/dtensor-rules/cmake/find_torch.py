"""Prints where the torch of this interpreter lies, its version and its ABI, for CMake."""

from pathlib import Path

import torch

root = Path(torch.__file__).parent
print(f"{root};{torch.__version__.split('+')[0]};{int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
