"""The experiments of the comparison, a module each, found by their name ``EXPERIMENT``."""

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

from integration.compare.experiment import Experiment


def discover(
    path: Sequence[str] = __path__, package: str = __name__
) -> tuple[Experiment[Any], ...]:
    """Returns the experiment of every module in the folders of ``path``, by rising order."""
    names = [module.name for module in pkgutil.iter_modules(path)]
    found = [importlib.import_module(f"{package}.{name}").EXPERIMENT for name in names]
    return tuple(sorted(found, key=lambda each: each.order))
