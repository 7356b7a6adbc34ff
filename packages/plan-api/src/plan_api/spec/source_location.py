"""Where an entry of a plan was written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["line_of_call"]

_HERE = f"{Path(__file__).parents[1]}{os.sep}"
_METHODS = tuple(
    f"{Path(__file__).with_name(name)}" for name in ("plan.py", "entries.py", "context_entries.py")
)


def line_of_call() -> str:
    """The line that calls this package, and that of the plan here that it calls, if it does.

    Of a plan that the user wrote ``train.py:12``, of one of the zoo ``train.py:12 >
    zoo/llama.py:38``; where one plan of the zoo begins with another, the line of that one.
    """
    frame, inner = sys._getframe(1), None
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        if inner is None and frame.f_code.co_filename not in _METHODS:
            inner = frame
        frame = frame.f_back
    outer = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    if inner is None:
        return outer
    within = inner.f_code.co_filename.removeprefix(_HERE).replace(os.sep, "/")
    return f"{outer} > {within}:{inner.f_lineno}"
