"""Compiled layers train as eager ones do."""

import pytest
import torch
from torch._dynamo.utils import counters

from integration.models import LlamaShape
from integration.systems import SYSTEM_NAMES, get_system
from integration.train.model.compiled import compile_layers

COMPILING = [
    name
    for name in SYSTEM_NAMES
    if get_system(name).supports_compile and name != "plan"  # see below
]


@pytest.mark.ranks
@pytest.mark.slow  # the option table compiles in the fast tier, as a plan does below
@pytest.mark.parametrize("system", COMPILING)
def test_losses_are_those_of_eager_layers(system, train_runs, tmp_path):
    compiled = {"system": system, "compile": "aot_eager"}
    runs = [{"system": system}, compiled, compiled | {"activation_checkpointing": "full"}]
    ranks = 1 if system == "single" else 2
    expected, *losses = train_runs(ranks, runs, out=tmp_path, steps=2)
    for compiled in losses:
        assert compiled == pytest.approx(expected, abs=1e-6)


PLANS = {
    "TP x SP": {"tp": 2, "sp": True},
    "FSDP": {"dp_shard": 2},
    "FSDP x TP": {"dp_shard": 2, "tp": 2},
    "pipeline of FSDP": {"dp_shard": 2, "pp_degree": 2, "micro_batch": 4},
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("backend", "within"),
    [("aot_eager", 1e-6), pytest.param("inductor", 1e-5, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("name", "static"),
    [
        pytest.param(name, static, marks=pytest.mark.slow)
        for name in PLANS
        for static in (False, True)
    ],
)
# torch's own, where inductor imports torch.utils.mkldnn.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_losses_of_a_plan_are_those_without_compilation(
    name, static, backend, within, train_runs, tmp_path
):
    options = PLANS[name] | {"system": "plan", "static": static}
    compiled = options | {"compile": backend}
    recomputed = compiled | {"activation_checkpointing": "selective-op"}
    ranks = 4 if len(PLANS[name]) > 1 and "sp" not in options else 2
    expected, *losses = train_runs(ranks, [options, compiled, recomputed], out=tmp_path, steps=2)
    for found in losses:
        assert found == pytest.approx(expected, abs=within)


def test_layers_that_are_alike_share_one_graph():
    torch._dynamo.reset()
    counters.clear()
    shape = LlamaShape(32, 64, 12, 2, 2)  # more layers than dynamo's limit
    model = shape.build(dropout=0.0)
    compile_layers(shape.layers_of(model), "aot_eager")
    tokens = torch.arange(16).view(1, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.slow  # inductor compiles C++ for each graph
# torch's own, where inductor imports torch.utils.mkldnn.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_inductor_trains_a_single_device(train_runs, tmp_path):
    runs = [{}, {"compile": "inductor"}]
    expected, compiled = train_runs(1, runs, out=tmp_path, steps=2)
    assert compiled == pytest.approx(expected, abs=1e-5)
