"""TRL: supervised fine-tuning by `SFTTrainer`, of a sharded model with a tokenizer.

Run ``python examples/trl/train.py --ranks 2 --steps 4``.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

from fsdp import integrations

sys.path.append(str(Path(__file__).parents[1]))
from side_by_side import main

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
TEXTS = [
    f"question {number}: what is {number} and one? answer: {number + 1}" for number in range(99)
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the words of the texts."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<eos>"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def train(system: str, steps: int) -> list[float]:
    """Trains on all ranks; returns the losses that the trainer logs."""
    dist.init_process_group("gloo")
    if system == "fsdp":
        integrations.install()  # the one line
        integrations.check_version("trl")
    names: list[str] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    folder, tokenizer = Path(names[0]), make_tokenizer()
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, **SIZES)
        LlamaForCausalLM(config).save_pretrained(folder / "start")
    dist.barrier()
    sharding = DistributedConfig(fsdp_size=dist.get_world_size())
    model = LlamaForCausalLM.from_pretrained(folder / "start", distributed_config=sharding)
    arguments = SFTConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        max_steps=steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        max_length=32,
        disable_tqdm=True,
        report_to=[],
    )
    data = Dataset.from_dict({"text": TEXTS})
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    dist.barrier()
    dist.destroy_process_group()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(train)
