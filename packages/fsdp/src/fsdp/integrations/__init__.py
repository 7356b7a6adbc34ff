"""Frameworks that call this package's `fully_shard`.

`install` is for Hugging Face's accelerate, transformers, TRL and PEFT, and the module ``lightning``
has a strategy of Lightning's Trainer. ``python -m fsdp.integrations SCRIPT [ARGUMENT ...]`` calls
`install` for a script that is not changed, also as ``accelerate launch -m fsdp.integrations SCRIPT
...`` and ``torchrun -m fsdp.integrations ...``.
"""

from fsdp.integrations.hugging_face import install, uninstall
from fsdp.integrations.versions import TESTED, check_version

__all__ = ["TESTED", "check_version", "install", "uninstall"]
