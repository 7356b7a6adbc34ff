"""Sequences of 1,000 different lengths: how often the cache knows one, and what a new one costs."""

import contextlib
import random
import time

import torch
import torch.nn.functional as F
from timing import quiet
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard

import dtensor_rules
from testkit import clear_caches, fake_mesh

LENGTHS, STEPS, HIDDEN = 1000, 4000, 8


def rows():
    """Two rows: a new length and a known one; native and dtensor-rules start with empty caches."""
    with fake_mesh((8,)) as mesh:
        weight = _placed(torch.ones(HIDDEN, HIDDEN), mesh, Shard(0))
        tokens = [torch.ones(2, length, HIDDEN) for length in range(1, LENGTHS + 1)]
        batches = [_placed(token, mesh, Replicate()) for token in tokens]
        with quiet(), torch.no_grad():
            native = _run(contextlib.nullcontext, batches, weight)
            dtensor_rules.stats_clear()
            with dtensor_rules.enabled():  # for the cache is cleared at its end
                with_rules = _run(contextlib.nullcontext, batches, weight)
                info, counts = dtensor_rules.cache_info(), dtensor_rules.stats().values()
    found = sum(op.rule + op.cache for op in counts)
    asked = found + sum(op.miss for op in counts)
    common = {
        "lengths": LENGTHS,
        "steps": STEPS,
        "hit_rate": round(found / asked, 4) if asked else 0.0,
        "cache_size": info.size,
        "capacity": info.capacity,
        "evictions": info.evictions,
    }
    return [
        {
            "case": f"five operators, {what} length",
            "native_us": round(native[what], 1),
            "dtensor_rules_us": round(with_rules[what], 1),
            "ratio": round(native[what] / with_rules[what], 2),
            **common,
        }
        for what in ("new", "known")
    ]


def _placed(tensor, mesh, placement):
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def _run(context, batches, weight):
    """Mean microseconds of a step on a length never seen, and on one seen before."""
    clear_caches()
    FakeTensorMode.cache_clear()  # which torch's propagation looks into
    draw = random.Random(0)
    order = [draw.randrange(len(batches)) for _ in range(STEPS)]
    seen, spent, count = set(), {"new": 0.0, "known": 0.0}, {"new": 0, "known": 0}
    with context():
        _step(_another(weight), weight)
        for index in order:
            kind = "known" if index in seen else "new"
            seen.add(index)
            batch = batches[index]
            start = time.thread_time_ns()
            _step(batch, weight)
            spent[kind] += (time.thread_time_ns() - start) / 1000
            count[kind] += 1
    return {kind: spent[kind] / count[kind] for kind in spent}


def _another(weight):
    """A batch of a length that no step has: what is paid once is paid with it."""
    return _placed(torch.ones(2, LENGTHS + 1, HIDDEN), weight.device_mesh, Replicate())


def _step(batch, weight):
    hidden = F.gelu(F.linear(batch, weight))
    return (hidden * 2.0 + hidden).softmax(1)
