"""NorMuon: the rows of orthogonalized matrices are normalized by running means of their squares."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import Muon
from fsdp.optim.tensors import local_of
from ragged_shard import InterleavedShard, RaggedShard
from testkit import run_ranks
from testkit.checkpoints import load_checkpoint, save_checkpoint
from testkit.models.matrix_net import (
    MatrixNet,
    full_tensor,
    full_tensors,
    matrices_of,
    optimizer_of,
    same_bits,
    sharded,
    train,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
GRANULARITIES = {"elements": Block(1), "rows": Rows(3), "whole": Whole()}


class ReferenceNorMuon(torch.optim.Optimizer):
    """dion's NorMuon on one device, on torch's Newton-Schulz iteration.

    Source: ``_normuon_normalization_core`` in github.com/microsoft/dion, dion/normuon.py, and
    algorithm 1 of arXiv 2510.05491. The normalized update is rounded to `rounded_to`.
    """

    def __init__(self, params, lr, beta2, momentum=0.95, weight_decay=0.1, rounded_to=None):
        super().__init__(params, {"lr": lr})
        self.beta2, self.momentum, self.weight_decay = beta2, momentum, weight_decay
        self.rounded_to = rounded_to

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                    state["variance_neuron"] = torch.zeros_like(param[:, :1])
                state["momentum"].lerp_(param.grad, 1 - self.momentum)
                direction = param.grad.lerp(state["momentum"], self.momentum)
                u = _zeropower_via_newtonschulz(direction, COEFFICIENTS, 5, 1e-7).to(param.dtype)
                norm, mean = u.norm(p=2), (u * u).mean(dim=-1, keepdim=True)
                state["variance_neuron"].lerp_(mean, 1 - self.beta2)
                normalized = u / (state["variance_neuron"].sqrt() + 1e-8)
                normalized = normalized * (norm / normalized.norm(p=2).clamp(min=1e-8))
                if self.rounded_to is not None:
                    normalized = normalized.to(self.rounded_to).to(param.dtype)
                param.mul_(1 - group["lr"] * self.weight_decay)
                param.add_(normalized, alpha=-_adjust_lr(group["lr"], None, param.shape))


def trained_reference(model, steps, **options):
    """Trains a net by the reference, and by AdamW with Muon's weight decay; returns the losses."""
    hidden = dict(matrices_of(model))
    rest = [param for name, param in model.named_parameters() if name not in hidden]
    options = {"lr": 0.02, "beta2": 0.95, "rounded_to": torch.bfloat16} | options
    normuon = ReferenceNorMuon(hidden.values(), **options)
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1)

    class Both:
        def step(self):
            normuon.step()
            adamw.step()

        def zero_grad(self):
            model.zero_grad()

    return train(model, Both(), steps), normuon


