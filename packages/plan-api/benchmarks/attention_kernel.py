"""Measures what torch's CPU attention takes for a pair of short documents, whatever calls it.

    .nox/dev/bin/python packages/plan-api/benchmarks/attention_kernel.py \\
        --json bench-results/kernel.json

Documents of one length, 2048 tokens in all, are computed forward and backward (8 heads, 4 key-value
heads of 64, float32, one thread) in three ways: in strips of queries with all keys before them, as
plan-api computes them, for several lengths of strips; by the kernel's own `is_causal`, which takes
no groups of heads, so that keys are repeated; and by plain products, softmax and their gradients,
all pairs of a document at once. A pair is a query and a key that it attends to. Times are the least
processor times of all rounds, divided by the time of a pair where a kernel computes nothing in
vain: of 1024 queries and as many keys, all attended to.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

TOKENS, HEADS, KV_HEADS, FEATURES = 2048, 8, 4, 64
GROUPS = HEADS // KV_HEADS
LENGTHS = (64, 128, 256, 512, 1024, 2048)
STRIPS = (16, 32, 64, 128, 256)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ways = {("full", 0): kernel_steps(2, 1024, 1024, None)}
    for length in LENGTHS:
        ways |= {(name, length): steps for name, steps in ways_of(length).items()}
    least = least_seconds(ways, options.rounds)
    full = least.pop(("full", 0)) / (2 * 1024 * 1024)
    costs = {length: {} for length in LENGTHS}
    for (name, length), seconds in least.items():
        pairs = TOKENS // length * length * (length + 1) // 2
        costs[length][name] = round(seconds / pairs / full, 2)
    options.json.parent.mkdir(exist_ok=True, parents=True)
    result = {"full_ns_per_pair": round(1e9 * full, 1), "documents": costs}
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"full: {1e9 * full:.1f} ns for a pair")
    for length, by_way in costs.items():
        print(f"documents of {length}: {by_way}")
    print(f"written: {options.json}")


Steps = list[Callable[[], object]]


def ways_of(length: int) -> dict[str, Steps]:
    """Returns the steps of documents of a length, by the way to compute them."""
    strips = [strip for strip in STRIPS if strip <= length]
    ways = {f"strips of {strip}": strip_steps(length, strip) for strip in strips}
    return ways | {"is_causal": causal_steps(length), "products": product_steps(length)}


def least_seconds(ways: dict[tuple[str, int], Steps], rounds: int) -> dict[tuple[str, int], float]:
    """Returns the sums over steps of the least processor time of each; the first round warms up."""
    least = {way: [float("inf")] * len(steps) for way, steps in ways.items()}
    for turn in range(rounds + 1):
        for way, steps in ways.items():
            for number, step in enumerate(steps):
                start = time.process_time()
                step()
                if turn:
                    least[way][number] = min(least[way][number], time.process_time() - start)
    return {way: sum(times) for way, times in least.items()}


def kernel_steps(count: int, queries: int, keys: int, bias: Tensor | None) -> Steps:
    """Returns forward and backward of tiles, with the queries of a group as rows."""
    query, key, value, grad = (
        torch.randn(count, KV_HEADS, size, FEATURES)
        for size in (queries * GROUPS, keys, keys, queries * GROUPS)
    )
    out, lse = _flash(query, key, value, attn_mask=bias)
    return [
        partial(_flash, query, key, value, attn_mask=bias),
        partial(_flash_backward, grad, query, key, value, out, lse, 0.0, False, attn_mask=bias),
    ]


def strip_steps(length: int, strip: int) -> Steps:
    """Returns the steps of strips with all keys before them, of all documents in one call."""
    steps: Steps = []
    for stop in range(strip, length + 1, strip):
        mask = torch.full((strip, stop), -torch.inf).triu(stop - strip + 1)
        bias = mask.repeat_interleave(GROUPS, 0)[None, None]
        steps += kernel_steps(TOKENS // length, strip, stop, bias)
    return steps


def causal_steps(length: int) -> Steps:
    """Returns the steps of the kernel's own causal attention, with repeated keys."""
    query, key, value, grad = (
        torch.randn(TOKENS // length, HEADS, length, FEATURES) for _ in range(4)
    )
    out, lse = _flash(query, key, value, 0.0, True)
    return [
        partial(_flash, query, key, value, 0.0, True),
        partial(_flash_backward, grad, query, key, value, out, lse, 0.0, True),
    ]


def product_steps(length: int) -> Steps:
    """Returns the steps of plain products, of as many heads at once as the cache holds."""
    heads = max(1, 131072 // (length * length * GROUPS))
    query, key, value, grad = (
        torch.randn(heads, size, FEATURES)
        for size in (length * GROUPS, length, length, length * GROUPS)
    )
    bias = torch.full((length, length), -torch.inf).triu(1).repeat_interleave(GROUPS, 0)

    def forward() -> Tensor:
        return torch.bmm(torch.softmax(torch.baddbmm(bias, query, key.mT), -1), value)

    out, lse = forward(), torch.baddbmm(bias, query, key.mT).logsumexp(-1, keepdim=True)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.baddbmm(bias, query, key.mT).sub_(lse).exp_()
        inner = torch.bmm(grad, value.mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)
        return torch.bmm(inner, key), torch.bmm(inner.mT, query), torch.bmm(weights.mT, grad)

    return [forward, backward] * (TOKENS // length * KV_HEADS // heads)


if __name__ == "__main__":
    main()
