"""Checkpoints of models on sharded sequences, by DCP: each plan continues another's."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from plan_api import AttentionMask, attention_mask, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks
from testkit.checkpoints import load_checkpoint, save_checkpoint

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

LENGTH, STEPS = 13, 2  # of a sequence, and of a run under each plan
PACKED = AttentionMask.of_lengths([5, 6, 2])


@dataclass(frozen=True)
class Chain:
    """Runs of which each continues the one before, and the last of which one device continues.

    Attributes:
        axes: of the mesh, with their sizes.
        runs: the options of the plan of each, and its mode.
        mask: of all batches; None: sequences are causal, and one token longer.
    """

    axes: dict[str, int]
    runs: tuple[tuple[dict[str, Any], str], ...]
    mask: AttentionMask | None = None


CHAINS = {
    "packed documents": Chain(
        {"cp": 2},
        (
            ({"cp": "cp", "cp_order": "balanced"}, "eager"),
            ({"cp": "cp", "cp_method": "ulysses"}, "static"),
            ({"cp": "cp", "cp_method": "all-gather", "cp_order": "zigzag"}, "static"),
        ),
        PACKED,
    ),
    "tp": Chain(
        {"axis": 2},
        (({"tp": "axis"}, "eager"), ({"cp": "axis"}, "static"), ({"tp": "axis"}, "static")),
    ),
    "beside tp and dp": Chain(
        {"cp": 2, "tp": 2},
        (
            ({"cp": "cp", "tp": "tp", "sp": True, "loss_parallel": True}, "static"),
            ({"dp": "cp", "tp": "tp"}, "eager"),
            ({"dp": "cp", "cp": "tp"}, "static"),
            ({"cp": "cp", "tp": "tp", "cp_method": "all-gather"}, "eager"),
        ),
    ),
}  # fmt: skip


def llama(seed=None):
    model = models.llama(attn_implementation="sdpa", num_hidden_layers=2)
    if seed is not None:
        models.reinitialize(model, seed)
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model, optimizer, *, length, block=nullcontext, **arguments):
    """Returns the losses of a run; all runs have the same batches, which a model learns."""
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        ids = torch.randint(0, models.VOCABULARY, (4, length), generator=generator)
        with block():
            loss = model(input_ids=ids, labels=ids, **arguments).loss
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "tp")) for name in CHAINS],
)
def test_each_plan_continues_the_checkpoint_of_the_one_before(name, tmp_path):
    chain = CHAINS[name]
    length = LENGTH if chain.mask is not None else LENGTH + 3
    ranks = torch.Size(chain.axes.values()).numel()

    def check(folder):
        mesh = init_device_mesh("cpu", tuple(chain.axes.values()), mesh_dim_names=tuple(chain.axes))
        block = nullcontext if chain.mask is None else lambda: attention_mask(chain.mask)
        losses = []
        for number, (options, mode) in enumerate(chain.runs):
            # Only the first run has the weights of one device.
            model = llama(seed=number or None)
            model = parallelize(model, zoo.llama(mesh, **{"tp": None} | options), mode=mode)
            optimizer = adamw(model)
            if number:
                load_checkpoint(f"{folder}/{number - 1}", model, optimizer)
            losses += trained(model, optimizer, length=length, block=block)
            save_checkpoint(f"{folder}/{number}", model, optimizer)
        return losses

    def one_device(folder):
        """Returns the losses without a checkpoint, and those that continue the last one."""
        given = {} if chain.mask is None else {"attention_mask": chain.mask.dense(length)}
        alone, losses = llama(), []
        optimizer = adamw(alone)
        for _ in range(len(chain.runs) + 1):
            losses += trained(alone, optimizer, length=length, **given)
        continued = llama(seed=len(chain.runs))
        optimizer = adamw(continued)
        load_checkpoint(f"{folder}/{len(chain.runs) - 1}", continued, optimizer)
        return losses, trained(continued, optimizer, length=length, **given)

    found = run_ranks(check, ranks, str(tmp_path), timeout=240)
    ((expected, rest),) = run_ranks(one_device, 1, str(tmp_path), timeout=120)
    assert expected[0] - expected[-STEPS] > 0.02, "the comparison is empty"
    for losses in found:
        assert [*losses, *rest] == pytest.approx(expected, abs=1e-5, rel=0)


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_the_same_plan_continues_with_the_same_bits(mode, tmp_path):
    def check(folder):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

        def made(seed):
            plan = zoo.llama(mesh, tp=None, cp="cp", cp_order="balanced")
            model = parallelize(llama(seed), plan, mode=mode)
            return model, adamw(model)

        def rest(model, optimizer):
            losses = trained(model, optimizer, length=LENGTH, block=lambda: attention_mask(PACKED))
            return losses, [param.full_tensor().detach() for param in model.parameters()]

        model, optimizer = made(None)
        trained(model, optimizer, length=LENGTH, block=lambda: attention_mask(PACKED))
        save_checkpoint(folder, model, optimizer)
        losses, weights = rest(model, optimizer)
        model, optimizer = made(1)
        load_checkpoint(folder, model, optimizer)
        other_losses, other_weights = rest(model, optimizer)
        assert other_losses == losses
        assert all(map(torch.equal, other_weights, weights))

    run_ranks(check, 2, str(tmp_path), timeout=120)
