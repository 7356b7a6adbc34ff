"""How Muon's work and bytes divide over ranks, at full size, without any: plans alone.

    python packages/fsdp/benchmarks/owners.py

The layers of LLaMA 3 8B, so many of them in each call of fully_shard. Cut parameters are balanced
by the choice of owners, `Whole()` ones by the planner, which balances bytes.
"""

from fsdp.optim.muon.owners import Load, choose_owners, work_of
from ragged_shard.planner import TensorSpec, plan_layout

HIDDEN, KEYS, FEED_FORWARD, LAYERS = 4096, 1024, 14336, 32
LAYER = [(HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HIDDEN),
         (FEED_FORWARD, HIDDEN), (FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)]  # fmt: skip


def row(layers, ranks, whole):
    shapes = LAYER * layers
    specs = [
        TensorSpec(str(n), a * b, a * b if whole else 1, (a, b)) for n, (a, b) in enumerate(shapes)
    ]
    layout = plan_layout(specs, ranks, alignment=4, order="best" if whole else "given")
    loads = []
    for n, shape in enumerate(shapes):
        held = tuple(units * layout.unit_size(n) for units in layout.units(n))
        loads.append(Load(work_of(shape), held, held.index(max(held)) if whole else None))
    loads *= LAYERS // layers
    owners = choose_owners(loads, ranks)
    busy = [0] * ranks
    for load, owner in zip(loads, owners, strict=True):
        busy[owner] += load.work
    travelling = sum(
        sum(one.held) - one.held[owner] for one, owner in zip(loads, owners, strict=True)
    )
    everything = sum(sum(load.held) for load in loads) * (ranks - 1)
    return {
        "layers in a group": layers,
        "ranks": ranks,
        "Whole()": whole,
        "padding": round(layout.padding_ratio, 3),
        "busiest rank / equal share": round(max(busy) * ranks / sum(busy), 2),
        "bytes / naive's": round(travelling / everything, 3),  # half the bytes, twice
    }


if __name__ == "__main__":
    for layers in (1, 2, 4):
        for ranks in (2, 4, 8, 16, 64):
            for whole in (False, True):
                print(row(layers, ranks, whole))
