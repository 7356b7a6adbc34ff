"""Which torch the tests run on."""

from __future__ import annotations

import torch

__all__ = ["TORCH_RELEASE"]

_major, _minor = torch.__version__.split(".")[:2]

#: Major and minor, as ``(2, 13)``.
TORCH_RELEASE = (int(_major), int(_minor))
