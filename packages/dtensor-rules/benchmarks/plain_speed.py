"""What the library costs those who do not use it: operators on plain tensors, with it off and on.

In microseconds.
"""

import torch
import torch.nn.functional as F
from timing import interleaved, off

import dtensor_rules

CALLS = 200
ROUNDS = 100

OPERATORS = {
    "add": lambda x: x + x,
    "add_": lambda x: x.detach().add_(1),
    "mm": lambda x: x @ x,
    "t": lambda x: x.t(),
    "cat": lambda x: torch.cat([x, x]),
    "softmax": lambda x: x.softmax(-1),
    "linear": lambda x: F.linear(x, x),
    "_foreach_add": lambda x: torch._foreach_add([x] * 5, [x] * 5),
}


def rows():
    """One row an operator and grad mode."""
    return [_row(name, grad) for name in OPERATORS for grad in (False, True)]


def _row(name, grad):
    x = torch.ones(4, 4, requires_grad=grad)
    variants = {
        "off": (off, lambda: OPERATORS[name](x)),
        "on": (dtensor_rules.enabled, lambda: OPERATORS[name](x)),
    }
    with torch.set_grad_enabled(grad):
        best = interleaved(variants, calls=CALLS, rounds=ROUNDS)
    return {
        "case": f"plain {name}, {'grad' if grad else 'no_grad'}",
        "off_us": round(best["off"], 2),
        "on_us": round(best["on"], 2),
        "on / off": round(best["on"] / best["off"], 3),
    }
