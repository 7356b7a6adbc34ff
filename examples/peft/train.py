"""PEFT: LoRA of a sharded model, whose base weights are frozen.

Run ``python examples/peft/train.py --ranks 2 --steps 4``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as native_fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp
from fsdp.integrations import check_version

sys.path.append(str(Path(__file__).parents[1]))
from side_by_side import main

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
CONFIG = LlamaConfig(vocab_size=512, num_attention_heads=4, use_cache=False, **SIZES)


def train(system: str, steps: int) -> list[float]:
    """Trains the adapters on all ranks; returns the losses, means over ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    model = get_peft_model(LlamaForCausalLM(CONFIG), adapters)
    check_version("peft")
    fully_shard = fsdp.fully_shard if system == "fsdp" else native_fully_shard
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        first = torch.randint(512, (4, 1), generator=generator)
        tokens = (first + torch.arange(64)) % 512  # sequences that count
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
    # What `model.save_pretrained(folder, state_dict=...)` writes from the first rank.
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert len(get_peft_model_state_dict(model, whole)) == len(trained)
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(train)
