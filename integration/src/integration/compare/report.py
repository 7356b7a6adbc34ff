"""Makes the report of a comparison, and the document of its numbers, results.json."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from integration.compare.experiment import Findings
from integration.compare.result import Failure, Result
from integration.compare.setup import Comparison, PreparedExperiment
from integration.report.environment import Environment, describe_environment, shell_lines
from integration.report.lines_of_code import count_efforts, loc_section
from integration.report.section import (
    Column,
    Command,
    LogExcerpt,
    Paragraph,
    ReportPage,
    Section,
    Table,
)

RESULTS_FILE = "results.json"
_PROGRAM = ("python", "-m", "integration.compare")
_SAME_BITS = (
    "On the same machine with the same versions losses are equal bit for bit; times are not. All"
    f" numbers are in `{RESULTS_FILE}`."
)


@dataclass(frozen=True)
class ComparisonReport:
    """The report of a comparison, for readers and for programs.

    Attributes:
        page: the report.
        document: every number, for results.json.
    """

    page: ReportPage
    document: dict[str, Any]


@dataclass(frozen=True)
class ExperimentResults:
    """An experiment, the results of its runs in their order, and what it reports on them."""

    name: str
    results: Sequence[Result]
    findings: Findings

    @property
    def passes(self) -> bool:
        """Whether every run finished, and every run that was judged passes."""
        return all(result.verdict.passes for result in self.results)

    @property
    def failures(self) -> list[Failure]:
        """The failed runs, in order."""
        return [result.failure for result in self.results if result.failure is not None]

    def facts(self) -> dict[str, Any]:
        """Returns every number, for results.json."""
        return {"runs": [each.facts() for each in self.results], **self.findings.numbers}


def find(prepared: PreparedExperiment, results: Sequence[Result]) -> ExperimentResults:
    """Returns an experiment's results with what it reports on them."""
    experiment = prepared.experiment
    findings = experiment.report(prepared.setting, results)
    return ExperimentResults(experiment.name, results, findings)


def make_report(
    comparison: Comparison, every: Sequence[ExperimentResults], arguments: Sequence[str]
) -> ComparisonReport:
    """Returns the report of a comparison.

    Args:
        comparison: the comparison.
        every: the results of its experiments.
        arguments: the command line.
    """
    environment = describe_environment(
        (*_PROGRAM, *arguments),
        threads=comparison.options.shared.threads,
        data="; ".join(
            f"{each.source}: {each.size:,} bytes, SHA-256 {each.fingerprint}"
            for each in comparison.data
        ),
    )
    reproduce = shell_lines((*_PROGRAM, *comparison.options.command_line()))
    last = comparison.jobs[-1]
    single_run = shell_lines(("python", "-m", "integration.train", *last.arguments))
    sections = (
        *(_failed(failure) for each in every for failure in each.failures),
        *(section for each in every for section in each.findings.sections),
        loc_section(),
        _environment(environment),
        Section(
            "Reproduce",
            (
                Paragraph("The whole comparison, with every option explicit:"),
                Command(reproduce),
                Paragraph("One of the runs:"),
                Command(single_run),
                Paragraph(_SAME_BITS, is_note=True),
            ),
        ),
    )
    report = ReportPage("Every system against one device", sections, date=environment.date)
    document = {
        "passes": all(each.passes for each in every),
        "verdicts": [asdict(each) for each in report.verdicts],
        "options": comparison.options.facts(),
        "environment": asdict(environment) | {"reproduce": reproduce, "single_run": single_run},
        "lines_of_code": [asdict(each) for each in count_efforts()],
        "experiments": {each.name: each.facts() for each in every},
    }
    return ComparisonReport(report, document)


def _failed(failure: Failure) -> Section:
    text = f"{failure.name} {failure.reason}. The end of `{failure.log}`:"
    return Section(f"{failure.name} failed", (Paragraph(text), LogExcerpt(failure.tail)))


def _environment(environment: Environment) -> Section:
    columns = (Column(""), Column(""))
    return Section("Environment", (Table(columns, tuple(environment.facts())),))
