"""What DTensor's methods cost on a fake group of 8: native and with dtensor-rules.

Nothing is sent and the tensors are small, so what is left is the planning, the calls and the
allocations. The fake group's all_gather and reduce_scatter copy every piece: `local_us` is what the
same collective costs on the plain local tensor, called and waited for from Python.
"""

import torch
from timing import interleaved, off
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import dtensor_rules
from testkit import fake_mesh

RANKS, SHAPE = 8, (16, 16)
CALLS, ROUNDS = 100, 60
# The bars of the project, for redistributions: microseconds, and how many times less than native.
MOST_US, LEAST_RATIO = 5.0, 8.0
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = {
    "R to S(0)": (R, S0),
    "S(0) to R": (S0, R),
    "P to R": (P, R),
    "P to S(0)": (P, S0),
    "S(0) to S(1)": (S0, S1),
    "R to S(1)": (R, S1),
    "S(1) to R": (S1, R),
    "P to S(1)": (P, S1),
    "S(1) to S(0)": (S1, S0),
}


def rows():
    """A row for each redistribution, then for the other methods, without and with gradients."""
    with fake_mesh((RANKS,)) as mesh:
        return [
            *[_with_bars(_row(f"redistribute {name}", _redistribute(mesh, *pair),
                              _collective(mesh, *pair))) for name, pair in PAIRS.items()],
            *[_row(name, call) for name, call in _methods(mesh).items()],
        ]  # fmt: skip


def _collective(mesh, source, target):
    """The collective alone; None where there is none. All-to-all is a gather on a CPU."""
    ops, group = torch.ops._c10d_functional, mesh.get_group().group_name
    local = _placed(mesh, source).to_local()
    if isinstance(source, Shard):
        return lambda: ops.wait_tensor(ops.all_gather_into_tensor(local, RANKS, group))
    if source == P and target == R:
        return lambda: ops.wait_tensor(ops.all_reduce(local, "sum", group))
    if source == P:
        return lambda: ops.wait_tensor(ops.reduce_scatter_tensor(local, "sum", RANKS, group))
    return None


def _redistribute(mesh, source, target):
    placed = _placed(mesh, source)
    return lambda: placed.redistribute(placements=[target])


def _methods(mesh):
    leaf, shards = torch.ones(SHAPE).requires_grad_(), [S0]
    gradient = torch.ones(SHAPE[0] * RANKS, SHAPE[1])
    placed, with_grad = _placed(mesh, S0), _placed(mesh, S0).requires_grad_()

    def there_and_back():
        whole = DTensor.from_local(leaf, mesh, shards).redistribute(placements=[R]).to_local()
        torch.autograd.grad(whole, leaf, gradient)

    return {
        "from_local": lambda: DTensor.from_local(leaf.detach(), mesh, shards),
        "to_local": lambda: placed.to_local(),
        "from_local, grad": lambda: DTensor.from_local(leaf, mesh, shards),
        "to_local, grad": lambda: with_grad.to_local(),
        "redistribute S(0) to R, grad": lambda: with_grad.redistribute(placements=[R]),
        "all three and backward": there_and_back,
    }


def _row(name, call, local=None):
    variants = {"native": (off, call), "dtensor_rules": (dtensor_rules.enabled, call)}
    if local is not None:
        variants["local"] = (off, local)
    best = interleaved(variants, calls=CALLS, rounds=ROUNDS)
    return {
        "case": name,
        "local_us": round(best.get("local", 0.0), 2),
        "native_us": round(best["native"], 1),
        "dtensor_rules_us": round(best["dtensor_rules"], 2),
        "ratio": round(best["native"] / best["dtensor_rules"], 1),
    }


def _with_bars(row):
    met = row["dtensor_rules_us"] <= MOST_US and row["ratio"] >= LEAST_RATIO
    return row | {
        "most_us": MOST_US, "least_ratio": LEAST_RATIO, "met": "yes" if met else "no"
    }  # fmt: skip


def _placed(mesh, placement):
    whole = torch.ones(SHAPE)
    local = whole.chunk(RANKS, placement.dim)[0] if isinstance(placement, Shard) else whole
    return DTensor.from_local(local.contiguous(), mesh, [placement], run_check=False)
