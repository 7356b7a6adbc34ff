"""On a GPU: a plan trains in both modes as one device does, with every kernel of attention.

And torch's operators on symmetric memory compute what sends and receives do.
"""

import pytest
import torch

from plan_api import parallelize, uninstall, zoo
from plan_api.lowering.lower import lower
from plan_api.lowering.overlap import find_overlaps
from plan_api.ops.overlap.fused import fused_operators
from plan_api.ops.overlap.products import (
    GatheredProducts,
    PartialProduct,
    Placing,
    ReducedProduct,
)
from plan_api.ops.overlap.transfer import Peers
from plan_api.runtime.error_context import StepContext
from testkit import mesh_of_one, models

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STEPS = 4


@pytest.fixture
def mesh():
    with mesh_of_one("cuda") as mesh:
        yield mesh
    uninstall()


def losses(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        ids = torch.randint(0, models.VOCABULARY, (2, 16)).cuda()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one")
def test_a_llama_trains_as_without_a_plan(mesh, mode, kernel):
    def make():
        return models.llama(attn_implementation=kernel).cuda()

    (axis,) = mesh.mesh_dim_names
    plan = zoo.llama(mesh, tp=axis, sp=True, loss_parallel=True)
    found = losses(parallelize(make(), plan, mode=mode))
    assert found == pytest.approx(losses(make()), abs=1e-5)
    assert found[-1] < found[0]


def products(group, context, fused):
    """Returns the output and the gradients of an MLP around which a sequence is sharded."""
    torch.manual_seed(0)
    placing = Placing(Peers(group, 0, 1, "a test"), 1, context, fused)
    leaves = [torch.randn(shape).cuda() for shape in ((2, 64, 32), (48, 32), (48, 32), (32, 48))]
    x, up, gate, down = leaves = [leaf.requires_grad_() for leaf in leaves]
    whole, *hidden = GatheredProducts.apply(x, placing, (), up, None, gate, None)
    sums = []
    part = PartialProduct.apply(hidden[0] * hidden[1].sigmoid(), placing, sums, down, None)
    out = ReducedProduct.apply(part, placing, sums, part.grad_fn)
    out.square().mean().backward()
    return [whole.detach(), out.detach(), *(leaf.grad for leaf in leaves)]


def test_operators_on_symmetric_memory_compute_what_sends_and_receives_do(mesh):
    """On one rank: what other ranks send is tested by torch's fallbacks, in ops/test_overlap.py."""
    (axis,) = mesh.mesh_dim_names
    fused = fused_operators(mesh.get_group(), "cuda")
    assert fused is not None  # all GPUs that torch supports have symmetric memory with themselves
    model = models.llama()
    lowered = lower(zoo.llama(mesh, tp=axis, sp=True), model, mode="static")
    overlap = find_overlaps(lowered, model, mesh, axis)[0]
    context = StepContext("the backward of a test", overlap.step)
    expected = products(mesh.get_group(), context, None)
    for one, other in zip(products(mesh.get_group(), context, fused), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
