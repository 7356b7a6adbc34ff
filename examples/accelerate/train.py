"""accelerate: its FSDP2 plugin with fsdp, a training loop, and saved and loaded state.

Run ``python examples/accelerate/train.py --ranks 2 --steps 4``. A script that is not to be changed
is started by ``accelerate launch -m fsdp.integrations SCRIPT ...``.
"""

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp import integrations

sys.path.append(str(Path(__file__).parents[1]))
from side_by_side import main

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
CONFIG = LlamaConfig(vocab_size=512, num_attention_heads=4, use_cache=False, **SIZES)


def train(system: str, steps: int) -> list[float]:
    """Trains on all ranks; returns the losses, means over ranks."""
    if system == "fsdp":
        integrations.install()  # the one line
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        # accelerate shards on accelerators only, and uses DDP on CPUs. Its state says that
        # ranks have one; all that follows runs as there, on gloo.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = torch.randint(512, (8 * steps, 1), generator=torch.Generator().manual_seed(1))
    tokens = (first + torch.arange(64)) % 512  # sequences that count
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens, 2))
    losses, parts = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            parts.append(accelerator.reduce(loss.detach(), "mean"))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(float(sum(parts) / len(parts)))
                parts = []
            optimizer.step()
            optimizer.zero_grad()
    folders: list[str] = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folders)
    accelerator.save_state(folders[0])
    accelerator.load_state(folders[0])
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main(train)
