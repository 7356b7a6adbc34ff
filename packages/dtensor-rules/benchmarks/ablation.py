"""What each part buys on the LLaMA step: torch alone, then with one part more at a time.

Torch has a cache of sharding decisions of its own, in C++: what the parts in Python save, they pay
for with calls of Python.
"""

import functools

from blocks import LocalEdges, PlacedEdges, llama, step_of
from python_dispatch import in_python
from timing import interleaved, off

import dtensor_rules
from testkit import fake_mesh

RANKS, CALLS, ROUNDS = 8, 3, 10
# By name, in the order in which parts are added: what is entered around the steps.
VARIANTS = {
    "native": off,
    "rules, in Python": functools.partial(in_python, cached=False),
    "rules and cache, in Python": functools.partial(in_python, cached=True),
    "rules and cache, in C++": dtensor_rules.enabled,
}


def rows(variants=VARIANTS):
    """One row a variant: milliseconds a step, and over the local one."""
    with fake_mesh((RANKS,)) as mesh:
        steps = {
            name: (context, step_of(llama, PlacedEdges(mesh))) for name, context in variants.items()
        }
        steps["local"] = (off, step_of(llama, LocalEdges(mesh)))
        best = {k: v / 1000 for k, v in interleaved(steps, calls=CALLS, rounds=ROUNDS).items()}
    local = best.pop("local")
    first = next(iter(best.values())) - local
    return [
        {
            "case": f"ablation: {name}",
            "local_ms": round(local, 2),
            "step_ms": round(time, 2),
            "over_ms": round(time - local, 2),
            "less_than_first": round(first / (time - local), 2),
        }
        for name, time in best.items()
    ]
