"""Parallelizes as TorchTitan does, with the parts of torch that it uses; TorchTitan does not run.

Each model has a function that names its modules and their inputs, after pytorch/torchtitan's
models/llama3 and models/deepseek_v3, infra/parallelize.py. The models are third-party code,
unmodified; parallel styles that torch lacks are in `styles`.
"""

from integration.systems.torchtitan.system import TorchTitanStyle

__all__ = ["TorchTitanStyle"]
