"""Modules that a plan recomputes and compiles train with the same bits, in both modes."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from plan_api import Phase, Plan, installed, parallelize, uninstall, zoo
from testkit import (
    FLATTENS_TWO_SHARDED_DIMS,
    NO_FLATTENING,
    TORCH_RELEASE,
    CommLog,
    fake_mesh,
    models,
    run_ranks,
)

LAYER = r"model\.layers\.\d+"
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def _fully_shard(plan):
    plan.fully_shard(LAYER, "dp").fully_shard("", "dp")


def _zero_1(plan):
    plan.shard(r".*\.weight", Shard(0), "dp", Phase.OPTIM)


def _zero_3(plan):
    plan.shard(r".*\.weight", Shard(0), "dp").shard(r".*\.weight", Replicate(), "dp", Phase.RUN)


CASES = {
    "TP + SP": ((1, 2), None),
    "fully_shard": ((2, 1), _fully_shard),
    "DDP": ((2, 1), None),
    "fully_shard x TP + SP": ((2, 2), _fully_shard),
    "ZeRO-1": ((2, 1), _zero_1),
    "ZeRO-3": ((2, 1), _zero_3),
}


def cases(*fast, of=tuple(CASES)):
    """Each case in both modes; those that are not fast in the slow tier."""
    return pytest.mark.parametrize(
        ("case", "mode"),
        [
            pytest.param(case, mode, marks=() if (case, mode) in fast else pytest.mark.slow)
            for case in of
            for mode in ("eager", "static")
        ],
    )


def _llama(case, mode, change, **changes):
    shape, data_parallel = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = models.llama(**HEADS | {"attention_dropout": 0.1} | changes)
    models.reinitialize(model, 1)
    plan = zoo.llama(mesh, dp="dp", sp=shape[1] > 1)
    if data_parallel is not None:
        data_parallel(plan)
    change(plan)
    return parallelize(model, plan, mode=mode)


def _train(model, steps=3):
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        loss = models.token_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return losses


def _hash(model):
    return [param.detach().to_local().double().sum().item() for param in model.parameters()]


def _calls(module):
    """The list to which each call of a module is appended."""
    seen = []
    module.register_forward_hook(lambda *_: seen.append(1))
    return seen


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one")
@cases(("fully_shard", "static"))
def test_recomputed_layers_have_the_same_bits(case, mode):
    policies = ["full"] if case == "ZeRO-3" else ["full", "selective-op"]

    def check():
        ends = {}
        for policy in ("none", *policies):
            change = lambda plan, policy=policy: plan.recompute(LAYER, policy)
            model = _llama(case, mode, (lambda plan: plan) if policy == "none" else change)
            layer = model.model.layers[1]
            outside, inside = _calls(layer), _calls(layer.mlp.up_proj)
            losses = _train(model)
            ends[policy] = losses, _hash(model), len(inside) - len(outside)
        return ends

    for found in run_ranks(check, 4 if "x" in case else 2, timeout=240):
        losses, params, again = found.pop("none")
        assert again == 0
        again = 3 + (mode == "static")  # the first step of static mode is compared with Eager
        assert found == dict.fromkeys(policies, (losses, params, again))


@pytest.mark.ranks
@pytest.mark.skipif(
    TORCH_RELEASE < (2, 12), reason="torch 2.11's topk of a DTensor has no backward"
)
@pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one")
@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kept_rows_are_not_dispatched_again(mode, chunks):
    """Backward runs twice through one graph, whose rows are kept for both."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        found = {}
        for policy in ("none", "full", "keep-dispatch"):
            plan = zoo.mixtral(mesh, tp=None, dp="dp", ep="dp")
            options = {"weights": "top_k_weights", "count": "num_experts", "chunks": chunks}
            plan.dispatch(r".*\.experts\.<in:top_k_index>", Shard(0), "dp", **options)
            if policy != "none":
                plan.recompute(LAYER, policy)
            model = parallelize(
                models.mixtral(**HEADS, attention_dropout=0.1), plan, mode=mode, guard_steps=0
            )
            torch.manual_seed(1)
            loss = models.token_loss(model)
            sent = []
            for retain_graph in (True, False):
                with CommLog() as log:
                    loss.backward(retain_graph=retain_graph)
                sent.append(sum(call.op == "all_to_all" for call in log.calls))
            found[policy] = sent, loss.item(), [param.grad for param in model.parameters()]
        gradients = [grads for _, _, grads in found.values()]
        same = [
            [
                torch.equal(one.to_local(), other.to_local())
                for one, other in zip(*pair, strict=True)
            ]
            for pair in ((gradients[0], gradients[1]), (gradients[0], gradients[2]))
        ]
        losses = {loss for _, loss, _ in found.values()}
        return {policy: sent for policy, (sent, *_) in found.items()}, losses, same

    layers, backward, forward = 2, 2 * chunks, 1 + 2 * chunks
    for sent, losses, same in run_ranks(check, 2, timeout=240):
        assert sent == {
            "none": [layers * backward] * 2,
            "full": [layers * (backward + forward)] * 2,
            "keep-dispatch": [layers * backward] * 2,
        }
        assert len(losses) == 1
        assert [all(one) for one in same] == [True, True]


