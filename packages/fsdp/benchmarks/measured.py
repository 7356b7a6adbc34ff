"""Measures memory, collectives and copies of a step."""

import resource
import statistics
from collections import Counter
from contextlib import contextmanager

import torch

from dbuffer import DBuffer
from testkit.inspection.memory import peak_bytes

# Kernels that only move: of copies, of foreach copies, and of FSDP2's copy-in and copy-out.
MOVES = (
    "Memcpy DtoD", "direct_copy_kernel", "copy_device_to_device", "copy_kernel", "CopyFunctor",
    "Copy<", "CatArrayBatchedCopy", "split_with_sizes_copy", "chunk_cat",
)  # fmt: skip


def peak_rss():
    """MB of the process, the most there were so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def live_tensors(step, repeats=5):
    """MB of the host allocator's bytes at their peak in a step, above what it began with.

    The median of repeats: when gloo's threads let go of what they sent is left to chance.
    """
    return statistics.median(peak_bytes(step)[0] / 2**20 for _ in range(repeats))


def kernels_on_device(step):
    """How many kernels and copies a step launches, and how many of them only move.

    The model's own are among both: compare with "alone".
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    launched = [
        event.name()
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    return len(launched), sum(any(move in name for move in MOVES) for name in launched)


@contextmanager
def counted():
    """Counts the collectives of buffers, as they are asked for: a gather is one, however sent."""
    counts = Counter()
    names = ("all_gather_", "reduce_scatter_", "all_reduce_")
    originals = {name: getattr(DBuffer, name) for name in names}

    def counting(name):
        def call(self, *args, **kwargs):
            counts[name] += 1
            return originals[name](self, *args, **kwargs)

        return call

    for name in names:
        setattr(DBuffer, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(DBuffer, name, original)


def logical_collectives(model, step):
    """Counts the groups of fsdp and their gathers and reduce-scatters in a step; None without fsdp.

    Raises:
        AssertionError: not two gathers (one where not resharded), one reduce-scatter per group.
    """
    from fsdp.state import state_of

    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    groups = [group for state in states for group in state.groups]
    if not groups:
        return None
    with counted() as counts:
        step()
    gathers = sum(2 if group.reshard_after_forward else 1 for group in groups)
    wanted = Counter({"all_gather_": gathers, "reduce_scatter_": len(groups)})
    assert counts == wanted, f"expected {dict(wanted)}, got {dict(counts)}"
    return {"groups": len(groups), "gathers": gathers, "reduce-scatters": len(groups)}
