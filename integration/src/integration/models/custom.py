"""Functions of a user's modules, which ``--model`` and ``--plan`` name as package.module:function.

``--model``: called without arguments, returns a `ModelShape`. ``--plan``: called with the mesh, the
shape and the degrees, returns a `plan_api.Plan`.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.errors import UsageError
from integration.models.shape import ModelShape


def load_function(option: str, name: str) -> Callable[..., Any]:
    """Imports the function that an option names, also from the current folder.

    Args:
        option: the option, for errors.
        name: its value, ``package.module:function``.

    Raises:
        UsageError: the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # where the program was not started by ``python -m``
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{option} {name}: expected package.module:function, which can be imported, got an"
            f" error ({error}); correct it, or set PYTHONPATH"
        ) from error
    if not callable(found):
        raise UsageError(
            f"{option} {name}: expected a function, got a {type(found).__name__}; give another"
        )
    function: Callable[..., Any] = found
    return function


def custom_shape(name: str) -> ModelShape:
    """Returns the shape that a user's function returns.

    Raises:
        UsageError: as `load_function`, or it returns something else.
    """
    shape = load_function("--model", name)()
    if not isinstance(shape, ModelShape):
        raise UsageError(
            f"--model {name}: expected it to return an integration.models.ModelShape, got a"
            f" {type(shape).__name__}; return one"
        )
    return shape