@pytest.fixture
def mesh():
    """A mesh of one rank, in this process."""
    with fake_mesh((1,), ("dp",)) as mesh:
        yield mesh
    uninstall()
    torch._dynamo.reset()


class Calls(TorchDispatchMode):
    """Counts operators that run; what is taken from memory instead does not."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_matrix_products_and_attention_are_not_computed_again(mesh):
    calls = {}
    for policy in ("full", "selective-op"):
        model = models.llama(num_hidden_layers=1, attn_implementation="sdpa")
        plan = zoo.llama(mesh, tp=None, dp="dp").recompute(LAYER, policy)
        model = parallelize(model, plan, mode="static", guard_steps=0, use=())
        loss = models.token_loss(model)
        with Calls() as calls[policy]:
            loss.backward()
    full, selective = calls["full"].counts, calls["selective-op"].counts
    # Six of a layer's seven: torch stops before what leads to no saved tensor.
    assert full[torch.ops.aten.mm.default] == selective[torch.ops.aten.mm.default] + 6
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert (full[attention], selective[attention]) == (1, 0)
    silu = torch.ops.aten.silu.default
    assert (full[silu], selective[silu]) == (1, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside of Dynamo
@pytest.mark.parametrize(
    ("mode", "attention"), [pytest.param("eager", 0, marks=pytest.mark.slow), ("static", 1)]
)
def test_a_compiled_layer_is_recomputed_but_for_the_attention_of_dtensors(mesh, mode, attention):
    model = models.llama(num_hidden_layers=1, attn_implementation="sdpa")
    plan = zoo.llama(mesh, tp=None, dp="dp").recompute(LAYER, "full").compile(LAYER, "aot_eager")
    options = {"guard_steps": 0} if mode == "static" else {}
    model = parallelize(model, plan, mode=mode, use=(), **options)
    loss = models.token_loss(model)
    with torch.profiler.profile() as profile:
        loss.backward()
    calls = Counter(event.name for event in profile.events())
    assert calls["aten::silu"] == 1
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] == attention


# Raised inside of Dynamo and inductor.
@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one")
@pytest.mark.parametrize(
    ("backend", "within"),
    [("aot_eager", 0.0), pytest.param("inductor", 1e-5, marks=pytest.mark.slow)],
)
@cases(of=("TP + SP", "fully_shard", "DDP", "fully_shard x TP + SP"))
def test_compiled_layers_are_one_graph_without_breaks(case, mode, backend, within):
    """More layers than Dynamo compiles one function for, alone and recomputed."""
    changes = {"num_hidden_layers": 9, "attention_dropout": 0.0, "attn_implementation": "sdpa"}

    def plans(plan, recomputes, compiles):
        if recomputes:
            plan.recompute(LAYER, "selective-op")
        if compiles:
            plan.compile(LAYER, backend)

    def check():
        ends, graphs = [], []
        for options in ((False, False), (False, True), (True, True)):
            torch._dynamo.reset()
            counters = torch._dynamo.utils.counters  # of this process
            counters.clear()
            change = partial(plans, recomputes=options[0], compiles=options[1])
            model = _llama(case, mode, change, **changes)
            with torch._dynamo.config.patch(error_on_recompile=True):
                ends.append(_train(model))
            assert installed(model).coverage.unused_sites == []
            graphs.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
        torch._dynamo.reset()
        return ends, graphs

    for (plain, *compiled), graphs in run_ranks(check, 4 if "x" in case else 2, timeout=500):
        for losses in compiled:
            assert losses == pytest.approx(plain, abs=within, rel=0)
        assert graphs == [(0, {}), (1, {}), (1, {})]


class Breaking(nn.Module):
    """Is not one graph."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return x


def test_a_graph_break_is_an_error_that_names_the_entry(mesh):
    model = nn.Sequential(Breaking())
    parallelize(model, Plan(mesh).compile("0", "eager"), use=())
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        model(torch.ones(2))
    notes = "".join(error.value.__notes__)
    assert "in 0, for test_policies.py:" in notes
    assert "compile('0', backend='eager'): expected one graph" in notes


def test_removing_restores_forward(mesh):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own = model[1].forward = lambda x: 2 * x
    plan = Plan(mesh).recompute("[01]").compile("[01]", "eager")
    parallelize(model, plan, mode="static", guard_steps=0, use=())
    assert torch.equal(model[1].forward(torch.ones(2)), torch.full((2,), 2.0))
    installed(model).remove()
    assert "forward" not in vars(model[0])
    assert model[1].forward(3) == own(3)
