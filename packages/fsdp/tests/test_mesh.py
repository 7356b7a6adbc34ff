"""Parameters on several meshes, as experts and the others, train as on one device; clipping."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp
from fsdp import Rows, clip_grad_norm_
from fsdp.mesh import post_forward_mesh, replica_mesh
from ragged_shard import RaggedShard, StridedRaggedShard
from testkit import fake_mesh, run_ranks
from testkit.models.residual_stack import batch, shard, stack

pytestmark = pytest.mark.ranks
# Since 2.13 the old names warn.
GATHER = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
SCATTER = (
    getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd
)


class Experts(nn.Module):
    """Sends every token through every expert; weights are (experts, in, out)."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(4, 8, 6) / 3)
        self.ep = None  # mesh of the axis that shards the experts

    def forward(self, x):
        up, down = self.up, self.down
        if self.ep is None:
            return torch.einsum("eth,eho->to", torch.relu(torch.einsum("ti,eih->eth", x, up)), down)
        # tokens of all ranks of the axis meet its experts, and sums of what comes out go home
        x = GATHER(x, 0, self.ep)
        hidden = torch.relu(torch.einsum("ti,eih->eth", x, up.to_local()))
        out = torch.einsum("eth,eho->to", hidden, down.to_local())
        return SCATTER(out, "sum", 0, self.ep)


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.experts, self.out = nn.LayerNorm(6), Experts(), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.out(self.experts(self.norm(x)))


def _model():
    torch.manual_seed(4)
    return nn.Sequential(Moe(), Moe(), nn.Linear(6, 3))


def _expert_parallel(granularity):
    """Shards experts on two ranks over the ranks with the same experts, others over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    everyone, model = mesh._flatten("fsdp"), _model()
    for block in list(model)[:-1]:
        experts = block.experts
        experts.ep = mesh["ep"]
        for name, param in list(experts.named_parameters()):
            placed = distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])
            setattr(experts, name, nn.Parameter(placed))
        options = {"shard_placement_fn": lambda param: granularity}
        fsdp.fully_shard(experts, mesh=mesh["efsdp"], **options)
        experts.set_gradient_divide_factor(4)  # its tokens come from four ranks
        fsdp.fully_shard(block, mesh=everyone)
    return fsdp.fully_shard(model, mesh=everyone)


def _train(model, rows, clip):
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(8, 6)[rows]).square().mean().backward()
        norms.append(clip(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize(
    "granularity",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in (None, Rows(16))), Rows(8)],
    ids=str,
)
def test_expert_parallelism_trains_as_on_one_device(granularity):
    def check():
        rank = torch.distributed.get_rank()
        model = _expert_parallel(granularity)
        experts = model[0].experts
        assert isinstance(experts.up.placements[0], StridedRaggedShard)
        assert isinstance(model[0].out.weight.placements[0], RaggedShard)
        norms = _train(model, slice(2 * rank, 2 * rank + 2), clip_grad_norm_)
        alone = _model()
        wanted = _train(alone, slice(None), torch.nn.utils.clip_grad_norm_)
        torch.testing.assert_close(norms, wanted, rtol=1e-5, atol=1e-6)
        for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(check, 4, timeout=120)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_on_one_mesh_equals_torchs(norm_type):
    def check():
        model, plain = shard(fsdp, stack()), stack()
        for one in (model, plain):
            sum(one(batch(0, rank)).square().mean() for rank in (0, 1)).backward()
        norm = clip_grad_norm_(model.parameters(), 0.01, norm_type)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
        torch.testing.assert_close(norm, wanted)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad)

    run_ranks(check, 2)


def test_clipping_with_plain_parameters_and_without_gradients():
    def check():
        model = stack()
        ignored = set(model[-1].parameters())
        shard(fsdp, model, ignored_params=ignored)
        assert clip_grad_norm_(model.parameters(), 1.0) == 0
        model(batch(0, 0)).square().mean().backward()
        plain = stack()
        plain(batch(0, 0)).square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.01)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        torch.testing.assert_close(norm, wanted)
        torch.testing.assert_close(model[-1].weight.grad, plain[-1].weight.grad)
        model[-1].bias.grad.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    run_ranks(check, 2)


@pytest.mark.skipif(
    not hasattr(torch_common, "ShardPlacementResult"), reason="torch < 2.12 has no such result"
)
def test_shard_placement_result_with_a_mesh_trains_as_fsdp2():
    """Matrices are sharded over two ranks and replicated over the others; others over all four."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
        hybrid = torch_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        both = torch_common.FSDPMeshInfo(everyone, shard_mesh_dim=0)

        def place(param):
            matrix = param.ndim == 2
            return torch_common.ShardPlacementResult(None, hybrid if matrix else both)

        grads = []
        for package in (fsdp, torch_fsdp):
            model = shard(package, stack(), mesh=everyone, shard_placement_fn=place)
            model(batch(0)).square().mean().backward()
            meshes = {p.ndim: p.device_mesh for p in model.parameters()}
            assert meshes == {1: everyone, 2: mesh}
            grads.append([param.grad.full_tensor() for param in model.parameters()])
        for actual, native in zip(*grads, strict=True):
            torch.testing.assert_close(actual, native, rtol=1e-5, atol=1e-6)

    run_ranks(check, 4, timeout=120)


def test_meshes_of_other_ranks_are_made_once_for_each_slice():
    """Each slice of a mesh is another object; a process group for each would be too many."""
    with fake_mesh((2, 2, 2), ("a", "b", "c")) as mesh:
        first, second = mesh["a", "b"], mesh["b", "c"]
        assert post_forward_mesh(first, 2) is post_forward_mesh(mesh["a", "b"], 2)
        assert replica_mesh(first) is replica_mesh(mesh["a", "b"])
        others = [replica_mesh(first), replica_mesh(second)]
        others += [post_forward_mesh(one, size) for one in (first, second) for size in (1, 2)]
        assert len(set(map(id, others))) == len(others)
