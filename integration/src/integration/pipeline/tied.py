"""Keeps the copies of a parameter equal that stages on two ranks of a pipeline share.

Each of the ranks has a copy, and both get the sum of their gradients, which has the same bits in
either order, so that optimizers compute the same update on both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class TiedCopy:
    """This rank's copy of a parameter.

    Attributes:
        parameter: the copy, a tensor or a DTensor with the same shards as the other one.
        peer: rank of the pipeline that has the other copy.
        is_first: whether this is the copy in the model's first unit that has it, which counts in
            norms.
    """

    parameter: nn.Parameter
    peer: int
    is_first: bool


def add_gradients(copies: Sequence[TiedCopy], group: dist.ProcessGroup) -> None:
    """Adds the gradients of both copies of each parameter; the ranks that have copies call it.

    Args:
        copies: in the same order on both ranks.
        group: ranks of the pipeline.
    """
    for copy in copies:
        gradient = copy.parameter.grad
        assert gradient is not None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.add_(_exchanged(local, copy.peer, group))


def _exchanged(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    """Sends a tensor to another rank and returns the one that it sends."""
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    operations = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def name_as_first(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Gives a parameter a further name in a model, in a module that the model lacks so far.

    Args:
        model: a rank's part of a model, with a placeholder in place of the module.
        name: of the parameter, such as ``model.embed_tokens.weight``.
        parameter: a parameter of the model.
    """
    path, _, own = name.rpartition(".")
    above, _, child = path.rpartition(".")
    parent, holder = model.get_submodule(above), nn.Module()
    parent.__dict__.pop(child, None)
    holder.register_parameter(own, parameter)
    parent.add_module(child, holder)
