"""A whole model: LLaMA, data parallel x tensor and sequence parallel, as on one device."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from fused_comm import GradReducer
from testkit import models, run_ranks

pytestmark = pytest.mark.ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
STEPS = 5


def _batch(step):
    torch.manual_seed(100 + step)
    ids = torch.randint(0, 64, (4, 8))
    return ids, torch.nn.functional.one_hot(ids.roll(-1, 1), 64).float()


def _loss(model, ids, targets):
    logits = model(input_ids=ids).logits
    return -(torch.log_softmax(logits, -1) * targets).sum() / targets.shape[0] / targets.shape[1]


def _attention(module, query, key, value, mask, **options):
    """Of a rank's heads and samples; DTensor would search redistributions for each matmul."""
    local = (x.to_local() for x in (query, key, value))
    out = scaled_dot_product_attention(*local, is_causal=True, enable_gqa=True)
    return DTensor.from_local(out.transpose(1, 2), query.device_mesh, [S0, Shard(2)]), None


def _parallel(model, mesh):
    """Column and row parallel Linears on ``tp``, hidden states cut along the sequence between."""
    AttentionInterface.register("local", _attention)
    model.set_attn_implementation("local")
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        cut = S0 if kind in columns else S1 if kind in ("o_proj", "down_proj") else R
        for key, param in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(param.detach(), mesh, [R, cut])
            setattr(module, key, torch.nn.Parameter(placed))

    def to(placement):
        return lambda x: x.redistribute(mesh, [S0, placement]) if isinstance(x, DTensor) else x

    whole, cut = to(R), to(S1)

    def before(module, args, kwargs):
        return tuple(map(whole, args)), {
            key: whole(value) if key == "hidden_states" else value for key, value in kwargs.items()
        }

    def after(module, args, output):
        if isinstance(output, tuple):
            return cut(output[0]), *output[1:]
        return cut(output)

    model.model.embed_tokens.register_forward_hook(after)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            block.register_forward_pre_hook(before, with_kwargs=True)
            block.register_forward_hook(after)
    model.lm_head.register_forward_pre_hook(before, with_kwargs=True)


def _train(model, prepare, finish):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(STEPS):
        loss = _loss(model, *map(prepare, _batch(step)))
        loss.backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _on_one_device():
    model = models.llama()
    losses = _train(model, lambda x: x, lambda: None)
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("zero_copy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_trains_as_on_one_device(zero_copy):
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = models.llama()
        _parallel(model, mesh)
        reducer = GradReducer(model.named_parameters(), zero_copy=zero_copy)
        with implicit_replication():
            losses = _train(model, lambda x: distribute_tensor(x, mesh, [S0, R]), reducer.finish)
        return (
            [loss.full_tensor() for loss in losses],
            [p.detach().full_tensor() for p in model.parameters()],
            [(bucket.route, bucket.collectives) for bucket in reducer.report().buckets],
        )

    losses, params = _on_one_device()
    for actual, trained, buckets in run_ranks(check, 4, timeout=180):
        torch.testing.assert_close(actual, losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(trained, params, rtol=1e-3, atol=1e-4)
        # The norms are summed over all ranks, the rest over dp: a bucket for each.
        assert sorted(buckets) == [(f"all-reduce over {ranks}, float32", 1) for ranks in (2, 4)]
