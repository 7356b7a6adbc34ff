"""Counts the code that parallelizes a model: ``python -m integration.report.lines_of_code``.

Note [what is counted]
    parallelism: tensor, sequence and data parallelism with sharded parameters (ZeRO-3), as in
        veScale, section 8.2.
    model: changed lines of the model.
    plan: lines that specify placements; those that run, in the functions that are called.
    runtime: lines that the library lacks for this model, such as parallel styles or hooks.
    not counted: imports, function signatures, docstrings, comments, blank lines; the mesh and the
        call, which are the same for all; the trainer's systems, which select degrees; lines of
        ``annotate``, which are for static mode.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from rich.console import Console

import plan_api.zoo
from integration.models import build_model_on_meta, model_shape
from integration.report.formatting import ABSENT
from integration.report.section import Column, Paragraph, Section, Table
from integration.report.terminal import print_table
from integration.systems import Degrees, torchtitan, zoo
from integration.systems.torchtitan.data_parallel import apply_fsdp
from integration.systems.torchtitan.system import APPLY_TP
from testkit import fake_mesh
from testkit.inspection.code_lines import body_lines, built_by, lines_run

_SUBJECT = (
    "Lines of code that a user writes to train a single-device model with tensor, sequence"
    " and data parallelism and sharded parameters: changes to the model, specifications of"
    " placements (plan), and additions to the library (runtime). Lines of the files here"
    " count if they run; imports, docstrings, comments and blank lines do not count"
    " (python -m integration.report.lines_of_code)."
)
_NOTE = (
    "The paper's count: veScale, table 2, as model + plan + runtime = total; its DiT is"
    " LI-DiT. torchtitan-style parallelizes the same unmodified models as TorchTitan does,"
    " in the fewest lines that the formatter allows. Mixtral's runtime lines are parallel"
    " styles that torch lacks. Under torchtitan-style every rank computes all attention"
    " heads of the DiT, whose code contains the number of heads; sharding them requires a"
    " change to the model. A dash: not implemented here."
)
_NAMES, _NUMBERS = ("model", "system"), ("model code", "plan", "runtime", "total")
_COLUMNS = (
    *(Column(name) for name in _NAMES),
    *(Column(name, is_number=True) for name in (*_NUMBERS, "the paper's count")),
    Column("of"),
)

# Functions of the zoo that validate options or name placements.
_NO_PLANS = frozenset({"check_ep_chunks", "check_options", "expert_axes", "fused", "names_of"})
_MODELS = {"llama": "llama-tiny", "mixtral": "mixtral-tiny", "dit": "dit-tiny"}


@dataclass(frozen=True)
class LinesOfCode:
    """Lines of code.

    Attributes:
        model: changed lines of the model.
        plan: lines that specify placements.
        runtime: lines that the library lacks.
    """

    model: int
    plan: int
    runtime: int

    @property
    def total(self) -> int:
        """Number of all lines."""
        return self.model + self.plan + self.runtime


#: Counts of veScale, table 2, by system and model; its DiT is LI-DiT.
PAPER: Mapping[str, Mapping[str, LinesOfCode]] = {
    "veScale": {
        "llama": LinesOfCode(0, 29, 0),
        "mixtral": LinesOfCode(0, 38, 0),
        "dit": LinesOfCode(2, 36, 0),
    },
    "TorchTitan": {
        "llama": LinesOfCode(6, 57, 0),
        "mixtral": LinesOfCode(6, 79, 15),
        "dit": LinesOfCode(8, 48, 39),
    },
    "Megatron-LM": {
        "llama": LinesOfCode(126, 0, 0),
        "mixtral": LinesOfCode(162, 0, 0),
        "dit": LinesOfCode(82, 0, 0),
    },
    "Megatron-DeepSpeed": {
        "llama": LinesOfCode(126, 4, 0),
        "mixtral": LinesOfCode(162, 4, 10),
        "dit": LinesOfCode(82, 4, 0),
    },
}


@dataclass(frozen=True)
class Effort:
    """Lines of code of a model under one system.

    Attributes:
        family: family of the model.
        system: system that trains it here; the paper's system if there is none here.
        counted: lines here; None if it is not implemented here.
        counterpart: the paper's system.
        paper: the paper's count.
    """

    family: str
    system: str
    counted: LinesOfCode | None
    counterpart: str
    paper: LinesOfCode


@functools.cache
def count_efforts() -> tuple[Effort, ...]:
    """Returns the efforts of every model, cached for the process; no process group may exist.

    Models are on the meta device and meshes are fake: nothing is computed or sent. No line of a
    model is changed: all three are unmodified third-party code.
    """
    found = []
    for family, name in _MODELS.items():
        found.append(_effort(family, "plan", LinesOfCode(0, _lines_of_plan(name), 0), "veScale"))
        found.append(_effort(family, "torchtitan-style", _lines_of_titan(name), "TorchTitan"))
        for system in ("Megatron-LM", "Megatron-DeepSpeed"):
            found.append(_effort(family, system, None, system))
    return tuple(found)


def _effort(family: str, system: str, counted: LinesOfCode | None, counterpart: str) -> Effort:
    return Effort(family, system, counted, counterpart, PAPER[counterpart][family])


def _lines_of_plan(name: str) -> int:
    degrees = Degrees(dp_shard=2, tp=2, sp=True)
    with fake_mesh((2, 2), tuple(degrees.axes)) as mesh:

        def call() -> None:
            zoo.plan_of(model_shape(name), mesh, degrees)

        plan = built_by(call, _folder(plan_api.zoo), without=_NO_PLANS)
        plan += built_by(call, _folder(zoo), functions={"_fully_shard", "with_noise_loss"})
        return plan.lines


def _lines_of_titan(name: str) -> LinesOfCode:
    folder = _folder(torchtitan)
    with fake_mesh((2, 2), ("dp_shard", "tp")) as mesh:
        shape = model_shape(name)

        def call() -> None:
            model = build_model_on_meta(shape)
            APPLY_TP[shape.family](model, mesh["tp"])
            apply_fsdp(model, shape.layers, mesh["dp_shard"])

        plan = built_by(call, folder)
        styles = folder / "styles.py"
        # The forward hooks of styles do not run here, but they are needed as well.
        runtime = body_lines(styles.read_text()) if styles in lines_run(call, folder) else ()
    return LinesOfCode(0, plan.lines, len(runtime))


def _folder(module: ModuleType) -> Path:
    return Path(str(module.__file__)).parent


def loc_section() -> Section:
    """Returns the section of the report on lines of code."""
    return Section(
        "Lines of code", (Paragraph(_SUBJECT), loc_table(), Paragraph(_NOTE, is_note=True))
    )


def loc_table() -> Table:
    """Returns a row per model and system."""
    return Table(_COLUMNS, tuple(_row(effort) for effort in count_efforts()))


def _row(effort: Effort) -> tuple[str, ...]:
    own = effort.counted
    numbers = (own.model, own.plan, own.runtime, own.total) if own else (ABSENT,) * 4
    system = effort.system if own else ABSENT
    counted = (effort.family, system, *map(str, numbers))
    return (*counted, _sum(effort.paper), effort.counterpart)


def _sum(lines: LinesOfCode) -> str:
    return f"{lines.model} + {lines.plan} + {lines.runtime} = {lines.total}"


def main() -> None:
    """Prints a row per model and system."""
    table = loc_table()
    columns = tuple(replace(column, terminal=column.title) for column in table.columns)
    print_table(replace(table, columns=columns), Console(highlight=False))


if __name__ == "__main__":
    main()