@pytest.mark.ranks
@pytest.mark.parametrize(
    "granularity", ["elements", "whole", pytest.param("rows", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_steps_and_state_have_the_bits_of_a_reference_on_one_device(ranks, granularity):
    def check():
        model = sharded(fully_shard, GRANULARITIES[granularity])
        optimizer = optimizer_of(Muon, model, normuon_beta2=0.95)
        losses = train(model, optimizer, 20)
        states = {}
        for name, param in matrices_of(model):
            value = optimizer.state[param]["second_momentum_buffer.0"]
            owner = optimizer.owners()[name]
            assert value.placements == (RaggedShard.owned_by(owner, ranks),)
            assert len(value.to_local()) == (len(param) if dist.get_rank() == owner else 0)
            states[name] = full_tensor(value)
        return losses, full_tensors(model), states

    reference = MatrixNet()
    expected, normuon = trained_reference(reference, 20)
    for losses, params, states in run_ranks(check, ranks):
        assert losses == expected
        assert same_bits(params, full_tensors(reference)) == []
        for name, param in matrices_of(reference):
            assert torch.equal(states[name], normuon.state[param]["variance_neuron"])


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (8, 8)], ids=str)
def test_update_differs_from_dions_by_its_rounding_to_bfloat16_only(shape):
    torch.manual_seed(0)
    grad, updates = torch.randn(shape), []
    for kind, options in ((Muon, {"normuon_beta2": 0.9}), (ReferenceNorMuon, {"beta2": 0.9})):
        param = nn.Parameter(torch.zeros(shape))
        param.grad = grad
        kind([param], lr=1.0, weight_decay=0.0, **options).step()
        updates.append(param.detach())
    torch.testing.assert_close(*updates, rtol=2**-8, atol=0)
    assert not torch.equal(*updates)


def test_rows_have_equal_norms_if_only_the_last_step_counts():
    """With beta2 = 0, every row of the update has the same root mean square, and Muon's norm."""
    torch.manual_seed(0)
    grad = torch.randn(24, 6) * torch.logspace(-2, 0, 24)[:, None]
    updates = []
    for beta2 in (0.0, None):
        param = nn.Parameter(torch.zeros(24, 6))
        param.grad = grad
        Muon([param], lr=1.0, weight_decay=0.0, normuon_beta2=beta2).step()
        updates.append(param.detach())
    norms = updates[0].norm(dim=-1)
    torch.testing.assert_close(norms, norms[:1].expand(24), rtol=1e-2, atol=0)
    torch.testing.assert_close(updates[0].norm(), updates[1].norm(), rtol=1e-2, atol=0)
    assert updates[1].norm(dim=-1).max() > 2 * updates[1].norm(dim=-1).min()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "saved_as", "loaded", "loaded_as", "flat"),
    [
        (2, Block(1), 1, Whole(), True),
        pytest.param(2, Block(1), 4, Whole(), True, marks=pytest.mark.slow),
        pytest.param(4, Rows(3), 1, Block(1), False, marks=pytest.mark.slow),
        (1, Block(1), 2, Rows(3), False),
    ],
)
def test_training_resumes_at_another_number_of_ranks(
    tmp_path, saved, saved_as, loaded, loaded_as, flat
):
    def start(granularity):
        model = sharded(fully_shard, granularity)
        return model, optimizer_of(Muon, model, normuon_beta2=0.9)

    def save():
        model, optimizer = start(saved_as)
        train(model, optimizer, 3)
        save_checkpoint(tmp_path, model, optimizer, flat=flat)
        return train(model, optimizer, 5, 3)

    def load():
        model, optimizer = start(loaded_as)
        load_checkpoint(tmp_path, model, optimizer, flat=flat)
        return train(model, optimizer, 5, 3)

    expected = run_ranks(save, saved)[0]
    for losses in run_ranks(load, loaded):
        assert losses == expected


PLACEMENTS = {
    "fused qkv": ((12, 5), InterleavedShard(0, 3), 3),
    "heads": ((12, 5), Shard(0), 6),
    "columns": ((6, 8), Shard(1), None),
    "experts": ((4, 6, 5), Shard(0), None),
}


