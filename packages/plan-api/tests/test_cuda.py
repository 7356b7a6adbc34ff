"""On a GPU: a plan trains in both modes as one device does, with every kernel of attention."""

import pytest
import torch

from plan_api import parallelize, uninstall, zoo
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
