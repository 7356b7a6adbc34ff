"""Simulates LLaMA 3 70B on 8 to 8,192 ranks: bfloat16, fp32 state, 4,096 tokens per rank.

The constants are round figures for an H100 cluster and not measured: half of 989 TFLOP/s,
2 TB/s of memory, 200 GB/s and 5 us within 8 ranks, 40 GB/s and 20 us beyond.
"""

import time

import torch

import fsdp
from fsdp.simulate import Compute, Constants, Link, best_group_size

CLUSTER = Constants(
    [Link(5e-6, 1 / 200e9, 8), Link(20e-6, 1 / 40e9)], Compute(1 / (0.5 * 989e12), 1 / 2e12)
)
LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TOKENS, RANKS, MEMORY = 4096, 8192, 80e9


def print_scale(picture):
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False, **LLAMA_70B))
    # The inputs of layers, as with activation checkpointing.
    activations = LLAMA_70B["num_hidden_layers"] * TOKENS * LLAMA_70B["hidden_size"] * 2
    for rows in (1, 16, 128):
        start = time.perf_counter()
        best = best_group_size(
            model, RANKS, memory=MEMORY, constants=CLUSTER, tokens=TOKENS,
            activations=activations, sizes=[2**power for power in range(3, 14)],
            units=r"model\.layers\.\d+",
            mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            shard_placement_fn=lambda param, n=rows: fsdp.Rows(n) if param.ndim == 2 else None,
        )  # fmt: skip
        taken = time.perf_counter() - start
        print(f"\nblocks of {rows} rows, {taken:.1f} s; best: {best.simulation.mesh}")
        print(best.table(), flush=True)
        if picture and rows == 1:
            best.picture(picture)