@pytest.mark.ranks
def test_hsdp_and_tensor_parallel_matrices_have_the_bits_of_the_reference():
    """Ranks of tp have the statistics of all rows of a matrix, or those of their own matrices."""

    def check(axes, case):
        shape, placement, split = PLACEMENTS[case]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        model = nn.Module()
        if axes[1] == "tp":
            model.w = nn.Parameter(distribute_tensor(values, mesh["tp"], [placement]))
            fully_shard(model, mesh=mesh["dp"])
        else:
            model.w = nn.Parameter(values.clone())
            fully_shard(model, mesh=mesh)
        optimizer = Muon(model.named_parameters(), lr=0.1, split=split, normuon_beta2=0.5)

        def apart(tensor):
            entries = list(tensor) if tensor.ndim == 3 else [tensor]
            rows = shape[-2] // (split or 1)
            return [part.clone() for entry in entries for part in entry.split(rows)]

        params = [nn.Parameter(one) for one in apart(values)]
        reference = ReferenceNorMuon(params, 0.1, 0.5, rounded_to=torch.bfloat16)
        for step in range(3):
            model.w.grad = torch.zeros_like(model.w)
            torch.manual_seed(step if axes[1] == "fsdp" else 10 * step + dist.get_rank())
            if axes[1] == "fsdp":  # replicas have the same gradient
                torch.manual_seed(10 * step + mesh.get_local_rank("fsdp"))
            model.w.grad.to_local().normal_()
            for param, grad in zip(params, apart(full_tensor(model.w.grad)), strict=True):
                param.grad = grad
            optimizer.step()
            reference.step()
        got = apart(full_tensor(model.w))
        assert all(torch.equal(a, b) for a, b in zip(got, params, strict=True)), (axes, case)
        moments = torch.cat(
            [full_tensor(v) for k, v in optimizer.state[model.w].items() if "." in k]
        )
        own = torch.cat([reference.state[param]["variance_neuron"] for param in params])
        torch.testing.assert_close(moments.sort(0).values, own.sort(0).values, rtol=0, atol=0)

    def check_all():
        for case in PLACEMENTS:
            check(("dp", "tp"), case)
            check(("replicate", "fsdp"), case)

    run_ranks(check_all, 4)


def test_statistics_of_bfloat16_parameters_are_float32_and_load_as_such():
    param, other = (nn.Parameter(torch.randn(6, 4).bfloat16()) for _ in range(2))
    param.grad = torch.ones_like(param)
    optimizer = Muon([("w", param)], normuon_beta2=0.9)
    optimizer.step()
    loaded = Muon([("w", other)], normuon_beta2=0.9)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    name = "second_momentum_buffer.0"
    assert loaded.state[other][name].dtype == torch.float32
    assert torch.equal(loaded.state[other][name], optimizer.state[param][name])
    assert loaded.state[other]["momentum_buffer"].dtype == torch.bfloat16


def test_state_of_another_split_is_an_error_and_changes_nothing():
    optimizers = []
    for split in (2, 3):
        param = nn.Parameter(torch.ones(6, 4))
        param.grad = torch.ones_like(param)
        optimizers.append(Muon([("w", param)], normuon_beta2=0.9, split=split))
        optimizers[-1].step()
    before = copy.deepcopy(optimizers[0].state_dict())
    with pytest.raises(ValueError, match=r"2 matrices of parameter 'w', got state that has .*\.2'"):
        optimizers[0].load_state_dict(optimizers[1].state_dict())
    after = optimizers[0].state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"][0].keys() == before["state"][0].keys()


@pytest.mark.ranks
def test_owners_do_not_change_when_other_parameters_have_gradients():
    """The row statistics of a matrix are on its owner; Muon's owners change."""

    def check():
        changed = []
        for beta2 in (0.9, None):
            model = nn.ParameterList([torch.ones(8, 4) for _ in range(3)])  # the second on both
            fully_shard(model)
            optimizer = Muon(model.named_parameters(), normuon_beta2=beta2)
            owners = []
            for names in ("012", "1", "01", "12"):
                for name, param in model.named_parameters():
                    param.grad = torch.ones_like(param) if name in names else None
                optimizer.step()
                owners.append(optimizer.owners()["1"])
            changed.append(len(set(owners)) > 1)
            if beta2 is not None:
                rows = local_of(optimizer.state[model[1]]["second_momentum_buffer.0"])
                assert len(rows) == (8 if dist.get_rank() == owners[0] else 0)
        return changed

    assert run_ranks(check, 2) == [[False, True]] * 2


@pytest.mark.parametrize("beta2", [1.0, -0.1])
def test_decay_rate_out_of_range(beta2):
    with pytest.raises(ValueError, match=r"expected normuon_beta2 to be None or 0 to below 1"):
        Muon([nn.Parameter(torch.zeros(2, 2))], normuon_beta2=beta2)
