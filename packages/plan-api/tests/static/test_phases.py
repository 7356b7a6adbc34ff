"""ZeRO by phases in static mode trains bit for bit as in Eager, on plain tensors."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import (
    Phase,
    Plan,
    StaticError,
    deferred_init,
    generate_static,
    installed,
    parallelize,
    zoo,
)
from plan_api.static.local_params import UnshardedLocalParam
from testkit import (
    FLATTENS_TWO_SHARDED_DIMS,
    NO_FLATTENING,
    TORCH_RELEASE,
    fake_mesh,
    models,
    run_ranks,
)
from testkit.inspection.dtensor_operators import DTensorOperators
from testkit.models import TwoLinears

needs_flattening = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)

R, S0 = Replicate(), Shard(0)
ZERO = {
    "ZeRO-1": {Phase.OPTIM: S0},
    "ZeRO-2": {Phase.OPTIM: S0, Phase.GRAD: S0},
    "ZeRO-3": {Phase.INIT: S0, Phase.RUN: R},
}
MLP = r"model\.layers\.\d+\.mlp"

llama = partial(
    models.llama, num_attention_heads=8, num_key_value_heads=4, attention_dropout=0.1
)  # of which each rank has several key-value heads


def _with_phases(plan, way, params=r".*\.weight"):
    for phase, placement in ZERO[way].items():
        plan.shard(params, placement, "dp", phase)
    return plan


def _zoo(mesh, make, way, **options):
    tp = "tp" if mesh.ndim > 1 else None
    return _with_phases(make(mesh, tp=tp, dp="dp", sp=tp is not None), way, **options)


def _fallback(mesh, way):
    """MLPs run on DTensors."""
    return _zoo(mesh, zoo.llama, way).annotate(f"{MLP}.<in>", S0, "dp").eager(MLP)


def _both_modes(make, plan, guard_steps=0, use=None, logged=(1, 3), **options):
    """Returns what differs after four steps of AdamW, and the losses of Eager."""
    # The guard communicates in the first step, and the third is as the second.
    train = partial(models.train_with_clipping, logged=logged, **options)
    eager = train(parallelize(make(), plan, use=use))
    static = train(parallelize(make(), plan, mode="static", guard_steps=guard_steps, use=use))
    differences = eager.differences(static)
    same = eager.sent == static.sent or TORCH_RELEASE < (2, 12)  # whose Eager gathers once more
    if not same or not all(eager.sent):
        differences.append("collectives")
    return differences, eager.losses


def _assert_equal(found):
    for name, (differences, losses) in found.items():
        assert differences == [], name
        assert losses[-1] != losses[0], name


# Biases, which static mode makes Partial; a fused QKV cannot be sharded further.
GPT2 = r"(?!.*c_attn).*\.(weight|bias)"
TP_CASES = {
    "llama, ZeRO-1": (llama, partial(_zoo, make=zoo.llama, way="ZeRO-1")),
    "llama of one layer, tied, ZeRO-3": (
        partial(llama, tie_word_embeddings=True, num_hidden_layers=1),
        partial(_zoo, make=zoo.llama, way="ZeRO-3"),
    ),
    "llama, tied, ZeRO-3": (
        partial(llama, tie_word_embeddings=True),
        partial(_zoo, make=zoo.llama, way="ZeRO-3"),
    ),
    "llama, an eager fallback, ZeRO-3": (llama, partial(_fallback, way="ZeRO-3")),
    "gpt2, ZeRO-2": (models.gpt2, partial(_zoo, make=zoo.gpt2, way="ZeRO-2", params=GPT2)),
}


@pytest.mark.ranks
@pytest.mark.slow
@needs_flattening
def test_zero_beside_tensor_and_sequence_parallelism_trains_bit_for_bit_as_eager():
    """With dropout, clipping and AdamW; the first step is compared with Eager by the guard, too."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return {
            name: _both_modes(make, plan(mesh), guard_steps=None)
            for name, (make, plan) in TP_CASES.items()
        }

    for found in run_ranks(check, 4, timeout=580):
        _assert_equal(found)


