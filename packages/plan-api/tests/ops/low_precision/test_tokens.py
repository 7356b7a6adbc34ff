"""Sequence parallelism gathers tokens in float8, to the bits of quantizing what is gathered."""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import (
    MXFP8,
    Float8Block,
    Float8Rowwise,
    Float8Tensorwise,
    Plan,
    explain,
    installed,
    parallelize,
)
from testkit import CommLog, run_ranks

FEATURES = 64
RECIPES = (
    Float8Tensorwise(),
    Float8Rowwise(),
    Float8Block("reference", 64),
    MXFP8("reference"),
)
GATED = ("gate", "up")
R, P = Replicate(), Partial()


class Mlp(nn.Module):
    """Two linear layers that multiply the same tokens, and one behind them."""

    def __init__(self, uses_tokens=False):
        super().__init__()
        self.gate = nn.Linear(FEATURES, 2 * FEATURES)
        self.up = nn.Linear(FEATURES, 2 * FEATURES, bias=False)
        self.down = nn.Linear(2 * FEATURES, FEATURES, bias=False)
        self.uses_tokens = uses_tokens

    def forward(self, x):
        y = torch.tanh(self.gate(x))
        return self.down(y * self.up(x.sin() if self.uses_tokens else x))


class Net(nn.Module):
    def __init__(self, uses_tokens=False):
        super().__init__()
        self.mlp = Mlp(uses_tokens)

    def forward(self, x):
        return self.mlp(x)


def _plan(mesh, recipe, quantizes_tokens=True):
    """Gathers tokens in front of the MLP; with sites at its layers in the dtype of compute."""
    plan = Plan(mesh).shard(r"mlp\.(gate|up)\.(weight|bias)", Shard(0), "tp")
    plan.shard(r"mlp\.down\.weight", Shard(1), "tp")
    plan.redistribute("<in>", R, Shard(1), "tp", grad_src=Shard(1), grad_dst=R)
    plan.redistribute("mlp.<in>", Shard(1), R, "tp", grad_src=P, grad_dst=Shard(1))
    plan.redistribute("mlp.<out>", P, Shard(1), "tp").annotate("<out>", Shard(1), "tp")
    if not quantizes_tokens:
        plan.redistribute("mlp.gate.<in>", R, R, "tp", grad_src=P, grad_dst=P)
        plan.redistribute("mlp.up.<in>", R, R, "tp", grad_src=P, grad_dst=P)
    return plan.precision(".*", recipe)


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _step(model, x):
    """Output and gradients, and the bytes that are gathered in forward and in backward."""
    x = x.clone().requires_grad_()
    with CommLog() as forward:
        y = model(x)
    with CommLog() as backward:
        (y.to_local() if isinstance(y, DTensor) else y).sin().sum().backward()
    values = {name: _full(param.grad) for name, param in model.named_parameters()}
    sent = [
        sum(call.input_bytes for call in log.calls if call.op == "all_gather")
        for log in (forward, backward)
    ]
    return {"y": y.detach(), "x": _full(x.grad), **values}, sent


def _assert_equal(found, expected):
    assert not [
        name for name, one in expected.items() if not torch.equal(_full(found[name]), _full(one))
    ]


def _model(mesh, recipe, mode, quantizes_tokens=True, uses_tokens=False):
    torch.manual_seed(1)
    options = {"guard_steps": 0} if mode == "static" else {}
    plan = _plan(mesh, recipe, quantizes_tokens)
    return parallelize(Net(uses_tokens), plan, mode=mode, **options)


def _batch(tokens):
    torch.manual_seed(2)
    return torch.randn(2, tokens, FEATURES)


