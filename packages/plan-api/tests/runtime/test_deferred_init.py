"""Models without memory, whose shards have the bits of one device."""

import gc
import inspect
import resource
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from plan_api import Phase, Plan, deferred_init, options, parallelize, zoo
from plan_api.runtime.deferred_init import tape_of
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, fake_mesh, run_ranks
from testkit.inspection.call_forms import call_forms

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Odd(nn.Module):
    """Initialisers of all kinds: by element, by row, by decomposition, copied, computed, tied."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=2)
        self.linear, self.normal = nn.Linear(6, 7), nn.LayerNorm(6)
        self.square, self.copied = nn.Linear(6, 6, bias=False), nn.Linear(6, 9, bias=False)
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.linear.weight, std=0.1, b=0.15)
        self.scaled = nn.Parameter(torch.randn(8, 6) * 0.02)
        self.halves = nn.Parameter(torch.randn(5, 6).to(torch.float16))
        self.copied.weight = self.table.weight
        self.register_buffer("angles", torch.arange(6) / 10000.0)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("shared", torch.zeros(3).expand(2, 3).clone())
        with torch.no_grad():
            self.linear.weight[1:3] *= 2


def plan_of(mesh):
    return (
        Plan(mesh)
        .shard("table.weight", [S1, S0])
        .shard("(linear|square).weight", [R, S0])
        .shard("scaled|halves", [S0, S0])
        .shard("linear.bias", S0, "dp", Phase.OPTIM)
    )


def states_of(make):
    """The parameters and buffers of one device, and the next random number."""
    torch.manual_seed(0)
    model = make()
    return [one.detach() for one in (*model.parameters(), *model.buffers())], torch.rand(3)


@pytest.mark.ranks
@pytest.mark.parametrize("random", [True, False], ids=["dist-rng", "without dist-rng"])
def test_shards_are_bitwise_those_of_one_device(random):
    def check():
        import dist_rng

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        find = options.find_spec
        if not random:
            dist_rng.uninstall()  # of the case before, in the same processes
            options.find_spec = lambda name: None
        try:
            torch.manual_seed(0)
            model = parallelize(deferred_init(Odd), plan_of(mesh))
        finally:
            options.find_spec = find
        after = torch.rand(3)
        tied = model.copied.weight is model.table.weight
        assert all(isinstance(one, DTensor) for one in (*model.parameters(), *model.buffers()))
        states = [one.full_tensor().detach() for one in (*model.parameters(), *model.buffers())]
        return states, after, tied

    expected, following = states_of(Odd)
    for states, after, tied in run_ranks(check, 4, timeout=120):
        assert all(torch.equal(*pair) for pair in zip(states, expected, strict=True))
        assert [one.dtype for one in states] == [one.dtype for one in expected]
        assert torch.equal(after, following)
        assert tied


def small_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, use_cache=False, attn_implementation="eager",
        )
    )  # fmt: skip


@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.ranks
def test_llama_is_initialised_bitwise_as_on_one_device():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        plan = zoo.llama(mesh, dp="dp", sp=True)
        for phase, placement in ((Phase.INIT, S0), (Phase.RUN, R)):
            plan.shard(r".*(embed_tokens|proj|lm_head)\.weight", placement, "dp", phase)
        model = parallelize(deferred_init(small_llama), plan)
        ids = torch.arange(32).view(4, 8)
        loss = model(input_ids=ids, labels=ids).loss
        states = [*model.parameters(), *model.buffers()]
        for one in states:
            local = one._local_tensor
            assert local.untyped_storage().nbytes() == local.nbytes  # no part of more
        return [one.full_tensor().detach() for one in states], loss.item()

    expected, _ = states_of(small_llama)
    torch.manual_seed(0)
    ids = torch.arange(32).view(4, 8)
    loss = small_llama()(input_ids=ids, labels=ids).loss.item()
    for states, actual in run_ranks(check, 4, timeout=120):
        assert all(torch.equal(*pair) for pair in zip(states, expected, strict=True))
        assert actual == pytest.approx(loss, abs=1e-5)


def test_numbers_drawn_between_init_and_parallelize_are_not_repeated(mesh):
    model = deferred_init(nn.Linear, 4, 4)
    torch.manual_seed(5)
    parallelize(model, Plan(mesh))
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_a_model_that_seeds_the_generator_has_these_random_numbers(mesh):
    def make():
        torch.manual_seed(7)
        first = nn.Linear(4, 4)
        torch.manual_seed(8)
        return nn.Sequential(first, nn.Linear(4, 4))

    expected = make()
    after = torch.rand(3)
    torch.manual_seed(1)
    model = parallelize(deferred_init(make), Plan(mesh))
    for actual, native in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(actual.full_tensor(), native)
    assert torch.equal(after, torch.rand(3))


def test_only_shards_are_allocated(monkeypatch):
    """64 GiB as one tensor, of which this rank has a 4,096th."""

    def make():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(2**17, 2**17))
        nn.init.constant_(model.weight, 3.0)
        return model

    with fake_mesh((64, 64), ("dp", "tp")) as mesh:
        plan = Plan(mesh).shard("weight", [S0, S1])
        monkeypatch.setattr(options, "find_spec", lambda name: None)
        model = parallelize(deferred_init(make), plan)
        assert model.weight.shape == (2**17, 2**17)
        assert torch.equal(model.weight.to_local(), torch.full((2**11, 2**11), 3.0))


def test_modules_find_no_shards_along_an_axis_of_one_rank():
    """HSDP's two axes are those of the plan that have their ranks, which is "dp" alone."""
    with fake_mesh((4, 1), ("dp", "cp")) as mesh:
        plan = (
            Plan(mesh).shard("<in>", [S0, R]).fully_shard("", ["dp", "cp"], flat=True, replicate=2)
        )
        model = parallelize(deferred_init(lambda: nn.Linear(8, 8)), plan)
        model.unshard()
        assert [list(param.placements) for param in model.parameters()] == [[R, R]] * 2


