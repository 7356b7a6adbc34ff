"""The pictures, a module each, found by their name ``PICTURE``."""

import importlib
import pkgutil

from integration.gallery.picture import Picture


def discover() -> dict[str, Picture]:
    """Returns the picture of every module in this package by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = [importlib.import_module(f"{__name__}.{name}").PICTURE for name in names]
    return {picture.name: picture for picture in found}
