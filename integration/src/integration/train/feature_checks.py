"""Which training features a system has, looked at before anything is started."""

import shutil

import torch

from integration.errors import UsageError
from integration.systems import SYSTEM_NAMES, System, get_system
from integration.train.config import TrainConfig, degrees_of


def supported_system(config: TrainConfig) -> System:
    """Return the system of a run, which has the features that the run asks for.

    Raises:
        UsageError: there is no such system, or it does not compile or compute in bf16.
    """
    system = get_system(config.system, degrees_of(config))
    if config.compile != "none" and not system.compiles:
        raise _unsupported(config, "--compile", config.compile, "none")
    # Its own choice of a compiler is Triton's on GPUs and this one on CPUs.
    if config.compile == "inductor" and shutil.which("g++") is None:
        raise UsageError(
            "--compile inductor needs the compiler g++, which is not installed;"
            " install it, or use --compile aot_eager"
        )
    if config.dtype == "fp32":
        return system
    if not system.mixed_precision:
        raise _unsupported(config, "--dtype", config.dtype, "fp32")
    return get_system(config.system, degrees_of(config), torch.bfloat16)


def _unsupported(config: TrainConfig, option: str, value: str, default: str) -> UsageError:
    attribute = "compiles" if option == "--compile" else "mixed_precision"
    fit = [name for name in SYSTEM_NAMES if getattr(get_system(name), attribute)]
    return UsageError(
        f"system {config.system!r} does not do {option} {value}; use {option} {default},"
        f" or one of the systems {', '.join(fit)}"
    )
