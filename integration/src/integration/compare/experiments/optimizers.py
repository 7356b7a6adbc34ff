"""fsdp's block-wise and matrix optimizers under DDP and under fsdp."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.curves import draw_losses
from integration.compare.experiment import Experiment, Findings, Setting
from integration.compare.result import Result
from integration.compare.rows import (
    LOSS_COLUMNS,
    MICROBATCHES,
    SYSTEM,
    Field,
    results_table,
    trained,
    verdict_row,
)
from integration.compare.run import Run
from integration.compare.variants import get_variant
from integration.errors import UsageError
from integration.models import model_shape
from integration.report.formatting import listed, loss_unit
from integration.report.section import Column, Figure, Paragraph, Section
from integration.train.optimizers import ADAM_8BIT, MUON

TITLES = {ADAM_8BIT: "8-bit Adam", MUON: "Muon"}
# DDP does not shard parameters, so that its ranks run the unsharded optimizer.
_UNSHARDED, _SHARDED = "ddp", "fsdp"


@dataclass(frozen=True)
class OptimizerOptions:
    """The options of the comparison of optimizers."""

    model: str = "llama-tiny"
    """Model of the comparison of optimizers."""
    steps: int = 50
    """Optimizer steps of each run of that comparison."""


def _runs(setting: Setting[OptimizerOptions]) -> tuple[Run, ...]:
    model_shape(setting.own.model)
    if importlib.util.find_spec("fsdp") is None:
        raise UsageError(
            "the comparison of optimizers needs the package fsdp, which is not installed; install"
            " it, or leave optimizers out of --experiments"
        )
    systems = (_UNSHARDED, _SHARDED)
    return tuple(_run(setting, optimizer, system) for optimizer in TITLES for system in systems)


def _run(setting: Setting[OptimizerOptions], optimizer: str, system: str) -> Run:
    choices = get_variant(system).choices | {
        "model": setting.own.model,
        "steps": setting.own.steps,
        "optimizer": optimizer,
    }
    return Run(
        job=setting.job(f"{optimizer}-{system}", choices, session="optimizers"),
        title=f"{system} with {TITLES[optimizer]}",
        tolerance=model_shape(setting.own.model).tolerance,
        reference=None if system == _UNSHARDED else f"{optimizer}-{_UNSHARDED}",
        labels={"optimizer": optimizer},
    )


def _report(setting: Setting[OptimizerOptions], results: Sequence[Result]) -> Findings:
    model = setting.own.model
    groups = {
        title: [each for each in results if each.run.labels["optimizer"] == name]
        for name, title in TITLES.items()
    }
    subject = (
        f"{trained(results, model)} was trained for {setting.own.steps} steps on the same data with"
        f" {listed(list(groups))} of fsdp.optim: under DDP, which replicates parameters, and under"
        " fsdp, which shards them. 8-bit Adam quantises blocks of 256 elements, which fsdp keeps on"
        " one rank by sharding matrices in units of 32 rows; Muon gathers each matrix of the layers"
        " on one rank."
    )
    note = (
        f"Δ: the loss of a step minus the loss under DDP, in {loss_unit(model)}. All optimizers"
        " have the same learning rate; Muon's updates are scaled to the size of AdamW's."
    )
    optimizer = Field(
        Column("optimizer", terminal="optimizer"), lambda each: TITLES[each.run.labels["optimizer"]]
    )
    contents = (
        Paragraph(subject),
        Figure(
            "optimizers",
            "Loss by step with each optimizer under DDP and under fsdp, and their difference",
            lambda theme: draw_losses(list(groups.values()), list(groups), theme),
        ),
        results_table(results, optimizer, SYSTEM, *LOSS_COLUMNS, MICROBATCHES),
        Paragraph(note, is_note=True),
    )
    verdicts = tuple(verdict_row(f"{model} with {title}", same) for title, same in groups.items())
    return Findings([Section("Optimizers", contents, verdicts)])


EXPERIMENT = Experiment(
    name="optimizers",
    order=3,
    quick=OptimizerOptions(),
    full=OptimizerOptions(steps=200),
    runs=_runs,
    report=_report,
)
