"""`OpDispatcher.wrap` in C++: what it saves in the calls that are torch's.

`wrap` itself, and whole operators with torch's own dispatch, which calls it; the kernels of the
library are taken out, so that every call falls through. In microseconds.
"""

import contextlib

import torch
from timing import interleaved
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dispatch import OpDispatcher

import dtensor_rules
from dtensor_rules import _core
from testkit import fake_mesh

CALLS = 500
ROUNDS = 30


@contextlib.contextmanager
def _without_kernels():
    with dtensor_rules.enabled():
        _core.remove_kernels()
        yield


def rows():
    """One row a call."""
    with fake_mesh((8,)) as mesh, torch.no_grad():
        local = torch.ones(4, 4)
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        calls = {
            "wrap": lambda: OpDispatcher.wrap(local, x._spec),
            "wrap of three": lambda: OpDispatcher.wrap((local,) * 3, (x._spec,) * 3),
            "add": lambda: x + x,
            "t": x.t,
            "native_layer_norm": lambda: torch.native_layer_norm(x, [4], None, None, 1e-5),
        }
        return [_row(name, function) for name, function in calls.items()]


def _row(name, function):
    variants = {
        "native": (contextlib.nullcontext, function),
        "dtensor_rules": (_without_kernels, function),
    }
    best = interleaved(variants, calls=CALLS, rounds=ROUNDS)
    return {
        "case": f"{name}, torch's dispatch",
        "native_us": round(best["native"], 2),
        "dtensor_rules_us": round(best["dtensor_rules"], 2),
        "ratio": round(best["native"] / best["dtensor_rules"], 1),
    }
