"""Recommendations beside measurements: ``recommended.py --json FILE``.

Every way to train on 2 gloo ranks that the trainer accepts is predicted and measured, in turns, in
the same two processes: processor time of a rank's step (the mean over ranks of the median of its
steps), its wall time, and bytes that a rank sends. Of several rounds the least counts, as other
work on the machine adds to both. Prints the measured time of the best prediction over that of the
best measurement; processor time is predicted without waiting for other stages.
"""

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from product_cases import Case
from product_prediction import Cost
from product_processes import cost_of, start_server
from product_rank import RankRun, train

from integration.recommend.options import RecommendOptions, prepare
from integration.recommend.output import microbatches, options_of, product
from integration.recommend.prediction import Prediction
from integration.recommend.search import recommend
from integration.train.session import restore_torch
from testkit import free_port

_RANKS, _SAMPLES, _ALL = 2, 8, 1000
# Those of a recommendation, which `Case` adds itself.
_OF_CASE = ("model", "global_batch")


def predictions(model: str) -> tuple[Prediction, ...]:
    """Returns all candidates, the fastest prediction first."""
    options = RecommendOptions(model, _RANKS, hardware="gloo", global_batch=_SAMPLES, top=_ALL)
    return recommend(prepare(options)).ranked


def case_of(made: Prediction) -> Case:
    """Returns the run of a prediction."""
    own = {name: value for name, value in options_of(made.config).items() if name not in _OF_CASE}
    own["micro_batch"] = made.config.micro_batch
    parts, size = microbatches(made.config)
    words = [product(made.config), f"{parts} of {size}", made.config.placements or ""]
    words.append("recompute" * (made.config.activation_checkpointing != "none"))
    return Case(" ".join(filter(None, words)), _RANKS, own, samples=_SAMPLES)


def train_in_turns(
    rank: int, ports: Sequence[int], options: Sequence[dict[str, Any]], steps: int
) -> list[RankRun]:
    """Trains with each of these options, on this rank, one after another."""
    found = []
    for number, (port, each) in enumerate(zip(ports, options, strict=True), 1):
        restore_torch()
        found.append(train(rank, _RANKS, port, each, steps))
        if rank == 0:
            print(f"{number}/{len(ports)}: {found[-1].cpu_ms:.1f} ms", flush=True)
    return found


def measure(cases: Sequence[Case], model: str, steps: int) -> list[tuple[Cost, float]]:
    """Returns the mean over ranks of each case, and the wall time of the slower one."""
    ports = [free_port() for _ in cases]
    options = [case.options_of(model) for case in cases]
    with ProcessPoolExecutor(_RANKS, get_context("forkserver")) as pool:
        futures = [
            pool.submit(train_in_turns, rank, ports, options, steps) for rank in range(_RANKS)
        ]
        ranks = [future.result() for future in futures]
    return [
        (cost_of(of_case), max(rank.wall_ms for rank in of_case))
        for of_case in zip(*ranks, strict=True)
    ]


def rows_of(model: str, *, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Measures the candidates of a model in turns; returns a row for each, by predicted time."""
    made = predictions(model)
    cases = [case_of(each) for each in made]
    turns = [measure(cases, model, steps) for _ in range(rounds)]
    return [
        {
            "case": f"{model}: {case.name}",
            "predicted_ms": 1e3 * each.time.total,
            "predicted_cpu_ms": 1e3 * each.time.busy,
            "wall_ms": min(cost[1] for cost in costs),
            "cpu_ms": min(cost[0].cpu_ms for cost in costs),
            "predicted_sent_mb": each.sent / 1e6,
            "sent_mb": costs[0][0].nbytes / 1e6,
            "why": each.time.reason,
        }
        for each, case, costs in zip(made, cases, zip(*turns, strict=True), strict=True)
    ]


def print_best(rows: Sequence[dict[str, Any]], predicted: str, measured: str) -> None:
    """Prints the measured time of the best prediction over that of the best measurement."""
    first = min(rows, key=lambda row: row[predicted])
    best = min(rows, key=lambda row: row[measured])
    print(
        f"{measured}: {first['case']} is predicted best; {first[measured] / best[measured]:.2f} of"
        f" {best['case']}, the best of {len(rows)}",
        flush=True,
    )


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--models", default="llama-tiny,mixtral-tiny")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    start_server()
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        own = rows_of(model, steps=options.steps, rounds=options.rounds)
        rows += own
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print_best(own, "predicted_cpu_ms", "cpu_ms")
        print_best(own, "predicted_ms", "wall_ms")


if __name__ == "__main__":
    main()
