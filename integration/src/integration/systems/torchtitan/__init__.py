"""TorchTitan's way on the parts of native torch that it is made of; TorchTitan itself is not run.

As its users write it: for each model a function that knows its modules and what they are called
with, after pytorch/torchtitan's models/llama3 and models/deepseek_v3, infra/parallelize.py. The
models are others' own, unmodified; styles that torch lacks are in `styles`.
"""

from integration.systems.torchtitan.system import TorchTitanStyle

__all__ = ["TorchTitanStyle"]
