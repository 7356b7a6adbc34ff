"""The command line of the comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from integration.compare.experiment import Experiment, SharedOptions
from integration.compare.experiments import discover
from integration.compare.run import option_arguments
from integration.errors import UsageError

PROFILES = ("quick", "full")
_DESCRIPTION = """Train under every system and compare each with one device.

Runs experiments one after another. `systems` trains the same models on the same global batches,
one system after another; `random_numbers` trains a small model whose weights or dropout masks are
drawn on 2 and 4 ranks; `optimizers` compares fsdp's optimizers under DDP and under fsdp;
`parallelism` trains small models by every kind of parallelism; and `diffusion` a DiT, which
generates images. Writes loss curves, step times and memory to OUT/report.md, OUT/report.html and
OUT/results.json. Exit code: 0 if every curve stays within its tolerance and dist-rng's random
numbers are one device's, 1 if not or if a run fails, 2 if the options are invalid. `full` before
the options selects the defaults of the full profile: more steps, separate processes for each run,
and all three cases on four ranks too; `quick`, the default, takes minutes."""


@dataclass(frozen=True)
class CompareOptions:
    """The options of a comparison.

    Attributes:
        shared: options of all runs.
        own: options of experiments by name; others have their defaults.
        experiments: names of the experiments to run, separated by commas; None: all.
        known: the experiments that can be named.
        json: whether stdout gets results.json; it is no option of the runs.
    """

    shared: SharedOptions = field(default_factory=SharedOptions)
    own: Mapping[str, Any] = field(default_factory=dict)
    experiments: str | None = None
    known: tuple[Experiment[Any], ...] = field(default_factory=discover)
    json: bool = False

    @property
    def out(self) -> Path:
        """The folder of the results."""
        return self.shared.out

    def options_of(self, experiment: Experiment[Any]) -> Any:
        """Returns the options of an experiment."""
        return self.own.get(experiment.name, experiment.quick)

    def selected(self) -> tuple[Experiment[Any], ...]:
        """Returns the experiments to run.

        Raises:
            UsageError: a name is unknown, or there is none.
        """
        known = {experiment.name: experiment for experiment in self.known}
        if self.experiments is None:
            return self.known
        names = [name.strip() for name in self.experiments.split(",") if name.strip()]
        if not names or not known.keys() >= set(names):
            raise UsageError(
                f"--experiments: expected some of {', '.join(known)}, got {self.experiments!r};"
                " give their names, separated by commas"
            )
        return tuple(experiment for experiment in self.known if experiment.name in names)

    def command_line(self) -> list[str]:
        """Returns every option explicitly, so that other defaults do not change the result."""
        selected = self.selected()
        words = ["--experiments", ",".join(experiment.name for experiment in selected)]
        words += option_arguments(vars(self.shared))
        for experiment in selected:
            words += option_arguments(vars(self.options_of(experiment)), experiment.option_prefix)
        return words

    def facts(self) -> dict[str, Any]:
        """Returns every option of the experiments that run, for results.json."""
        own = {each.name: asdict(self.options_of(each)) for each in self.selected()}
        return asdict(self.shared) | {"experiments": own}


def parse_options(
    arguments: Sequence[str], known: tuple[Experiment[Any], ...] | None = None
) -> CompareOptions:
    """Parses ``arguments``, without the program's name: a profile, if any, then options.

    Raises:
        SystemExit: after ``--help`` (0), or with 2 after tyro has named the invalid argument.
    """
    known = discover() if known is None else known
    profile, rest = PROFILES[0], list(arguments)
    if rest and rest[0] in PROFILES:
        profile, *rest = rest
    parsed = tyro.cli(
        _parsed_class(known, is_full=profile == "full"),
        prog="python -m integration.compare [quick|full]",
        description=_DESCRIPTION,
        args=rest,
    )
    own = {each.name: getattr(parsed, each.name) for each in known}
    return CompareOptions(parsed.shared, own, parsed.experiments, known, json=parsed.json)


def _parsed_class(known: Sequence[Experiment[Any]], *, is_full: bool) -> type[Any]:
    """Returns a class whose fields tyro parses: the shared options, and those of experiments."""
    names = ",".join(each.name for each in known)
    chosen = tyro.conf.arg(help="Experiments to run, separated by commas; all by default.")
    top = tyro.conf.arg(name="")  # options without a prefix
    output = tyro.conf.arg(help="Print results.json to stdout, and the tables to stderr.")
    members: list[Any] = [
        ("experiments", Annotated[str, chosen], field(default=names)),
        ("json", Annotated[bool, output], field(default=False)),
        ("shared", Annotated[SharedOptions, top], field(default=SharedOptions())),
    ]
    for each in known:
        default = each.full if is_full else each.quick
        prefix = tyro.conf.arg(name=each.option_prefix.replace("_", "-"))
        kind: Any = type(default)
        members.append((each.name, Annotated[kind, prefix], field(default=default)))
    return make_dataclass("Parsed", members, frozen=True)
