"""The installed release of torch, and differences between releases that tests depend on."""

from __future__ import annotations

import torch

__all__ = ["FLATTENS_TWO_SHARDED_DIMS", "NO_FLATTENING", "TORCH_RELEASE"]

_major, _minor = torch.__version__.split(".")[:2]

#: Major and minor, as ``(2, 13)``.
TORCH_RELEASE = (int(_major), int(_minor))

#: Whether DTensor flattens two sharded dims into one, as attention does with batch and heads.
FLATTENS_TWO_SHARDED_DIMS = TORCH_RELEASE >= (2, 12)

#: The reason for which tests that need it are skipped.
NO_FLATTENING = "torch 2.11's DTensor flattens no two sharded dims (batch and heads)"
