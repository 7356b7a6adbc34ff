"""Recommendations beside measurements: ``recommended.py --json FILE``.

Every way to train on 2 gloo ranks that the trainer accepts is predicted and measured, in turns:
processor time of a rank's step (the mean over ranks of the median of its steps) and bytes that a
rank sends. Prints the measured time of the best prediction over that of the best measurement.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from product_cases import Case
from product_processes import cost_of, run, start_server

from integration.recommend.options import RecommendOptions, prepare
from integration.recommend.output import microbatches, options_of, product
from integration.recommend.prediction import Prediction
from integration.recommend.search import recommend

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


def rows_of(model: str, *, steps: int, rounds: int, top: int) -> list[dict[str, Any]]:
    """Measures the candidates of a model in turns; returns a row for each, by predicted time."""
    made = predictions(model)[:top]
    cases = [case_of(each) for each in made]
    found: list[list[float]] = [[] for _ in cases]
    sent = [0.0] * len(cases)
    for number in range(rounds):
        for place, case in enumerate(cases):
            cost = cost_of(run(case, model, steps=steps))
            found[place].append(cost.cpu_ms)
            sent[place] = cost.nbytes
            done = number * len(cases) + place + 1
            print(f"{done}/{rounds * len(cases)} {model}: {case.name}: {cost.cpu_ms:.1f} ms",
                  flush=True)  # fmt: skip
    return [
        {
            "case": f"{model}: {case.name}",
            "predicted_ms": 1e3 * each.time.total,
            "cpu_ms": statistics.median(times),
            "predicted_sent_mb": each.sent / 1e6,
            "sent_mb": nbytes / 1e6,
            "why": each.time.reason,
        }
        for each, case, times, nbytes in zip(made, cases, found, sent, strict=True)
    ]


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--models", default="llama-10m,mixtral-10m")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--top", type=int, default=_ALL, help="predictions that are measured")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    start_server()
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        own = rows_of(model, steps=options.steps, rounds=options.rounds, top=options.top)
        rows += own
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
        best = min(own, key=lambda row: row["cpu_ms"])
        ratio = own[0]["cpu_ms"] / best["cpu_ms"]
        print(f"{model}: {own[0]['case']} is predicted best: {ratio:.2f} of {best['case']},"
              f" the best of {len(own)} measured", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