@pytest.mark.ranks
def test_tokens_are_gathered_in_a_quarter_of_the_bytes_to_the_same_bits():
    """Of 128 tokens each rank's are whole blocks of the weight's gradient, of 72 they are not."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for recipe in RECIPES:
            for mode in ("eager", "static"):
                model = _model(mesh, recipe, mode)
                plain = _model(mesh, recipe, mode, quantizes_tokens=False)
                (gather,) = installed(model).lowered.quantized_gathers
                assert gather.layers == ("mlp.gate", "mlp.up")
                assert not installed(plain).lowered.quantized_gathers
                if mode == "static":
                    assert not installed(model).check(_batch(128))
                for tokens in (128, 72):
                    found, sent = _step(model, _batch(tokens))
                    expected, plainly_sent = _step(plain, _batch(tokens))
                    _assert_equal(found, expected)
                    model.zero_grad()
                    plain.zero_grad()
                    fp32 = 2 * tokens // 2 * FEATURES * 4
                    assert plainly_sent[0] == fp32
                    assert 0.25 * fp32 <= sent[0] <= 0.27 * fp32, recipe
                    of_columns = sent[1] - plainly_sent[1]
                    if recipe == Float8Tensorwise():  # whose codes backward has
                        assert of_columns == 0
                    else:  # once for both layers
                        assert 0.25 * fp32 <= of_columns <= 0.27 * fp32, recipe

    run_ranks(check, 2, timeout=240)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one")
def test_four_ranks_have_the_same_bits_sharded_recomputed_and_in_autocast():
    policies = (
        {},
        {"path": "", "policy": "full"},
        {"path": "mlp", "policy": "full"},
        {"path": "mlp", "policy": "selective-op"},
    )

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for recipe in RECIPES:
            for mode in ("eager", "static"):
                # Recomputation does not depend on the recipe, but whether backward gathers.
                for policy in policies if recipe in RECIPES[:2] else policies[:1]:
                    models = []
                    for quantizes_tokens in (True, False):
                        plan = _plan(mesh, recipe, quantizes_tokens)
                        plan.redistribute("<in>", R, Shard(0), "dp", grad_src=Shard(0), grad_dst=R)
                        plan.annotate("<out>", Shard(0), "dp").annotate(r".*\.grad", P, "dp")
                        plan.fully_shard("", "dp")
                        if policy:
                            plan.recompute(policy["path"], policy["policy"])
                        torch.manual_seed(1)
                        static = {"guard_steps": 0} if mode == "static" else {}
                        models.append(parallelize(Net(), plan, mode=mode, **static))
                    (gather,) = installed(models[0]).lowered.quantized_gathers
                    assert gather.axis == "tp"
                    for amp in (False, True):
                        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                            (found, sent), (expected, plainly_sent) = (
                                _step(model, _batch(128)) for model in models
                            )
                        _assert_equal(found, expected)
                        assert sent[0] < plainly_sent[0]
                        for model in models:
                            model.zero_grad()

    run_ranks(check, 4, timeout=400)


@pytest.mark.ranks
def test_what_uses_the_tokens_otherwise_gets_them_in_their_dtype():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("plan_api").addHandler(handler)
        for mode in ("eager", "static"):
            model, plain = (
                _model(mesh, Float8Rowwise(), mode, one, uses_tokens=True) for one in (True, False)
            )
            bytes_ = []
            for _ in range(2):
                found, sent = _step(model, _batch(32))
                expected, plainly_sent = _step(plain, _batch(32))
                _assert_equal(found, expected)
                bytes_.append((sent, plainly_sent))
            assert bytes_[0][0][0] > bytes_[0][1][0]  # both
            assert bytes_[1][0] == bytes_[1][1]
        assert len([line for line in lines if "something else than a linear layer" in line]) == 2

    run_ranks(check, 2)


def test_explain_shows_what_is_gathered_in_float8_and_what_is_not(mesh):
    def rows(plan):
        found = explain(plan, Net()).rows
        return [(one.site, one.tensor, one.after) for one in found if one.hook == "precision"]

    recipe = MXFP8("reference")
    gathered = ("mlp", "<in>:0", "gathered in mxfp8, products=reference for gate, up")
    assert gathered in rows(_plan(mesh, recipe))
    assert gathered not in rows(_plan(mesh, recipe, quantizes_tokens=False))
    for other in (
        _plan(mesh, recipe).compile("mlp", "aot_eager"),
        Plan(mesh).shard(r"mlp\.(gate|up)\.weight", Shard(0), "tp")
        .redistribute("mlp.<in>", Shard(1), R, "tp", grad_src=P, grad_dst=Shard(1))
        .precision("mlp.up", recipe),  # the other layer takes plain tokens
    ):  # fmt: skip
        assert gathered[:2] not in [row[:2] for row in rows(other)]
