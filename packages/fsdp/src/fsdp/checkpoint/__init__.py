"""Reads and writes folders of safetensors, as Hugging Face's, each rank its own shards.

`load_safetensors` and `save_safetensors` take any model of plain tensors and DTensors: of this
package, of FSDP2, of tensor parallelism. They need the extra ``fsdp[safetensors]``.
"""

from fsdp.checkpoint.load import LoadResult, check_safetensors, load_safetensors
from fsdp.checkpoint.names import TensorPart
from fsdp.checkpoint.save import SaveResult, save_safetensors

__all__ = [
    "LoadResult",
    "SaveResult",
    "TensorPart",
    "check_safetensors",
    "load_safetensors",
    "save_safetensors",
]
