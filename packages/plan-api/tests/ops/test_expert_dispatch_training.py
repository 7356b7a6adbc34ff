"""Tokens that are sent to their experts: one device's losses, and static mode with Eager's bits.

EP reuses the ranks of data and tensor parallelism, both ways, along both axes at once, and beside
replicas.
"""

from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from plan_api import installed, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]


@dataclass(frozen=True)
class Case:
    """Options of a plan of the zoo on a mesh.

    Attributes:
        shape: of the mesh.
        axes: of the mesh.
        options: of the plan.
        experts: how many there are.
        chunks: in which ranks send their tokens.
        steps: of training.
        model: in the zoo.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    options: dict
    experts: int = 4
    chunks: int = 1
    steps: int = 4
    model: str = "mixtral"


CASES = {
    "EP along dp": Case((2,), ("dp",), {"tp": None, "dp": "dp", "ep": "dp"}),
    "EP along dp, 3 chunks": Case((2,), ("dp",), {"tp": None, "dp": "dp", "ep": "dp"}, chunks=3),
    "3 experts along tp, SP": Case((2,), ("tp",), {"sp": True, "ep": "tp"}, experts=3),
    "DeepSeek-V3, EP along dp": Case(
        (2,), ("dp",), {"tp": None, "dp": "dp", "ep": "dp", "dense": 1}, model="deepseek_v3"
    ),
    "EP along dp, cut within along tp, SP": Case(
        (2, 2), ("dp", "tp"), {"dp": "dp", "sp": True, "ep": "dp"}
    ),
    "EP along tp, replicated along dp, SP": Case(
        (2, 2), ("dp", "tp"), {"dp": "dp", "sp": True, "ep": "tp"}
    ),
    "EP along both, SP": Case((2, 2), ("dp", "tp"), {"dp": "dp", "sp": True, "ep": ("dp", "tp")}),
    "DeepSeek-V3, EP along both, SP": Case(
        (2, 2),
        ("dp", "tp"),
        {"dp": "dp", "sp": True, "ep": ("dp", "tp"), "dense": 1},
        chunks=2,
        steps=20,
        model="deepseek_v3",
    ),
    "EP along one of two axes of data": Case(
        (2, 2), ("rest", "ep"), {"tp": None, "dp": ("rest", "ep"), "ep": "ep"}
    ),
    "EP along both, SP, 4 chunks": Case(
        (2, 2), ("dp", "tp"), {"dp": "dp", "sp": True, "ep": ("dp", "tp")}, chunks=4, steps=20
    ),
}


LATENT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}


def _make(case):
    if case.model == "deepseek_v3":
        return models.deepseek_v3(attention_dropout=0.1, **LATENT_HEADS)
    # Heads so that static mode has Eager's bits, see static/test_training.py.
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_dropout": 0.1}
    return models.mixtral(num_local_experts=case.experts, **heads)


@dataclass(frozen=True)
class Trained:
    """What became of a model.

    Attributes:
        losses: of each step.
        norms: of the gradients of one more batch; AdamW hides a factor.
        params: this rank's parts.
        unused_sites: sites of the plan that no call passed.
    """

    losses: list[float]
    norms: list[float]
    params: list[torch.Tensor]
    unused_sites: list[str]


def _parallel(case, mesh, mode):
    plan = getattr(zoo, case.model)(mesh, ep_chunks=case.chunks, **case.options)
    model = parallelize(_make(case), plan, mode=mode, strict=True, guard_steps=0)
    losses = models.train(model, steps=case.steps)
    models.token_loss(model).backward()
    params = list(model.parameters())
    norms = [param.grad.full_tensor().norm().item() for param in params]
    unused_sites = [str(one) for one in installed(model).coverage.unused_sites]
    return Trained(losses, norms, [param.detach().to_local() for param in params], unused_sites)


OF_2 = [name for name, case in CASES.items() if len(case.shape) == 1]
OF_4 = [name for name in CASES if name not in OF_2]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(2, OF_2[1:3], id="2 ranks"),
        *(pytest.param(2, [name], id=name, marks=pytest.mark.slow) for name in OF_2),
        pytest.param(4, OF_4, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_models_with_dispatch_train_as_on_one_device(ranks, names):
    """All in one call: what DTensor decides about operators is forgotten between calls."""

    def check():
        meshes = {
            case.axes: init_device_mesh("cpu", case.shape, mesh_dim_names=case.axes)
            for case in (CASES[name] for name in names)
        }
        found = {}
        for name in names:
            mesh = meshes[CASES[name].axes]
            eager, static = (_parallel(CASES[name], mesh, mode) for mode in ("eager", "static"))
            unlike = [
                at
                for at, (one, other) in enumerate(zip(eager.params, static.params, strict=True))
                if not torch.equal(one, other)
            ]
            found[name] = (
                eager.losses, static.losses, eager.norms, static.norms, unlike,
                eager.unused_sites + static.unused_sites,
            )  # fmt: skip
        return found

    expected = {}
    for name in names:
        alone = _make(CASES[name])
        losses = models.train(alone, steps=CASES[name].steps)
        models.token_loss(alone).backward()
        expected[name] = losses, [param.grad.norm().item() for param in alone.parameters()]
    for found in run_ranks(check, ranks, timeout=480):
        for name, (eager, static, norms, static_norms, unlike, unused_sites) in found.items():
            losses, wanted = expected[name]
            assert eager == pytest.approx(losses, abs=6e-5, rel=0), name
            assert norms == pytest.approx(wanted, abs=1e-6, rel=0.01), name
            assert static == eager, name
            assert static_norms == norms, name
            assert unlike == [], name
            assert unused_sites == [], name
