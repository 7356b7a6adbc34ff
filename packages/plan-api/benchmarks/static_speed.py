"""Steps of LLaMA, Mixtral and DiT, tensor-parallel: by hand, static, Eager, and stock DTensor.

A step is forward, loss, backward, a fused AdamW and zero_grad, of two layers of 64 features. By
hand and static compute and send the same, which is checked before anything is timed.
"""

import contextlib
from collections import Counter

import torch
from by_hand import by_hand
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor_rules
from plan_api import parallelize, zoo
from testkit import models

RANKS, HIDDEN, BATCH, TOKENS = 8, 64, 4, 16
MOST = 1.05
KINDS = ("hand", "static", "eager", "stock")


def build(name, kind, mesh, **options):
    """A function that makes one step and gives its loss."""
    model = _model(name)
    if kind == "hand":
        model = by_hand(model, mesh)
    else:
        plan = getattr(zoo, name)(mesh, **options)
        plan = plan.under("model") if name == "dit" else plan
        model = parallelize(model, plan, mode="static" if kind == "static" else "eager")
    batch = _batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        out = model(**batch)
        loss = out if name == "dit" else out.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _model(name):
    if name == "dit":
        model = models.dit(hidden_size=HIDDEN, num_heads=8, dropout=0.0)
        for param in model.parameters():  # its own closed gates would hide everything
            if param.requires_grad:
                torch.nn.init.normal_(param.data, std=0.05)
        return model
    return getattr(models, name)(
        hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip


def _batch(name):
    torch.manual_seed(1)
    if name == "dit":
        images, noise = torch.randn(BATCH, 4, 8, 8), torch.randn(BATCH, 4, 8, 8)
        times, classes = torch.randint(0, 1000, (BATCH,)), torch.randint(0, 10, (BATCH,))
        return {"x": images, "t": times, "y": classes, "noise": noise}
    ids = torch.randint(0, models.VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids}


@contextlib.contextmanager
def _rules_off():
    dtensor_rules.disable()  # parallelize has switched them on
    try:
        yield
    finally:
        dtensor_rules.enable()


CONTEXTS = dict.fromkeys(KINDS, _rules_off) | {"eager": dtensor_rules.enabled}


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def check_same(steps):
    """Stops unless by hand and static run the same operators and collectives."""
    counted = {}
    for kind in ("hand", "static"):
        steps[kind]()
        with _Counting() as counting:
            steps[kind]()
        counted[kind] = counting.counts
    hand, static = counted["hand"], counted["static"]
    if hand != static:
        raise AssertionError(f"only by hand: {hand - static}; only static: {static - hand}")
    return sum(hand.values()), sum(n for op, n in hand.items() if "_c10d_functional" in op) // 2
