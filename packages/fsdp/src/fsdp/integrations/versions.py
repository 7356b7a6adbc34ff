"""Which versions of frameworks this package was tested with."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["TESTED", "VersionRange", "check_version"]


@dataclass(frozen=True)
class VersionRange:
    """Minor versions, such as 5.20 to 5.23.

    Attributes:
        oldest: major and minor number of the first.
        newest: those of the last.
    """

    oldest: tuple[int, int]
    newest: tuple[int, int]

    def __str__(self) -> str:
        first, last = (".".join(map(str, one)) for one in (self.oldest, self.newest))
        return first if first == last else f"{first} to {last}"

    def __contains__(self, version: str) -> bool:
        numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
        major, minor = (*numbers, 0, 0)[:2]
        return self.oldest <= (major, minor) <= self.newest


def _only(major: int, minor: int) -> VersionRange:
    return VersionRange((major, minor), (major, minor))


# What the tests and examples/ ran with; constraints.txt and examples/requirements.txt pin it.
TESTED: Mapping[str, VersionRange] = MappingProxyType(
    {
        "accelerate": _only(1, 15),
        "lightning": _only(2, 6),
        "peft": _only(0, 21),
        "torchao": _only(0, 18),
        "torchtitan": _only(0, 3),
        "transformers": _only(5, 23),
        "trl": _only(1, 16),
    }
)
_warned: set[str] = set()


def check_version(framework: str) -> None:
    """Warns, once in a process, where a framework's version was not tested with this package.

    Args:
        framework: its name on PyPI; one that is not installed is not reported.

    Raises:
        ValueError: a framework that is not in `TESTED`.
    """
    if framework not in TESTED:
        raise ValueError(
            f"check_version: expected one of {', '.join(TESTED)}, got {framework!r}; others have "
            f"no tested versions"
        )
    try:
        version = importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return
    if version in TESTED[framework] or framework in _warned:
        return
    _warned.add(framework)
    warnings.warn(
        f"fsdp.integrations: expected {framework} {TESTED[framework]}, which was tested, got "
        f"{version}; compare losses with its own FSDP2 before you rely on it, or install a tested "
        f"version",
        stacklevel=3,
    )
