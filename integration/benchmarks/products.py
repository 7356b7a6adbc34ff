"""Products of parallelism, their prediction, and TorchTitan's way: ``products.py --json FILE``.

Each run is in fresh processes: processor time, collectives, bytes and memory of a rank's step, the
mean over ranks (of memory and first steps the maximum). Products are predicted from runs of their
single kinds on 2 ranks, two of which run at the same time where the product has 4 ranks or
more. ``--wall`` measures the wall time of runs on 2 ranks instead, in turns.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from product_cases import (
    MICROBATCHES,
    MODES,
    ONE,
    ONE_ACCUMULATED,
    Case,
    Product,
    kinds_of,
    products_of,
    two_ranks,
)
from product_prediction import Cost, Experts, Pipeline, predict
from product_processes import cost_of, run, start_server
from product_rank import RankRun

from integration.models import build_model_on_meta, model_shape

# Single kinds are measured in copies on as many processes as a product, and at most on these: more
# than the cores, so that ranks disturb each other as those of a product do.
_PROCESSES = 4


class Runs:
    """The runs of one model, each made once.

    Args:
        model: name of the model.
        steps: number of steps that are measured.
    """

    def __init__(self, model: str, steps: int) -> None:
        self._model, self._steps = model, steps
        self._made: dict[tuple[Case, int], list[RankRun]] = {}
        shape = model_shape(model)
        self._layers = len(shape.layers_of(build_model_on_meta(shape)))

    def ranks(self, case: Case, processes: int = 1) -> list[RankRun]:
        """Returns the measurements of a run's ranks.

        Args:
            case: how to train.
            processes: copies of the run are made at the same time up to this number of processes.
        """
        copies = max(1, processes // case.ranks)
        if (case, copies) not in self._made:
            made = run(case, self._model, steps=self._steps, copies=copies)
            self._made[case, copies] = made
            print(json.dumps(self.row(case, processes)), flush=True)
        return self._made[case, copies]

    def cost(self, case: Case, processes: int = 1) -> Cost:
        """Returns the mean over ranks."""
        return cost_of(self.ranks(case, processes))

    def row(self, case: Case, processes: int = 1) -> dict[str, Any]:
        """Returns the row of a run."""
        ranks = self.ranks(case, processes)
        cost = cost_of(ranks)
        kinds = dict.fromkeys(kind for rank in ranks for kind in rank.calls)
        calls = {kind: statistics.mean(rank.calls.get(kind, 0) for rank in ranks) for kind in kinds}
        return {
            "case": f"{self._model}: {case.name}",
            "ranks": case.ranks,
            "copies": len(ranks) // case.ranks,
            "cpu_ms": cost.cpu_ms,
            "wall_ms": statistics.mean(rank.wall_ms for rank in ranks),
            "share": cost.share,
            "all_reduces": cost.all_reduces,
            "collectives": cost.calls,
            "sent_mb": cost.nbytes / 1e6,
            "by_kind": ", ".join(f"{calls[kind]:g} {kind}" for kind in kinds),
            "memory_mib": max(rank.memory for rank in ranks) / 2**20,
            "first_step_s": max(rank.first_step_s for rank in ranks),
        }

    def predicted(self, product: Product) -> Cost | None:
        """Returns what the runs of single kinds predict; None where there are none."""
        if product.mode == "fsdp2":
            return None  # FSDP2 alone reshards, and its stages do not
        kinds, names = kinds_of(product.mode), product.kinds
        pipelined = "PP" in names
        cost = partial(self.cost, processes=min(product.case.ranks, _PROCESSES))
        tp = kinds.accumulated if pipelined else kinds.tp
        experts, pipeline = None, None
        if "EP" in names:
            assert kinds.dp is not None
            assert kinds.dp_ep is not None
            experts = Experts(cost(kinds.dp), cost(kinds.dp_ep))
        if pipelined:
            assert kinds.pp is not None
            alone = cost(ONE_ACCUMULATED)
            pipeline = Pipeline(cost(kinds.pp), alone, self._layers, MICROBATCHES)
        return predict(
            cost(ONE),
            cost(kinds.fsdp),
            gathered_once=cost(kinds.gathered_once) if kinds.gathered_once is not None else None,
            tp=cost(tp) if tp is not None and "TP" in names else None,
            experts=experts,
            pipeline=pipeline,
        )

    def product_row(self, product: Product) -> dict[str, Any]:
        """Returns the row of a product, with its prediction."""
        row, found = self.row(product.case), self.cost(product.case)
        predicted = self.predicted(product)
        if predicted is None:
            return row
        return row | {
            "predicted_cpu_ms": predicted.cpu_ms,
            "cpu_ratio": found.cpu_ms / predicted.cpu_ms,
            "predicted_collectives": predicted.calls,
            "collectives_ratio": found.calls / predicted.calls,
            "predicted_sent_mb": predicted.nbytes / 1e6,
            "sent_ratio": found.nbytes / predicted.nbytes,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Makes all runs; returns their rows, products first."""
        products = [
            product for mode in ("torch", *MODES) for product in products_of(mode, self._model)
        ]
        found = [self.product_row(product) for product in products]
        made = {product.case for product in products}
        kinds = [(case, copies) for case, copies in self._made if case not in made]
        return found + [self.row(case, case.ranks * copies) for case, copies in kinds]


def wall_rows(model: str, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the wall times of the runs on 2 ranks, measured in turns."""
    cases = two_ranks(model)
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            ranks = run(case, model, steps=steps)
            found[case.name].append(max(rank.wall_ms for rank in ranks))
            print(f"{model}: {case.name}: {found[case.name][-1]:.1f} ms", flush=True)
    return [
        {
            "case": f"{model}: {name}",
            "ms": statistics.median(times),
            "fastest_ms": min(times),
            "slowest_ms": max(times),
        }
        for name, times in found.items()
    ]


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--models", default="llama-10m,mixtral-10m,dit-3m")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--wall", action="store_true", help="wall times on 2 ranks instead")
    parser.add_argument("--rounds", type=int, default=3, help="of --wall")
    options = parser.parse_args()
    start_server()
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        if options.wall:
            rows += wall_rows(model, options.steps, options.rounds)
        else:
            rows += Runs(model, options.steps).rows()
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