def test_a_model_that_reads_values_is_refused():
    def make():
        model = nn.Linear(2, 2)
        if model.weight.sum() > 0:
            model.bias.data.zero_()
        return model

    with pytest.raises(RuntimeError, match="does not read values of its tensors"):
        deferred_init(make)


def test_the_tape_is_freed_with_the_model():
    model = deferred_init(nn.Linear, 4, 4)
    tape = weakref.ref(tape_of(model))
    gc.collect()
    assert tape() is tape_of(model)
    del model
    gc.collect()
    assert tape() is None


class Parts(nn.Module):
    """Two parts, with numbers of all kinds drawn for each, and a tensor of a third."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Odd(), Odd()
        self.bias = nn.Parameter(torch.rand(5))


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_part_has_the_bits_that_it_has_in_the_model(mesh, name):
    expected, following = states_of(Parts)
    names = [one for one, _ in (*Parts().named_parameters(), *Parts().named_buffers())]
    torch.manual_seed(0)
    part = parallelize(getattr(deferred_init(Parts), name), Plan(mesh).shard("scaled", S0, "dp"))
    after = torch.rand(3)
    states = dict([*part.named_parameters(), *part.named_buffers()])
    whole = dict(zip(names, expected, strict=True))
    for own, state in states.items():
        native = whole[f"{name}.{own}"]
        native = native[:4] if own == "scaled" else native  # of rank 0
        assert torch.equal(state.to_local(), native), own
    assert torch.equal(after, following)


def test_a_part_allocates_nothing_of_other_parts():
    """4 GiB of random numbers of another part advance the generator, and are not drawn."""

    def make():
        model = nn.Module()
        model.first, model.between = nn.Linear(8, 8), nn.Linear(2, 2)
        model.between.weight = nn.Parameter(torch.empty(2**15, 2**15).uniform_())
        model.second = nn.Linear(8, 8)
        return model

    with fake_mesh((4,), ("dp",)) as mesh:
        torch.manual_seed(3)
        model = deferred_init(make)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        second = parallelize(model.second, Plan(mesh))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert second.weight.to_local().abs().sum() > 0
        assert peak < 2**19, "KiB"


def test_trunc_normal_is_recorded_while_a_model_is_made():
    original = nn.init._no_grad_trunc_normal_

    def make():
        linear, replaced = nn.Linear(4, 4), nn.init._no_grad_trunc_normal_
        assert replaced is not original
        assert inspect.signature(replaced) == inspect.signature(original)
        for form in call_forms(original, linear.weight, 0.0, 1.0, -2.0, 2.0):
            assert form.call(replaced) is linear.weight
        return linear

    deferred_init(make)
    assert nn.init._no_grad_trunc_normal_ is original
