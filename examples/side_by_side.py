"""Runs an example twice, with its framework's own FSDP2 and with fsdp, and compares the two.

An example calls `main` with a function that trains for some steps and returns the losses. Ranks
are started by torchrun's own launcher, once for each system, and return what they measured.
``--json FILE`` writes the comparisons, of which ``tools.example_results`` makes a page, and
``--plot FILE`` draws the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SYSTEMS = ("native", "fsdp")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Run:
    """What one run measured.

    Attributes:
        losses: of the steps.
        seconds: that training took on the slowest rank, without imports.
        mib: growth of peak resident memory by training, of the rank with the most.
    """

    losses: Sequence[float]
    seconds: float
    mib: float


@dataclass(frozen=True)
class Comparison:
    """Two runs of one case.

    Attributes:
        case: its name, such as that of an optimizer; empty where an example has one.
        native: with the framework's FSDP2.
        fsdp: with this package.
        tolerance: largest difference of a loss that is no error.
        load: of the machine, its mean over the last minute of the runs.
    """

    case: str
    native: Run
    fsdp: Run
    tolerance: float
    load: float

    @property
    def difference(self) -> float:
        """The largest difference of a loss; not a number if a run has one that is not."""
        return max(
            abs(one - other)
            for one, other in zip(self.native.losses, self.fsdp.losses, strict=True)
        )

    def is_equal(self, steps: int) -> bool:
        """Returns whether both have a loss for each of some steps, within the tolerance."""
        return len(self.fsdp.losses) == steps and self.difference <= self.tolerance


def main(train: Callable[..., Sequence[float]], cases: Mapping[str, float] | None = None) -> None:
    """Compares training with ``"native"`` and with ``"fsdp"``; exits with 1 if losses differ.

    Args:
        train: called on each rank with the system and the number of steps, and with the case if
            there are cases; returns the losses.
        cases: the largest difference of a loss, by the names of cases; None: one case without a
            name.
    """
    tolerances = {"": TOLERANCE} if cases is None else cases
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--case", choices=list(tolerances), help="by default all of them")
    parser.add_argument(
        "--tiny", action="store_true", help="two steps, of the first case alone unless one is named"
    )
    parser.add_argument("--json", type=Path, help="where to write the comparisons")
    parser.add_argument("--plot", type=Path, help="where to draw the losses, as FILE.svg")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.case = 2, options.case or next(iter(tolerances))
    found = []
    for case in tolerances if options.case is None else (options.case,):
        native, own = (_start(train, system, case, options) for system in SYSTEMS)
        found.append(Comparison(case, native, own, tolerances[case], os.getloadavg()[0]))
        _print(found[-1])
    if options.json is not None:
        written = [asdict(one) | {"difference": one.difference} for one in found]
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    if options.plot is not None:
        draw(found, options.plot)
    wrong = [one for one in found if not one.is_equal(options.steps)]
    if wrong:
        sys.exit(
            "\n".join(
                f"error: {one.case or 'losses'}: expected {options.steps} losses within "
                f"{one.tolerance:g} of native FSDP2's, got {one.difference:.1e}"
                for one in wrong
            )
        )


def draw(found: Sequence[Comparison], path: Path) -> None:
    """Draws the losses of native FSDP2 and of fsdp over the steps, one pair for each case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for number, one in enumerate(found):
        steps, color = range(1, len(one.native.losses) + 1), f"C{number}"
        names = [f"{one.case} {system}".strip() for system in ("native FSDP2", "fsdp")]
        axes.plot(steps, one.native.losses, color=color, linewidth=4, alpha=0.35, label=names[0])
        axes.plot(steps, one.fsdp.losses, color=color, linewidth=1.2, label=names[1])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _print(comparison: Comparison) -> None:
    for system in SYSTEMS:
        run: Run = getattr(comparison, system)
        losses = " ".join(f"{loss:.6f}" for loss in run.losses)
        name = f"{comparison.case} {system}".strip()
        print(f"{name:>16}: losses {losses}; {run.seconds:.1f} s; {run.mib:.0f} MiB a rank")
    print(f"largest difference of a loss: {comparison.difference:.1e}", flush=True)


def _start(
    train: Callable[..., Sequence[float]], system: str, case: str, options: argparse.Namespace
) -> Run:
    """Starts the ranks of a system; returns what they measured."""
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_endpoint="localhost:0",
        rdzv_backend="c10d",
        max_restarts=0,
        start_method="fork" if options.tiny and _can_fork() else "spawn",
    )
    arguments = (train, system, options.steps, *([case] if case else []))
    runs = elastic_launch(launch, _run_rank)(*arguments)
    return Run(
        runs[0].losses,
        max(run.seconds for run in runs.values()),
        max(run.mib for run in runs.values()),
    )


def _can_fork() -> bool:
    """Returns whether ranks may be copies of this process, which spares them all imports.

    The runtimes of accelerators do not work in copies; testkit's simulated one has none. Pages of
    libraries that a copy touches again would count as memory of its training.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is None or accelerator.type == "sim"


def _run_rank(train: Callable[..., Sequence[float]], system: str, steps: int, *case: str) -> Run:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share the cores
    before, started = _peak_mib(), time.perf_counter()
    losses = [float(loss) for loss in train(system, steps, *case)]
    return Run(losses, time.perf_counter() - started, _peak_mib() - before)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
