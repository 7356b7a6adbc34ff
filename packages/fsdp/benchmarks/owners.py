"""How Muon's work and bytes divide over ranks, at full size, without any: plans alone.

    python packages/fsdp/benchmarks/owners.py

The layers of LLaMA 3 8B, so many of them in each call of fully_shard. Cut parameters are balanced
by the choice of owners; `Whole()` ones by the planner, which balances bytes within a group, and
with `WholeMatrices` work over all groups.
"""

from fsdp.optim.matrix.assignment import MatrixLoad, choose_owners
from fsdp.optim.muon.newton_schulz import newton_schulz_cost
from ragged_shard.planner import TensorSpec, balance, plan_layout
from ragged_shard.planner.balance import work_of_shards

HIDDEN, KEYS, FEED_FORWARD, LAYERS = 4096, 1024, 14336, 32
LAYER = [(HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HIDDEN),
         (FEED_FORWARD, HIDDEN), (FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)]  # fmt: skip


WAYS = ("cut", "Whole()", "WholeMatrices()")


def row(layers, ranks, way):
    shapes, whole = LAYER * layers, way != "cut"
    specs = [
        TensorSpec(str(n), a * b, a * b if whole else 1, (a, b)) for n, (a, b) in enumerate(shapes)
    ]
    work = [newton_schulz_cost(shape) for shape in shapes]
    planned = plan_layout(specs, ranks, alignment=4, order="best" if whole else "given")
    loads, busy = [], [0] * ranks
    for _ in range(LAYERS // layers):
        layout = balance(planned, work, busy) if way == "WholeMatrices()" else planned
        busy = [sum(pair) for pair in zip(busy, work_of_shards(layout, work), strict=True)]
        for n, amount in enumerate(work):
            held = tuple(units * layout.unit_size(n) for units in layout.units(n))
            loads.append(MatrixLoad(amount, held, held.index(max(held)) if whole else None))
    owners = choose_owners(loads, ranks)
    busy = [0] * ranks
    for load, owner in zip(loads, owners, strict=True):
        busy[owner] += load.cost
    sent = sum(
        sum(load.elements_by_rank) - load.elements_by_rank[owner]
        for load, owner in zip(loads, owners, strict=True)
    )
    everything = sum(sum(load.elements_by_rank) for load in loads) * (ranks - 1)
    return {
        "layers in a group": layers,
        "ranks": ranks,
        "way": way,
        "padding": round(planned.padding_ratio, 3),
        "busiest rank / equal share": round(max(busy) * ranks / sum(busy), 2),
        "bytes / naive's": round(sent / everything, 3),  # half the bytes, twice
    }


if __name__ == "__main__":
    for layers in (1, 2, 4):
        for ranks in (2, 4, 8, 16, 64):
            for way in WAYS:
                print(row(layers, ranks, way))
