"""Reads and writes the records of a run: metrics.jsonl and summary.json."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
STARTS_FILE = "starts.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: steps completed, counted from 1.
        loss: mean over the global batch, before the update, in nats per token.
        seconds: wall time of the step on rank 0.
        tokens: tokens of the global batch.
        tokens_per_second: throughput of all ranks together.
        mfu: model FLOPs utilization, of the peak FLOP/s of all ranks.
        gradient_norm: total norm of the gradients before clipping; None without clipping.
        learning_rate: learning rate of the update.
        eval_loss: mean loss of the held-out samples after the update; None without an evaluation.
        eval_perplexity: its exponential, for text.
        loss_scale: of fp16; the next step's is half of it if the update was skipped.
        expert_load: for each layer with experts, the share of the choices of the global batch that
            each expert got; None without experts, and in compiled layers.
        dropped_tokens: for each layer with experts, how many tokens of the global batch each
            expert dropped; None without a capacity.
    """

    step: int
    loss: float
    seconds: float
    tokens: int
    gradient_norm: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    learning_rate: float | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    loss_scale: float | None = None
    expert_load: list[list[float]] | None = None
    dropped_tokens: list[list[int]] | None = None


@dataclass(frozen=True)
class RunStart:
    """A start of a run, from the beginning or from a checkpoint.

    Attributes:
        step: steps completed before it.
        system: system, with the options of its degrees.
        world_size: number of ranks.
    """

    step: int
    system: str
    world_size: int


@dataclass(frozen=True)
class CollectiveCount:
    """The collectives of one kind that a rank issued in a step.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, ...; receives
            are counted as the sends of the other rank.
        calls: number of collectives that reached a process group.
        bytes: bytes of the full tensors that were gathered, scattered, reduced or sent.
    """

    kind: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class RunSummary:
    """The configuration and the resource use of a finished run.

    Attributes:
        accumulation: microbatches per step on each rank.
        micro_batch: samples of a microbatch on a rank; ranks of one model replica share them.
        peak_rss_bytes: peak resident memory of each rank, in rank order.
        device: type of the device of the ranks.
        peak_device_bytes: peak of the memory of tensors on each rank's device; None on the CPU.
        initial_weights: SHA-256 of the weights before the first step, with ``--fingerprint``.
        first_masks: SHA-256 of the first step's dropout masks, with ``--fingerprint`` and dropout,
            unless the run was resumed.
        collectives: collectives of the first rank in the step of ``--count-collectives``.
        product_flops: FLOPs of the first rank's matrix products and attention in that step.
        eval_loss: mean loss of the held-out samples after the last step; None without any.
        eval_perplexity: its exponential, for text.
    """

    system: str
    model: str
    parameters: int
    world_size: int
    data_parallel_degree: int
    accumulation: int
    micro_batch: int
    steps: int
    data_source: str
    peak_rss_bytes: list[int]
    device: str = "cpu"
    peak_device_bytes: list[int] | None = None
    initial_weights: str | None = None
    first_masks: str | None = None
    collectives: list[CollectiveCount] | None = None
    product_flops: int | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None

    @property
    def model_ranks(self) -> int:
        """Number of ranks of one model replica, which take the same samples."""
        return self.world_size // self.data_parallel_degree


@dataclass(frozen=True)
class RunResult:
    """What a run has come to when its command ends.

    Attributes:
        out: the run folder.
        finished: whether all steps are done; otherwise the run was asked to stop.
        step: completed steps, with those of earlier starts.
        loss: of the last step; None without one.
        tokens: of all steps.
        seconds: sum of the times of all steps.
        summary: of a finished run.
    """

    out: Path
    finished: bool
    step: int
    loss: float | None
    tokens: int
    seconds: float
    summary: RunSummary | None

    def __str__(self) -> str:
        """Returns a line on the run."""
        words = [f"{'finished' if self.finished else 'stopped'} at step {self.step:,}"]
        if self.loss is not None:
            words.append(f"loss {self.loss:.4f}")
        if self.summary is not None and self.summary.eval_loss is not None:
            words.append(f"evaluation loss {self.summary.eval_loss:.4f}")
        if self.seconds:
            words.append(f"{self.tokens / self.seconds:,.0f} tokens/s")
        return f"{', '.join(words)}: {self.out}"


class MetricsFile:
    """Appends step records to ``metrics.jsonl``, one JSON object a line.

    Args:
        folder: the run folder, which exists.
        keep_steps: records of later steps are removed, as a resumed run writes them again.
    """

    def __init__(self, folder: Path, *, keep_steps: int) -> None:
        path = folder / METRICS_FILE
        earlier = [record for record in read_metrics(folder) if record.step <= keep_steps]
        scratch = path.with_suffix(".partial")
        scratch.write_text("".join(_line(record) for record in earlier))
        os.replace(scratch, path)
        self._file = path.open("a", buffering=1)

    def append(self, record: StepRecord) -> None:
        """Writes one record, which other processes can read at once."""
        self._file.write(_line(record))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(folder: Path) -> list[StepRecord]:
    """Returns the records of a run folder in order; an empty list where there is no file.

    A last line without its newline is left out: it is still being written, or the run was killed.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [StepRecord(**json.loads(line)) for line in lines if line.endswith("\n")]


def read_result(folder: Path, *, finished: bool) -> RunResult:
    """Returns what a run has come to, from its folder.

    Args:
        folder: the run folder.
        finished: whether all steps are done, so that the summary is of this run.
    """
    records = read_metrics(folder)
    return RunResult(
        folder,
        finished,
        records[-1].step if records else 0,
        records[-1].loss if records else None,
        sum(record.tokens for record in records),
        sum(record.seconds for record in records),
        read_summary(folder) if finished else None,
    )


def write_start(folder: Path, start: RunStart) -> None:
    """Appends a start to ``starts.jsonl``; one at an earlier step than others replaces these."""
    starts = [each for each in read_starts(folder) if each.step < start.step]
    text = "".join(json.dumps(asdict(each)) + "\n" for each in [*starts, start])
    scratch = (folder / STARTS_FILE).with_suffix(".partial")
    scratch.write_text(text)
    os.replace(scratch, folder / STARTS_FILE)


def read_starts(folder: Path) -> list[RunStart]:
    """Returns the starts of a run in order; an empty list where there is no file."""
    path = folder / STARTS_FILE
    if not path.exists():
        return []
    return [RunStart(**json.loads(line)) for line in path.read_text().splitlines()]


def write_summary(folder: Path, summary: RunSummary) -> None:
    """Writes ``summary.json``."""
    (folder / SUMMARY_FILE).write_text(json.dumps(asdict(summary), indent=2) + "\n")


def read_summary(folder: Path) -> RunSummary:
    """Returns the summary of a finished run."""
    values: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
    if (counts := values.get("collectives")) is not None:
        values["collectives"] = [CollectiveCount(**each) for each in counts]
    return RunSummary(**values)


def _line(record: StepRecord) -> str:
    # repr of a float, which json uses, reads back as the same bits.
    return json.dumps(asdict(record)) + "\n"