def _tied(**changes):
    return deferred_init(llama, tie_word_embeddings=True, **changes)


def _no_sync(model, last):
    return nullcontext() if last else installed(model).gradients.no_sync()


MICROBATCHES = {"microbatches": 2, "microbatch": _no_sync}
WAYS = {  # of a model, and options of training
    "buckets of fused-comm": (llama, {"guard_steps": None}),
    "microbatches": (llama, MICROBATCHES),
    "one by one": (llama, {"guard_steps": None, "use": ()}),
    "one by one, microbatches": (llama, MICROBATCHES | {"use": ()}),
    "added up": (llama, {"microbatches": 2}),
    "deferred and tied": (_tied, {"guard_steps": None}),
}
EACH = [(zero, way) for zero in ZERO for way in WAYS]
FAST_OF_EACH = [
    ("ZeRO-1", "buckets of fused-comm"),
    ("ZeRO-2", "microbatches"),
    ("ZeRO-3", "microbatches"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cases", "layers", "length"),
    [
        # A step whose collectives are logged takes four times as long.
        pytest.param(FAST_OF_EACH, 1, {"steps": 3, "logged": (2,)}, id="fast"),
        pytest.param(EACH, 2, {}, id="all", marks=pytest.mark.slow),
    ],
)
def test_zero_1_to_3_train_bit_for_bit_as_eager_with_the_same_collectives(cases, layers, length):
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return {
            (zero, way): _both_modes(
                partial(make, num_hidden_layers=layers),
                _zoo(mesh, zoo.llama, zero),
                **options,
                **length,
            )
            for zero, way in cases
            for make, options in [WAYS[way]]
        }

    for found in run_ranks(check, 2, timeout=580):
        _assert_equal(found)
        for way in {way for _, way in cases}:
            assert len({tuple(found[case][1]) for case in cases if case[1] == way}) == 1


class Frozen(TwoLinears):
    """Two Linears, the second of which is frozen; of 3 ranks the last has no row of the first."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 4), nn.Linear(4, 7)
        self.down.requires_grad_(False)


def _frozen(mesh, way):
    plan = Plan(mesh).redistribute("<in>", R, S0, "dp").annotate(r".*\.grad", Partial(), "dp")
    plan.redistribute("<out>", Partial("avg"), R, "dp", grad_src=R)
    return _with_phases(plan, way, r".*\.(weight|bias)")


def _mean_square(model):
    return model(torch.randn(6, model.up.in_features))


@pytest.mark.ranks
def test_uneven_and_empty_shards_and_frozen_parameters_train_as_in_eager():
    def check():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        return {way: _both_modes(Frozen, _frozen(mesh, way), loss_of=_mean_square) for way in ZERO}

    for found in run_ranks(check, 3):
        _assert_equal(found)


@pytest.mark.ranks
@needs_flattening
@pytest.mark.parametrize("way", ZERO)
def test_no_operator_takes_a_dtensor_and_modules_have_plain_parameters_while_they_run(way):
    """In forward, backward, optimizer and zero_grad of three steps."""

    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        model = parallelize(llama(), _zoo(mesh, zoo.llama, way), mode="static", guard_steps=0)
        module, seen = model.model.layers[0].mlp.down_proj, []
        module.register_forward_pre_hook(
            lambda own, _: seen.append((type(own.weight), own.weight.shape))
        )
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            with DTensorOperators() as operators:
                models.token_loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert operators.counts == {}
        assert isinstance(module.weight, DTensor)
        assert isinstance(optimizer.state[module.weight]["exp_avg"], DTensor)
        return seen, module.weight.to_local().shape

    for seen, shape in run_ranks(check, 2, timeout=300):
        assert seen == [(torch.Tensor, (32, 64))] * 3
        assert shape == (16, 64)


def _objects(kind):
    return [one for one in gc.get_objects() if type(one) is kind]


@pytest.mark.parametrize(("way", "stays"), [("ZeRO-1", True), ("ZeRO-2", True), ("ZeRO-3", False)])
def test_unsharded_parameters_are_freed_after_forward_and_after_backward(way, stays):
    """Those of ZeRO-3; the others stay allocated until the optimizer has changed the shards."""
    with fake_mesh((2,), ("dp",)) as mesh:
        gc.collect()
        model = parallelize(Frozen(), _frozen(mesh, way), mode="static", guard_steps=0)
        unsharded = _objects(UnshardedLocalParam)
        loss = _mean_square(model)
        after_forward = {one.is_allocated for one in unsharded}
        loss.backward()
        assert len(unsharded) == 4
        assert after_forward == {one.is_allocated for one in unsharded} == {stays}


@pytest.mark.parametrize("way", ZERO)
def test_an_unreferenced_model_is_freed(way):
    with fake_mesh((2,), ("dp",)) as mesh:
        model = parallelize(Frozen(), _frozen(mesh, way), mode="static")
        for module in model.modules():  # a script's hook, such as a counter's
            module.register_forward_hook(lambda *_, model=model: None)
        module = None
        models.train(model, _mean_square, steps=2)
        seen = [weakref.ref(one) for one in (model, *model.parameters())]
        del model
        gc.collect()
        assert [one() for one in seen] == [None] * len(seen)


@pytest.mark.ranks
@pytest.mark.parametrize("way", ZERO)
def test_a_model_trains_after_its_parameters_are_loaded_and_get_another_dtype(way):
    """Also where they are other objects than before, and one requires its first gradient."""

    def train(model):
        for number in range(3):
            torch.manual_seed(number)
            model(torch.randn(6, 5, dtype=model.up.weight.dtype)).backward()
            with torch.no_grad():
                for param in model.parameters():
                    if param.grad is not None:
                        param -= param.grad
            model.zero_grad()
        return [param.detach().to_local().clone() for param in model.parameters()]

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ends = []
        for mode in ("eager", "static"):
            plan = _frozen(mesh, way)
            state = parallelize(Frozen(), plan, mode=mode).state_dict()
            with torch.device("meta"):
                model = Frozen()
            parallelize(model, plan, mode=mode)
            model.load_state_dict(state, assign=True)
            ends += train(model)
            model.double()
            ends += train(model)
            model.down.requires_grad_(True)
            ends += train(model)
        half = len(ends) // 2
        assert ends[-1].dtype == torch.float64
        return [one.equal(other) for one, other in zip(ends[:half], ends[half:], strict=True)]

    assert run_ranks(check, 2) == [[True] * 12] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("way", ZERO)
def test_the_guard_refuses_a_wrong_gradient(way):
    """Ranks have different shards that are zero, and none deadlocks."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        halves = Frozen()
        with torch.no_grad():
            halves.up.bias[2:] = 0  # rank 1's
            halves.up.weight[:2] = 0  # rank 0's
            halves.down.bias.zero_()
        model = parallelize(halves, _frozen(mesh, way), mode="static")
        assert installed(model).check(torch.ones(6, 5)) == ()
        loss = _mean_square(model)
        wrong = _frozen(mesh, way).annotate("up.weight.grad", R, "dp")
        with pytest.raises(StaticError, match=r"the gradient of up.weight") as error:
            _mean_square(parallelize(Frozen(), wrong, mode="static"))
        return error.value.site, loss.item()

    (site, loss), other = run_ranks(check, 2)
    assert site == "up.weight"
    assert other == (site, loss)


@pytest.mark.slow
@pytest.mark.ranks
@needs_flattening
def test_a_generated_plan_has_its_phases():
    """Generated on FakeTensors, from a plan that only shards."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = _zoo(mesh, zoo.llama, "ZeRO-3")
        batch = torch.randint(0, models.VOCABULARY, (4, 8))
        static = generate_static(plan, llama(), {"input_ids": batch, "labels": batch}, fake=True)
        eager = models.train_with_clipping(parallelize(llama(), plan))
        model = parallelize(llama(), static, mode="static")
        assert model.lm_head.weight.to_local().shape[0] == models.VOCABULARY // 2
        return eager.differences(models.train_with_clipping(model))

    assert run_ranks(check, 4, timeout=580) == [[]] * 4
