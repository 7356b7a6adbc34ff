"""The source line of a call on a plan."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["call_location"]

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# Their frames are the methods of a plan themselves.
_METHODS = (
    f"{_PACKAGE}plan.py",
    *(
        f"{Path(__file__).with_name(name)}"
        for name in ("entry_list.py", "plan_entries.py", "policy_entries.py")
    ),
)


def call_location() -> str:
    """Returns the user's line that calls this package, and the line here that adds the entry.

    For a call in the user's own code ``train.py:12``, for one in a plan of the zoo
    ``train.py:12 > zoo/llama.py:38``; where a plan of the zoo calls another, the line of that one.
    """
    frame, inner = sys._getframe(1), None
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if inner is None and frame.f_code.co_filename not in _METHODS:
            inner = frame
        frame = frame.f_back
    outer = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    if inner is None:
        return outer
    module = inner.f_code.co_filename.removeprefix(_PACKAGE).replace(os.sep, "/")
    return f"{outer} > {module}:{inner.f_lineno}"
