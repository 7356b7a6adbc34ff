"""torchao: float8 linear layers, of which FSDP gathers weights in float8.

Run ``python examples/torchao/train.py --ranks 2 --steps 4``. Cases are torchao's recipes, with
weights gathered as they are or in float8; on CPUs their products are emulated.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp

sys.path.append(str(Path(__file__).parents[1]))
from side_by_side import main

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
CONFIG = LlamaConfig(vocab_size=512, num_attention_heads=4, use_cache=False, **SIZES)
# The largest difference of a loss, by the name of the case.
CASES = {"tensorwise": 1e-5, "tensorwise, gathered in float8": 1e-5, "rowwise": 1e-5}


def config(case: str, *, emulates: bool) -> Float8LinearConfig:
    """Returns torchao's options of a case."""
    if case == "rowwise":
        return replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulates)
    return Float8LinearConfig(
        enable_fsdp_float8_all_gather=case.endswith("float8"), emulate=emulates
    )


def train(system: str, steps: int, case: str) -> list[float]:
    """Trains on all ranks; returns the losses, means over ranks."""
    accelerator = torch.accelerator.current_accelerator()
    device = "cpu" if accelerator is None else accelerator.type
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    options = config(case, emulates=device == "cpu")
    convert_to_float8_training(
        model, config=options, module_filter_fn=lambda module, name: name != "lm_head"
    )
    fully_shard = {"native": torch.distributed.fsdp, "fsdp": fsdp}[system].fully_shard
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        first = torch.randint(512, (2, 1), generator=generator)
        tokens = ((first + torch.arange(64)) % 512).to(device)  # sequences that count
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if options.enable_fsdp_float8_all_gather:
            precompute_float8_dynamic_scale_for_fsdp(model)  # one all-reduce for all weights
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(train, CASES)
