"""Hugging Face's Trainer: a sharded model is read, trained, evaluated, saved and generates text.

Run ``python examples/transformers/train.py --ranks 2 --steps 4``.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from fsdp import integrations

sys.path.append(str(Path(__file__).parents[1]))
from side_by_side import main

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
CONFIG = LlamaConfig(vocab_size=512, num_attention_heads=4, use_cache=False, **SIZES)


def train(system: str, steps: int) -> list[float]:
    """Trains on all ranks; returns the losses that the Trainer logs."""
    dist.init_process_group("gloo")
    if system == "fsdp":
        integrations.install()  # the one line
    folder = _shared_folder()
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(folder / "start")
    dist.barrier()
    # Each rank reads its own rows of the file.
    sharding = DistributedConfig(fsdp_size=dist.get_world_size())
    model = LlamaForCausalLM.from_pretrained(folder / "start", distributed_config=sharding)
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=steps,
        save_only_model=True,
        eval_strategy="steps",
        eval_steps=steps,
        disable_tqdm=True,
        report_to=[],
    )
    first = torch.randint(512, (64, 1), generator=torch.Generator().manual_seed(1))
    tokens = (first + torch.arange(64)) % 512  # sequences that count
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:8])
    trainer.train()
    model.generate(tokens[:1, :8], max_new_tokens=4, do_sample=False)
    saved = LlamaForCausalLM.from_pretrained(folder / "run" / f"checkpoint-{steps}")
    assert sum(parameter.numel() for parameter in saved.parameters()) == model.num_parameters()
    dist.barrier()
    dist.destroy_process_group()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _shared_folder() -> Path:
    """Returns one temporary folder on all ranks."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return Path(str(names[0]))


if __name__ == "__main__":
    main(train)
