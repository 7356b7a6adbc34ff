"""One operator at a time: what DTensor adds to the local call, native and with dtensor-rules."""

import torch
import torch.nn.functional as F
from timing import interleaved, off
from torch.distributed.tensor import DTensor, Replicate, Shard

import dtensor_rules
from testkit import fake_mesh

CALLS, ROUNDS = 100, 60
# The bars of the project: microseconds over the local call, and how many times less than native.
MOST_US, LEAST_RATIO = 1.0, 8.0
# These have no bar, only the steps that they are part of.
LISTS = ("_foreach_add_", "_fused_adamw_")

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# Operator: the function, and the placement and local shape of each operand.
OPERATORS = {
    "add": (torch.add, [(S0, (4, 4)), (S0, (4, 4))]),
    "mul": (torch.mul, [(S0, (4, 4)), (S0, (4, 4))]),
    "mul scalar": (lambda x: x * 2.0, [(S0, (4, 4))]),
    "mm": (torch.mm, [(R, (4, 4)), (S1, (4, 4))]),
    "t": (torch.t, [(S0, (4, 4))]),
    "view": (lambda x: x.view(x.shape[0], 2, 2), [(S0, (4, 4))]),
    "sum": (torch.sum, [(S0, (4, 4))]),
    "softmax": (lambda x: x.softmax(-1), [(S0, (4, 4))]),
    "gelu": (F.gelu, [(S0, (4, 4))]),
    "slice": (lambda x: x[:, 1:3], [(S0, (4, 4))]),
    "cat": (lambda x, y: torch.cat((x, y), 1), [(S0, (4, 4)), (S0, (4, 4))]),
    "transpose": (lambda x: x.transpose(0, 1), [(S0, (4, 4))]),
    "embedding": (lambda w, i: F.embedding(i, w), [(R, (4, 4)), (S0, "indices")]),
    "native_layer_norm": (
        lambda x, w, b: torch.native_layer_norm(x, (4,), w, b, 1e-5),
        [(S0, (4, 4)), (R, (4,)), (R, (4,))],
    ),
}
# These write to their operands or give no tensor: in grad mode their operands require none.
WITHOUT_GRADIENT = {
    "add_": (torch.Tensor.add_, [(S0, (4, 4)), (S0, (4, 4))]),
    "equal": (torch.equal, [(R, (4, 4)), (R, (4, 4))]),
    "_foreach_add_": (
        lambda *xs: torch._foreach_add_(xs[:5], xs[5:]),
        [(S0, (4, 4))] * 10,
    ),
    "_fused_adamw_": (
        lambda step, *xs: torch._fused_adamw_(
            xs[:5], xs[5:10], xs[10:15], xs[15:], [], [step] * 5, lr=1e-3, beta1=0.9, beta2=0.99,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        ),
        [(R, ()), *[(S0, (4, 4))] * 20],
    ),
}  # fmt: skip


def rows(device="cpu", rounds=ROUNDS):
    """One row an operator and grad mode, in microseconds of the host."""
    table = [(name, *row, True) for name, row in OPERATORS.items()]
    table += [(name, *row, False) for name, row in WITHOUT_GRADIENT.items()]
    with fake_mesh((8,), device_type=device) as mesh:
        return [
            _row(mesh, rounds, name, function, operands, grad=grad, differentiable=differentiable)
            for grad in (False, True)
            for name, function, operands, differentiable in table
        ]


def _row(mesh, rounds, name, function, operands, *, grad, differentiable):
    local = [_local(shape).to(mesh.device_type) for _, shape in operands]
    placed = [
        DTensor.from_local(x, mesh, [placement], run_check=False)
        for x, (placement, _) in zip(local, operands, strict=True)
    ]
    for tensor in (*local, *placed):
        tensor.requires_grad_(grad and differentiable and tensor.is_floating_point())
    with torch.set_grad_enabled(grad):
        best = interleaved(
            {
                "local": (off, lambda: function(*local)),
                "native": (off, lambda: function(*placed)),
                "dtensor_rules": (dtensor_rules.enabled, lambda: function(*placed)),
            },
            calls=CALLS,
            rounds=rounds,
        )
    native, with_rules = best["native"] - best["local"], best["dtensor_rules"] - best["local"]
    ratio = native / with_rules if with_rules > 0 else float("inf")
    row = {
        "case": f"{name}, {'grad' if grad else 'no_grad'}",
        "local_us": round(best["local"], 2),
        "native_over_us": round(native, 2),
        "dtensor_rules_over_us": round(with_rules, 2),
        "ratio": round(ratio, 1),
    }
    if name in LISTS:
        return row
    met = "yes" if with_rules <= MOST_US and ratio >= LEAST_RATIO else "no"
    return row | {"most_us": MOST_US, "least_ratio": LEAST_RATIO, "met": met}


def _local(shape):
    return torch.arange(4) if shape == "indices" else torch.ones(shape)
