"""The largest differences of comparisons, in docs/support/composition.json.

A later comparison of some of the runs replaces what is recorded of these, and of no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from integration.compare.experiments.parallelism import EXPERIMENT

__all__ = ["ComparisonRecord", "Measurements"]


@dataclass(frozen=True)
class Measurements:
    """The largest differences of one comparison.

    Attributes:
        command: the command that measured them.
        date: when, as year, month and day.
        commit: the commit, abbreviated; followed by "+" if there were uncommitted changes.
        torch: version of torch.
        cpu: name of the processor.
        cores: number of its cores.
        differences: largest absolute difference of a loss from one device's by name of the run.
    """

    command: str
    date: str
    commit: str
    torch: str
    cpu: str
    cores: int
    differences: Mapping[str, float]

    @classmethod
    def of_results(cls, results: Mapping[str, Any]) -> Measurements:
        """Returns those of a comparison's results.json, runs without a verdict left out."""
        facts = results["environment"]
        differences = {
            run["name"]: run["deviation"]["maximum"]
            for run in results["experiments"][EXPERIMENT.name]["runs"]
            if run["judged"] and run["deviation"] is not None
        }
        commit, *changes = facts["git_commit"].split()
        return cls(
            facts["command"],
            facts["date"].split()[0],
            commit[:7] + "+" * bool(changes),
            facts["torch"],
            facts["cpu"],
            facts["cores"],
            differences,
        )


@dataclass(frozen=True)
class ComparisonRecord:
    """The newest measurement of every run, each run in one part.

    Attributes:
        parts: what each comparison measured, the oldest first.
    """

    parts: tuple[Measurements, ...]

    @classmethod
    def of_json(cls, parts: list[Mapping[str, Any]]) -> ComparisonRecord:
        """Returns the record that `as_json` returned the JSON of."""
        return cls(tuple(Measurements(**part) for part in parts))

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the parts, as values of JSON."""
        return [asdict(part) for part in self.parts]

    def part_of(self, name: str) -> Measurements | None:
        """Returns the part with the run of this name; None if it was not measured."""
        return next((part for part in self.parts if name in part.differences), None)

    def updated(self, measured: Measurements) -> ComparisonRecord:
        """Returns the record after another comparison, without parts that it replaces entirely."""
        known = {name for part in self.parts for name in part.differences}
        others = self.restricted_to(known - measured.differences.keys())
        return ComparisonRecord((*others.parts, measured))

    def restricted_to(self, names: set[str]) -> ComparisonRecord:
        """Returns the record of the runs with these names."""
        parts = []
        for part in self.parts:
            found = {name: value for name, value in part.differences.items() if name in names}
            if found:
                parts.append(replace(part, differences=found))
        return ComparisonRecord(tuple(parts))
