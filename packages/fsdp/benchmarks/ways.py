"""The systems that are compared: each takes a model, and gives what a step is made of."""

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from copies import without_buffers
from models import BATCH
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Training:
    """A model that is trained.

    Attributes:
        model: to be called.
        backward: of its loss.
        update: the optimizer's step, and the end of the gradients.
    """

    model: nn.Module
    backward: Callable[[torch.Tensor], Any]
    update: Callable[[], Any]


def _adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, torch.Tensor.backward, update)


def _ddp(model):
    return _adamw(DistributedDataParallel(model))


def _fsdp1(model):
    kind, device = type(model.model.layers[0]), next(model.parameters()).device
    wrap = partial(torch_fsdp.wrap.transformer_auto_wrap_policy, transformer_layer_cls={kind})
    return _adamw(
        torch_fsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=wrap, use_orig_params=True, device_id=device
        )
    )


def _sharded(package, model, **options):
    for layer in model.model.layers:
        package.fully_shard(layer, **options)
    return package.fully_shard(model, **options)


def _fsdp2(model):
    return _adamw(_sharded(torch_fsdp, model))


def _fsdp(model, strategy="auto", buffers=True):
    import fsdp

    _sharded(fsdp, model, strategy=strategy)
    if not buffers:
        without_buffers(model)
    return _adamw(model)


def _deepspeed(model):
    """ZeRO-3 with its defaults, but for what others do not do; AdamW is torch's, as of all."""
    # What its launcher would say; it must know the accelerator when it is imported.
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_SIZE=size)
    os.environ["DS_ACCELERATOR"] = next(model.parameters()).device.type
    logging.disable(logging.WARNING)
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # its default is 1
        },
    )
    return Training(engine, engine.backward, engine.step)


def _floor(model):
    """What native collectives cost at least: the model alone, AdamW of shards, bare collectives.

    The collectives are those of a step of FSDP2, of flat tensors that nobody fills or reads; there
    is no numerical result. Its processor time is the least that a step can take with them.
    """
    device, world = next(model.parameters()).device, dist.get_world_size()
    parts = [
        *model.model.layers,
        nn.ModuleList([model.model.embed_tokens, model.model.norm, model.lm_head]),
    ]
    sizes = [-(-sum(p.numel() for p in part.parameters()) // world) for part in parts]
    shards = [torch.zeros(size, device=device, requires_grad=True) for size in sizes]
    # Memory that is there, as to allocate it takes about as long as to fill it.
    wholes = [torch.zeros(world * size, device=device) for size in sizes]
    grads = [torch.zeros(size, device=device) for size in sizes]
    optimizer = torch.optim.AdamW(shards, lr=1e-3)

    def gather(count):
        for shard, whole in zip(shards[:count], wholes, strict=False):
            dist.all_gather_into_tensor(whole, shard.detach())

    def backward(loss):
        loss.backward()
        model.zero_grad()
        gather(len(shards) - 1)  # the root's parameters are kept
        for shard, whole, grad in zip(shards, wholes, grads, strict=True):
            dist.reduce_scatter_tensor(grad, whole)
            shard.grad = grad

    def update():
        optimizer.step()
        gather(len(shards))

    return Training(model, backward, update)


def left_out(device):
    """The ways that cannot be measured here, and why."""
    why = {}
    if importlib.util.find_spec("deepspeed") is None:
        why["DeepSpeed ZeRO-3"] = "deepspeed is not installed"
    if device != "cpu":
        exchanges = [name for name in WAYS if "exchange" in name]
        why |= dict.fromkeys(exchanges, "exchanges are for the host's memory")
    return why


# Every rank for itself shows what the others add; FSDP2 is what they are compared with.
WAYS = {
    "alone": _adamw,
    "DDP": _ddp,
    "FSDP1": _fsdp1,
    "FSDP2": _fsdp2,
    "DeepSpeed ZeRO-3": _deepspeed,
    "fsdp (native)": partial(_fsdp, strategy="native"),
    "fsdp (exchange)": _fsdp,
    "no DBuffer (native)": partial(_fsdp, strategy="native", buffers=False),
    "no DBuffer (exchange)": partial(_fsdp, buffers=False),
    "floor (native)": _floor,
}
