"""What a machine needs for a byte, a message, a flop: the constants of the model of time.

Note: the model. A collective of N ranks takes ``(N - 1) * alpha + bytes * beta``, bytes being those
that a rank sends, ``(N - 1) / N`` of a buffer; an all-reduce takes both twice. Computing takes time
by flop, by byte of what is no matrix product, and by call of an operator; the optimizer by tensor
and by byte of a rank's parameters. Collectives follow each other. With `overlap` they run while
modules compute, and what is left to wait for counts; without it, all of them does, as where the
ranks' cores also move what is sent. What no term tells, as hooks and ranks that wait for
each other, is `slack`: by how much the step of a model that was profiled is longer than all that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Compute", "Constants", "Link", "Update", "link_of"]


@dataclass(frozen=True)
class Link:
    """How ranks reach each other.

    Attributes:
        alpha: seconds of a message.
        beta: seconds of a byte.
        ranks: over how many that are next to each other, as in a node; None over any.
    """

    alpha: float
    beta: float
    ranks: int | None = None

    def __post_init__(self) -> None:
        _check(self, "alpha", "beta")
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"simulate: Link: ranks={self.ranks!r}; wants at least 1, or None")


@dataclass(frozen=True)
class Compute:
    """How long modules take.

    Attributes:
        flop: seconds of one.
        nbyte: seconds of a byte that operators other than matrix products read or write.
        op: seconds of a call of an operator.
    """

    flop: float
    nbyte: float = 0.0
    op: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "flop", "nbyte", "op")


@dataclass(frozen=True)
class Update:
    """How long an optimizer's step takes.

    Attributes:
        tensor: seconds of a parameter.
        nbyte: seconds of a byte of what a rank has of the parameters.
    """

    tensor: float = 0.0
    nbyte: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "tensor", "nbyte")


@dataclass(frozen=True)
class Constants:
    """Of a machine.

    Attributes:
        links: of gathers, and of reductions if there are no others; several for parts of it, of
            which an axis uses the first that reaches over its ranks.
        compute: of forward and backward.
        update: of the optimizer.
        reduce: of reductions.
        overlap: whether collectives run while modules compute.
        slack: of a measured step over what all others tell of it.
    """

    links: Link | Sequence[Link]
    compute: Compute
    update: Update = field(default_factory=Update)
    reduce: Link | Sequence[Link] | None = None
    overlap: bool = True
    slack: float = 1.0

    def __post_init__(self) -> None:
        _check(self, "slack")


def link_of(links: Link | Sequence[Link], span: int) -> Link:
    """The one that reaches over `span` ranks that are next to each other.

    Raises:
        ValueError: none does.
    """
    known = [links] if isinstance(links, Link) else list(links)
    reaching = [link for link in known if link.ranks is None or link.ranks >= span]
    if not reaching:
        raise ValueError(
            f"simulate: links={known} do not reach over {span} ranks; give one with ranks=None"
        )
    return min(reaching, key=lambda link: math.inf if link.ranks is None else link.ranks)


def _check(one: Link | Compute | Update | Constants, *names: str) -> None:
    for name in names:
        value = getattr(one, name)
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ValueError(
                f"simulate: {type(one).__name__}: {name}={value!r}; wants a number, 0 or more"
            )
