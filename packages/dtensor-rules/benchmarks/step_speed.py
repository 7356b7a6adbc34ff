"""A training step of a small block, tensor-parallel on 8: local shards, DTensor, dtensor-rules."""

from blocks import BLOCKS, LocalEdges, PlacedEdges, step_of
from timing import interleaved, off

import dtensor_rules
from testkit import CommLog, fake_mesh

RANKS, CALLS, ROUNDS = 8, 3, 12
MOST_TIMES_LOCAL, LEAST_RATIO = 1.5, 6.0


def rows():
    """One row a model, in milliseconds a step."""
    return [_row(name, build) for name, build in BLOCKS.items()]


def _row(name, build):
    with fake_mesh((RANKS,)) as mesh:
        steps = {
            "local": (off, step_of(build, LocalEdges(mesh))),
            "native": (off, step_of(build, PlacedEdges(mesh))),
            "dtensor_rules": (dtensor_rules.enabled, step_of(build, PlacedEdges(mesh))),
        }
        best = {k: v / 1000 for k, v in interleaved(steps, calls=CALLS, rounds=ROUNDS).items()}
        sent = {kind: _collectives(context, step) for kind, (context, step) in steps.items()}
        calls, missed = _calls(*steps["dtensor_rules"])
    native = best["native"] - best["local"]
    with_rules = best["dtensor_rules"] - best["local"]
    ratio = native / with_rules if with_rules > 0 else float("inf")
    times = best["dtensor_rules"] / best["local"]
    return {
        "case": f"step of {name}",
        "local_ms": round(best["local"], 2),
        "native_ms": round(best["native"], 2),
        "dtensor_rules_ms": round(best["dtensor_rules"], 2),
        "native_times_local": round(best["native"] / best["local"], 2),
        "dtensor_rules_times_local": round(times, 2),
        "overhead_ratio": round(ratio, 2),
        "most_times_local": MOST_TIMES_LOCAL,
        "least_ratio": LEAST_RATIO,
        "met": "yes" if times <= MOST_TIMES_LOCAL and ratio >= LEAST_RATIO else "no",
        "calls": calls,
        "missed_or_left": missed,
        "collectives": "/".join(str(sum(counts.values())) for counts in sent.values()),
    }


def _collectives(context, step):
    with context(), CommLog() as log:
        step()
    return log.counts()


def _calls(context, step):
    """How many calls of operators a warm step makes, and how many of them ran no cached plan."""
    with context():
        step()
        dtensor_rules.stats_clear()
        step()
        counts = dtensor_rules.stats().values()
    missed = sum(op.miss + sum(op.fallthrough.values()) for op in counts)
    return sum(op.rule + op.cache for op in counts) + missed, missed
