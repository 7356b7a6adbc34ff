"""The table of lines of code as it is shown."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from integration.loc.efforts import Effort, LinesOfCode, count_efforts

_NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class LocRow:
    """One row, as text; a cell for each column."""

    cells: tuple[str, ...]


@dataclass(frozen=True)
class LocSection:
    """The section on lines of code."""

    efforts: Sequence[Effort]
    columns: tuple[str, ...] = (
        *("model", "system", "model code", "plan", "runtime", "total"),
        *("the paper's count", "of"),
    )

    @property
    def rows(self) -> list[LocRow]:
        """A row per model and way."""
        return [_row(effort) for effort in self.efforts]

    @property
    def subject(self) -> str:
        """What was counted."""
        return (
            "Lines that a user writes to train a model of one device with tensor, sequence and data"
            " parallelism and shared parameters: changed in the model, saying what is placed where,"
            " and added to the library. Counted are those lines of the files here that run, without"
            " imports, docstrings, comments and blank lines (python -m integration.loc)."
        )

    @property
    def note(self) -> str:
        """What the numbers beside each other mean."""
        return (
            "The paper's count: veScale, table 2, as model + plan + runtime = total; its DiT is"
            " LI-DiT. torchtitan-style is TorchTitan's way with the same models, of which none is"
            " changed, in the fewest lines that the formatter allows. Mixtral's runtime lines are"
            " styles that torch lacks. DiT's attention has all heads on every rank there, since"
            " the model names their number; to cut them it is to be changed. A dash: not written"
            " here."
        )


@functools.cache
def loc_section() -> LocSection:
    """Return the section; what is counted does not change while a process runs."""
    return LocSection(count_efforts())


def _row(effort: Effort) -> LocRow:
    own = effort.counted
    numbers = (own.model, own.plan, own.runtime, own.total) if own else (_NONE,) * 4
    system = effort.system if own else _NONE
    counted = (effort.family, system, *map(str, numbers))
    return LocRow((*counted, _sum(effort.paper), effort.counterpart))


def _sum(lines: LinesOfCode) -> str:
    return f"{lines.model} + {lines.plan} + {lines.runtime} = {lines.total}"
