"""The table of lines of code in the report."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from integration.loc.efforts import Effort, LinesOfCode, count_efforts

_NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class LocRow:
    """One row: a cell of text per column."""

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
        """A row per model and system."""
        return [_row(effort) for effort in self.efforts]

    @property
    def subject(self) -> str:
        """The paragraph above the table."""
        return (
            "Lines of code that a user writes to train a single-device model with tensor, sequence"
            " and data parallelism and sharded parameters: changes to the model, specifications of"
            " placements (plan), and additions to the library (runtime). Lines of the files here"
            " count if they run; imports, docstrings, comments and blank lines do not count"
            " (python -m integration.loc)."
        )

    @property
    def note(self) -> str:
        """The paragraph below the table."""
        return (
            "The paper's count: veScale, table 2, as model + plan + runtime = total; its DiT is"
            " LI-DiT. torchtitan-style parallelizes the same unmodified models as TorchTitan does,"
            " in the fewest lines that the formatter allows. Mixtral's runtime lines are parallel"
            " styles that torch lacks. Under torchtitan-style every rank computes all attention"
            " heads of the DiT, whose code contains the number of heads; sharding them requires a"
            " change to the model. A dash: not implemented here."
        )


@functools.cache
def loc_section() -> LocSection:
    """Returns the section, cached for the process."""
    return LocSection(count_efforts())


def _row(effort: Effort) -> LocRow:
    own = effort.counted
    numbers = (own.model, own.plan, own.runtime, own.total) if own else (_NONE,) * 4
    system = effort.system if own else _NONE
    counted = (effort.family, system, *map(str, numbers))
    return LocRow((*counted, _sum(effort.paper), effort.counterpart))


def _sum(lines: LinesOfCode) -> str:
    return f"{lines.model} + {lines.plan} + {lines.runtime} = {lines.total}"
