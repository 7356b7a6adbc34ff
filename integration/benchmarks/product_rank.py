"""One rank of one run: it trains, and measures its steps."""

import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from integration.models import build_model_on_meta
from integration.train.config import TrainConfig
from integration.train.launch.world import World, process_group
from integration.train.loop import Trainer
from integration.train.measurement.collectives import NOT_COUNTED
from integration.train.measurement.memory import peak_rss_bytes, reset_peak_rss
from integration.train.setup import prepare
from testkit import Collective, CommLog

_TIMEOUT = 120.0
_WARMUP = 1  # steps between the first one and those that are measured


@dataclass(frozen=True)
class RankRun:
    """The measurements of one rank.

    Attributes:
        cpu_ms: processor time of a step, of all threads of the process; the median.
        wall_ms: wall time of a step; the median.
        first_step_s: wall time of the first step.
        memory: growth of the peak resident memory since before the model was built, in bytes.
        share: elements of this rank's parameters, of those of the full model.
        calls: collectives of a step by kind; a transfer is counted by its sender.
        nbytes: bytes that this rank sends with them, by kind.
    """

    cpu_ms: float
    wall_ms: float
    first_step_s: float
    memory: int
    share: float
    calls: Mapping[str, int]
    nbytes: Mapping[str, int]


def train(rank: int, world: int, port: int, options: Mapping[str, Any], steps: int) -> RankRun:
    """Trains with these options of the trainer, in a process that has done nothing before."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with process_group(_TIMEOUT) as joined, tempfile.TemporaryDirectory() as folder:
        return _measure(joined, Path(folder), options, steps)


def _measure(world: World, out: Path, options: Mapping[str, Any], steps: int) -> RankRun:
    config = TrainConfig(
        **options, out=out, resume="never", steps=1 + _WARMUP + steps + 1, tensorboard=False
    )
    reset_peak_rss()
    before = peak_rss_bytes()
    setup = prepare(config, world.size)
    trainer = Trainer(setup, world)
    first = _timed(trainer.train_step)
    for _ in range(_WARMUP):
        trainer.train_step()
    times = [_timed(trainer.train_step) for _ in range(steps)]
    memory = peak_rss_bytes() - before
    with CommLog() as log:
        trainer.train_step()
    calls, nbytes = Counter[str](), Counter[str]()
    for call in log.calls:
        if call.op not in NOT_COUNTED:
            calls[call.op] += 1
            nbytes[call.op] += sent_bytes(call)
    return RankRun(
        cpu_ms=statistics.median(time.cpu_ms for time in times),
        wall_ms=statistics.median(time.wall_ms for time in times),
        first_step_s=first.wall_ms / 1e3,
        memory=memory,
        share=_numel(trainer.model) / _numel(build_model_on_meta(setup.shape)),
        calls=dict(calls),
        nbytes=dict(nbytes),
    )


def sent_bytes(call: Collective) -> int:
    """Returns the bytes that a rank sends; a group that the log does not know has 2 ranks here."""
    if (known := call.wire_bytes) is not None:
        return known
    if call.op == "all_to_all":
        return call.input_bytes // 2  # of uneven splits about half is another rank's
    known = replace(call, group_size=2, group_rank=0).wire_bytes
    assert known is not None, f"expected a collective of a known group, got {call}"
    return known


@dataclass(frozen=True)
class _StepTime:
    cpu_ms: float
    wall_ms: float


def _timed(step: Callable[[], object]) -> _StepTime:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return _StepTime(1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall))


def _numel(model: nn.Module) -> int:
    """Returns the number of elements of the parameters that this rank has."""
    return sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        for parameter in model.parameters()
    )
