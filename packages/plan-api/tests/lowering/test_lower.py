"""From paths to the tensors and modules of a model."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api import Phase, Plan, lower

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def texts(plan, model):
    return [str(op) for op in lower(plan, model).ops]


def test_each_axis_of_each_match_is_an_operation(mesh, model):
    plan = Plan(mesh).shard(r"layers\.[01]\.up\.weight", (R, S0)).shard("layers.2.<out>", S1, "tp")
    assert texts(plan, model) == [
        "layers.0.up.init:weight:0:shard(->R, dp)",
        "layers.0.up.init:weight:0:shard(->S(0), tp)",
        "layers.1.up.init:weight:0:shard(->R, dp)",
        "layers.1.up.init:weight:0:shard(->S(0), tp)",
        "layers.2.forward:<out>:0:redist(->S(1), tp)",
    ]


def test_operations_print_site_and_placements(mesh, model):
    plan = (
        Plan(mesh)
        .redistribute("layers.0.<in>", R, S0, "tp", grad_src=P, grad_dst=R)
        .annotate("<in>", Partial("avg"), "dp")
        .annotate("layers.0.up.weight.grad", P, "dp")
        .redistribute("layers.0.down.bias", R, P, "tp")
        .annotate("layers.0.<op:reshape:1>", S0, "tp")
    )
    assert texts(plan, model) == [
        "layers.0.forward_pre:<in>:0:redist(R->S(0), tp, grad P->R)",
        "forward_pre:<in>:0:annotate(->P(avg), dp)",
        "layers.0.up.grad:weight:0:annotate(->P, dp)",
        "layers.0.down.run:bias:0:redist(R->P, tp)",
        "layers.0.op:<op>:reshape:1:annotate(->S(0), tp)",
    ]


def test_an_argument_has_one_index_by_position_and_by_name(mesh, model):
    plan = Plan(mesh).shard("layers.0.<in:1>", R, "dp").shard("layers.0.<in:mask>", S0, "dp")
    lowered = lower(plan, model)
    assert [str(op) for op in lowered.ops] == ["layers.0.forward_pre:<in>:1:redist(->S(0), dp)"]
    assert [str(one) for one in lowered.overrides] == [
        "layers.0.forward_pre:<in>:1:redist(->R, dp) is overridden by "
        "layers.0.forward_pre:<in>:1:redist(->S(0), dp)"
    ]
    assert texts(Plan(mesh).shard("layers.0.<in:bias>", R, "dp"), model) == [
        "layers.0.forward_pre:<in>:bias:redist(->R, dp)"
    ]


def test_any_name_may_be_a_keyword_where_forward_takes_all(mesh):
    class Open(nn.Module):
        def forward(self, *args, **kwargs):
            return args

    plan = Plan(mesh).shard("<in:3>", R, "dp").shard("<in:anything>", R, "dp")
    assert len(lower(plan, Open()).ops) == 2


def test_a_tied_parameter_is_resolved_to_its_first_name(mesh, model):
    plan = Plan(mesh).shard(r"layers\.2\.up\.weight", S0, "tp")
    assert texts(plan, model) == ["layers.0.up.init:weight:0:shard(->S(0), tp)"]
    lowered = lower(plan.shard(r"layers\.[02]\.up\.weight", S1, "tp"), model)
    assert [str(op) for op in lowered.ops] == ["layers.0.up.init:weight:0:shard(->S(1), tp)"]
    assert len(lowered.overrides) == 1


def test_all_mismatches_are_listed_with_suggestions(mesh, model):
    plan = (
        Plan(mesh)
        .shard(r"layers\.\d+\.upp\.weight", S0, "tp")
        .shard("layers.0.downn.<in>", R, "tp")
        .shard(r"layers\.0\.up\.bias", S1, "tp")
        .shard("layers.0.<in:maks>", R, "tp")
        .shard("layers.0.<in:7>", R, "tp")
        .shard("nothing_like_it", R, "tp")
    )
    with pytest.raises(ValueError, match="the plan does not fit the model") as caught:
        lower(plan, model)
    lines = str(caught.value).splitlines()[1:]
    assert all(line.startswith("test_lower.py:") for line in lines)
    message = [line.split("): ", 1)[1] for line in lines]
    assert message[0].startswith(
        "no parameter or buffer has this name; did you mean 'layers.0.up.w"
    )
    assert message[1].startswith("no module has this name; did you mean 'layers.0.down'")
    assert message[2] == "layers.0.up.bias has shape (8,): there is no dim 1"
    assert message[3] == (
        "forward of layers.0 (Block) has no argument 'maks'; did you mean 'mask'?"
    )
    assert message[4] == "forward of layers.0 (Block) has 2 arguments: x, mask"
    assert message[5] == "no parameter or buffer has this name"


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        (r"0\.wieght", "'0.weight'?"),
        (r"2\.wieght", "'2.weight'?"),
        (r"1\.weight", "'0.weight'?"),
        (r"\d+\.biass", "'0.bias'?"),
    ],
)
def test_a_typo_suggests_the_nearest_name(mesh, pattern, meant):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="did you mean") as caught:
        lower(Plan(mesh).shard(pattern, S0, "tp"), model)
    assert str(caught.value).endswith(f"did you mean {meant}")


def test_a_typo_in_a_long_name_does_not_suggest_another_module(mesh):
    weights = {"projection_weight": nn.Parameter(torch.ones(4))}
    model = nn.ModuleDict({name: nn.ParameterDict(weights) for name in "qkv"})
    plan = Plan(mesh).shard(r"q\.projection_wieght", S0, "tp")
    with pytest.raises(ValueError, match=r"did you mean 'q\.projection_weight'\?$"):
        lower(plan, model)


def test_phases_are_operations_of_parameters(mesh, model):
    plan = (
        Plan(mesh)
        .shard("layers.0.up.weight", S0, "dp")
        .shard("layers.0.up.weight", R, "dp", Phase.RUN)
    )
    assert texts(plan, model) == [
        "layers.0.up.init:weight:0:shard(->S(0), dp)",
        "layers.0.up.run:weight:0:shard(->R, dp)",
    ]
    assert lower(plan, model).overrides == ()


@pytest.mark.parametrize(
    ("path", "phase", "words"),
    [
        ("layers.0.scale", Phase.RUN, "layers.0.scale is a buffer: it is placed once"),
        ("layers.0.up.weight", Phase.GRAD, r"expected placements \(R, R\).*got \(S\(0\), R\)"),
    ],
)
def test_invalid_phases_are_refused(mesh, model, path, phase, words):
    with pytest.raises(ValueError, match=words):
        lower(Plan(mesh).shard(path, S0, "dp", phase), model)


def test_activations_have_no_phases(mesh):
    with pytest.raises(ValueError, match="only parameters have phases"):
        Plan(mesh).shard("<in>", S0, "dp", Phase.RUN)


def test_models_on_meta_are_resolved(mesh):
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    assert texts(Plan(mesh).shard("weight", S0, "tp"), model)
