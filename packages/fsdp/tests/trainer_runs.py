"""Trains a small LLaMA with Hugging Face's Trainer: ``trainer_runs.py FOLDER NAME...``.

On two ranks, with the environment of torchrun. Each run with one of the names, and runs that resume
it, happen with native FSDP2, then after `fsdp.integrations.install`, in the same processes. Rank 0
writes ``runs.json`` into the folder: of each run the losses and norms of gradients that the Trainer
logged, the placement of the parameters, and a fingerprint of what was saved.
"""

import gc
import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from accelerate.utils import is_deepspeed_available
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig

from fsdp import fully_shard, integrations

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
FOLDER, NAMES = Path(sys.argv[1]), sys.argv[2:]
RANKS = 2
TOKENS = torch.randint(50, (32, 16), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]
FULL = {"state_dict_type": "FULL_STATE_DICT"}
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}


def make_model(experts=0, **config):
    """Returns the same numbers on every rank."""
    set_seed(0)
    config = {"use_cache": False, "num_attention_heads": 4, **SIZES, **config}
    if experts:
        config |= {"num_local_experts": experts, "num_key_value_heads": 4}
        return MixtralForCausalLM(MixtralConfig(**config))
    return LlamaForCausalLM(LlamaConfig(**config))


def arguments(folder, fsdp_config=None, **options):
    """Returns the Trainer's arguments; with an fsdp_config accelerate shards the model.

    accelerate shards on accelerators only: on a CPU it would wrap the model in DDP, so its
    environment names an accelerator. Everything after that runs as there, on gloo.
    """
    if fsdp_config is not None:
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        options |= {
            "fsdp": "full_shard",
            "fsdp_config": {"fsdp_version": 2, **layers, **fsdp_config},
        }
    made = TrainingArguments(
        str(folder),
        **{
            "use_cpu": True,
            "ddp_backend": "gloo",
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "max_grad_norm": 0,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": 2,
            "disable_tqdm": True,
            "report_to": [],
            **options,
        },
    )
    assert made.device.type == "cpu"  # which prepares accelerate's state
    if fsdp_config is not None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return made


def fingerprint(values):
    """Returns, of each tensor, its sum and the sum of its absolute values in fp64."""
    return {name: [v.double().sum().item(), v.double().abs().sum().item()] for name, v in values}


def report(trainer):
    """Returns the results of a run; every rank calls it."""
    model = trainer.model
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [entry.get("grad_norm") for entry in logs],
        "eval": [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e],
        "placement": type(next(model.parameters()).placements[0]).__name__,
        "weights": fingerprint(full.items()),
    }


def train(model, options, resume=None):
    """Trains to the end, and reports."""
    set_seed(3)
    trainer = Trainer(model, options, train_dataset=DATA, eval_dataset=DATA[:8])
    trainer.train(resume_from_checkpoint=resume)
    return report(trainer), trainer


def saved(folder):
    """Returns the fingerprint of the weights that from_pretrained reads on one device."""
    return fingerprint(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())


def by_accelerate(folder):
    """Runs whose model accelerate shards."""
    runs = {}
    for name, config, options in [
        ("sharded", {}, BEST),
        ("full", FULL, BEST | {"max_grad_norm": 0.5}),
        ("efficient", {"cpu_ram_efficient_loading": True, "activation_checkpointing": True}, {}),
        ("weights only", FULL, {"save_only_model": True, "gradient_accumulation_steps": 2}),
    ]:
        if name not in NAMES:
            continue
        at = folder / name
        runs[name], trainer = train(make_model(), arguments(at, config, **options))
        if options.get("save_only_model"):
            runs[name]["saved"] = saved(at / "checkpoint-4")
            tokens = TOKENS[:2, :4]
            generated = trainer.model.generate(tokens, max_new_tokens=4, do_sample=False)
            runs[name]["generated"] = generated.tolist()
        else:
            again = make_model(), arguments(at / "again", config, **options)
            runs[f"{name}, resumed"], _ = train(*again, resume=str(at / "checkpoint-2"))
    return runs


def by_transformers(folder):
    """Runs whose model transformers shards while it loads it."""
    runs = {}
    config = DistributedConfig(fsdp_size=2)
    options = {"save_only_model": True, "gradient_accumulation_steps": 2}
    for name, made in [
        ("loaded", {}),
        ("loaded, tied", {"tie_word_embeddings": True}),
        ("loaded, experts", {"experts": 3}),  # one checkpoint's tensor for each expert
    ]:
        if name not in NAMES:
            continue
        source = folder / name / "source"
        if dist.get_rank() == 0:
            make_model(**made).save_pretrained(source)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(source, distributed_config=config)
        runs[name], trainer = train(model, arguments(folder / name, **options))
        runs[name]["saved"] = saved(folder / name / "checkpoint-4")
        if (
            "tied" in name
        ):  # torch's writer shares the memory of both names, which safetensors refuses
            continue
        # Files of each rank's own shards, and a model that goes on from them.
        trainer.model.save_pretrained(folder / name / "shards", distributed_checkpoint=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder / name / "shards", distributed_config=config
        )
        runs[f"{name}, from shards"], _ = train(model, arguments(folder / "on", **options))
    if "made" in NAMES:
        mesh_config, _, mesh = LlamaForCausalLM.prepare_distribute_model(config)
        model = LlamaForCausalLM.maybe_distribute_model(make_model(), mesh_config, mesh)
        runs["made"], _ = train(model, arguments(folder / "made", **options))
    return runs


def refused(function, *args, **options):
    """Returns the error that every rank gets."""
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return None


def refusals(folder):
    """Unsupported runs raise on every rank, and the process group can be used afterwards."""
    found = {}
    model = LlamaForCausalLM.from_pretrained(
        folder / "loaded" / "source", distributed_config=DistributedConfig(fsdp_size=2)
    )
    found["optimizer"] = refused(Trainer, model, arguments(folder / "x"), train_dataset=DATA)
    by_hand = fully_shard(make_model())
    found["by hand"] = refused(by_hand.save_pretrained, folder / "x")
    return found


def main():
    group = {"rank": int(os.environ["RANK"]), "world_size": RANKS}
    store = (FOLDER / "store").as_uri()
    dist.init_process_group("gloo", store, timeout=timedelta(seconds=60), **group)
    results = {}
    for system in ("native", "fsdp"):
        if system == "fsdp":
            integrations.install()
        folder = FOLDER / system
        results[system] = by_accelerate(folder) | by_transformers(folder)
        gc.collect()
    if "loaded" in NAMES:
        results["refused"] = [None, None]
        dist.all_gather_object(results["refused"], refusals(folder))
        integrations.uninstall()
        again = LlamaForCausalLM.from_pretrained(
            folder / "loaded" / "source", distributed_config=DistributedConfig(fsdp_size=2)
        )
        results["uninstalled"] = type(next(again.parameters()).placements[0]).__name__
    if dist.get_rank() == 0:
        (FOLDER / "runs.json").write_text(json.dumps(results, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def start(rank):
    """Forks a rank, as imports take longer than its runs; returns its process id."""
    if child := os.fork():
        return child
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, (rank, rank, RANKS, RANKS)), strict=True))
    main()
    sys.exit()


if __name__ == "__main__":
    if is_deepspeed_available():  # which accelerate imports in every run
        importlib.import_module("deepspeed")
    gc.freeze()  # accelerate collects garbage around each run, on each rank
    processes = [start(rank) for rank in range(RANKS)]
    sys.exit(max(os.waitpid(process, 0)[1] for process in processes) != 0)
