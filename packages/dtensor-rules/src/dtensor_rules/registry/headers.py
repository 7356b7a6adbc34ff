"""Where the header is with which other extension modules register rules."""

from __future__ import annotations

from pathlib import Path


def get_include() -> str:
    """Returns the folder to compile with (``-I``) for ``#include <dtensor_rules/rule.h>``.

    Builds ask for it: it loads neither torch nor the extension module.
    """
    return str(Path(__file__).parents[1] / "include")
