"""Prints how the work and bytes of Muon divide over ranks for LLaMA 3 8B, from plans alone.

    python packages/fsdp/benchmarks/owners.py

It varies the number of layers in each call of fully_shard. The work of sharded parameters is
balanced by the choice of owners; that of `Whole()` ones by the planner, which balances bytes within
a group, or with `WholeMatrices` work over all groups.
"""

from fsdp.optim.matrix.assignment import MatrixLoad, choose_owners
from fsdp.optim.muon.newton_schulz import newton_schulz_cost
from ragged_shard.planner import TensorSpec, balance, plan_layout
from ragged_shard.planner.balance import work_of_shards

HIDDEN, KEYS, FEED_FORWARD, LAYERS = 4096, 1024, 14336, 32
LAYER = [(HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HIDDEN),
         (FEED_FORWARD, HIDDEN), (FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)]  # fmt: skip


PLACEMENTS = ("sharded", "Whole()", "WholeMatrices()")


def row(layers, ranks, placement):
    shapes, whole = LAYER * layers, placement != "sharded"
    specs = [
        TensorSpec(str(n), a * b, a * b if whole else 1, (a, b)) for n, (a, b) in enumerate(shapes)
    ]
    work = [newton_schulz_cost(shape) for shape in shapes]
    planned = plan_layout(specs, ranks, alignment=4, order="best" if whole else "given")
    loads, busy = [], [0] * ranks
    for _ in range(LAYERS // layers):
        layout = balance(planned, work, busy) if placement == "WholeMatrices()" else planned
        busy = [sum(pair) for pair in zip(busy, work_of_shards(layout, work), strict=True)]
        for n, cost in enumerate(work):
            elements = tuple(units * layout.unit_size(n) for units in layout.units(n))
            loads.append(
                MatrixLoad(cost, elements, elements.index(max(elements)) if whole else None)
            )
    owners = choose_owners(loads, [0] * ranks)
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
        "placement": placement,
        "padding": round(planned.padding_ratio, 3),
        "busiest rank / equal share": round(max(busy) * ranks / sum(busy), 2),
        "bytes / naive's": round(sent / everything, 3),  # half the bytes, twice
    }


if __name__ == "__main__":
    for layers in (1, 2, 4):
        for ranks in (2, 4, 8, 16, 64):
            for placement in PLACEMENTS:
                print(row(layers, ranks, placement))
