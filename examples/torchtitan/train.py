"""torchtitan: its LLaMA 3 debug model, with its own FSDP2 and with a module out of its tree.

Run ``python examples/torchtitan/train.py --ranks 2 --steps 4``. The module is `fsdp_titan`. Where
there is no accelerator ranks have testkit's simulated one, because torchtitan needs a device.
"""
# ruff: noqa: E402 (the simulated device is loaded before torchtitan is imported)

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.distributed.fsdp import FSDPModule

import dist_rng
from dist_rng.emulation.device import emulated_device

HAS_DEVICE = torch.accelerator.current_accelerator(check_available=True) is not None
if not HAS_DEVICE:
    from testkit import sim

    sim.load()  # before torchtitan is imported, which looks for a device then
from datasets import Dataset
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.trainer import Trainer

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from side_by_side import main

TEXTS = [f"{number} and {number % 7} are {number + number % 7}. " * 20 for number in range(400)]
# Largest difference of a loss. SOAP's eigenbases and Muon's iteration in bfloat16 amplify the last
# bit of the norm of all gradients, which is summed otherwise: FSDP2's own losses change by 2.9e-3
# and 1.6e-5 in 4 steps if gradients are one bit larger (docs/frameworks/torchtitan.md).
OPTIMIZERS = {"adam8bit": 1e-5, "muon": 1e-4, "soap": 5e-3}
CASES = {"adamw": 1e-5, "tp": 1e-5, "hsdp": 1e-5, "checkpoint": 1e-5, **OPTIMIZERS}


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of the digits and letters of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = trainers.BpeTrainer(vocab_size=512, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator(TEXTS, special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')


def train(system: str, steps: int, case: str) -> list[float]:
    """Trains on all ranks; returns the losses that torchtitan logs, means over tokens.

    In the case ``"checkpoint"`` a second trainer resumes after half of the steps.

    Raises:
        ValueError: losses of the resumed trainer are not those without an interruption.
    """
    dist_rng.install()  # both systems begin with one device's weights
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group: None  # torch 2.14's; time-outs are not shortened
    data = Dataset.from_dict({"text": TEXTS})
    DATASETS["texts"] = DatasetConfig("", lambda path: data, lambda sample: sample["text"])
    # One folder of all ranks, named before there is a process group.
    folder = Path(tempfile.gettempdir()) / f"fsdp-titan-{os.environ['TORCHELASTIC_RUN_ID']}"
    with contextlib.ExitStack() as stack:
        if not HAS_DEVICE:  # the simulated one has no generator of a GPU's kind
            stack.enter_context(emulated_device(dist_rng.Geometry.H100))
        losses = _losses(_config(system, steps, case, folder))
        if case == "checkpoint":
            half, config = steps // 2, _config(system, steps, case, folder)
            config.checkpoint.load_step = half
            resumed = _losses(config)
            if resumed != losses[half:]:
                raise ValueError(f"expected the losses {losses[half:]} again, got {resumed}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()
    return losses


def _config(system: str, steps: int, case: str, folder: Path) -> Trainer.Config:
    """Returns torchtitan's options of a case, and writes its tokenizer."""
    assets = folder / os.environ["RANK"]
    assets.mkdir(parents=True, exist_ok=True)
    write_tokenizer(assets)
    options = {
        "module": "fsdp_titan",
        "config": case if case in OPTIMIZERS else "adamw",
        "parallelism.tensor-parallel-degree": "2" if case == "tp" else "1",
        "parallelism.data-parallel-replicate-degree": "2" if case == "hsdp" else "1",
        "hf-assets-path": str(assets),
        "dump-folder": str(folder),
        "dataloader.dataset": "texts",
        "training.local-batch-size": "2",
        "training.seq-len": "128",
        "training.steps": str(steps),
        "training.mixed-precision-param": "float32",
        "checkpoint.interval": str(max(steps // 2, 1)),
        "debug.seed": "0",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    arguments += ["--checkpoint.enable"] if case == "checkpoint" else []
    config = ConfigManager().parse_args([*arguments, "--validator.no-enable"])
    if system == "native":
        config.model_spec.parallelize_fn = _parallelize_natively
    if not HAS_DEVICE:
        for layer in config.model_spec.model.layers:  # FlexAttention has no backward there
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def _losses(config: Trainer.Config) -> list[float]:
    """Trains, and returns the losses that the trainer logs."""
    trainer = config.build()
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, *rest: object, **options: object) -> None:
        losses.append(loss)
        log(step, loss, *rest, **options)

    trainer.metrics_processor.log = record
    trainer.train()
    trainer.close()
    return losses


def _parallelize_natively(model: nn.Module, **options: Any) -> nn.Module:
    """Calls torchtitan's own ``parallelize_fn``."""
    model = parallelize_llama(model, **options)
    for module in model.modules():
        if not HAS_DEVICE and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # else NCCL's PREMUL_SUM
    return model


if __name__ == "__main__":
    main(train, CASES)
