"""fully_shard in static mode trains bit for bit as in Eager, on plain tensors."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fsdp import Block, FSDPModule, Rows, Tiles, Whole
from plan_api import (
    Plan,
    StaticError,
    deferred_init,
    generate_static,
    installed,
    parallelize,
    zoo,
)
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, CommLog, fake_mesh, models, run_ranks
from testkit.inspection.dtensor_operators import DTensorOperators
from testkit.models import TwoLinears

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
LAYER = r"model\.layers\.\d+"
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_dropout": 0.1}

llama = partial(models.llama, **HEADS)
mixtral = partial(models.mixtral, **HEADS)


_ROWS = Rows(2)


def _llama(mesh, granularity=_ROWS, layer=LAYER, **options):
    plan = zoo.llama(mesh, dp="dp", sp=mesh.size(1) > 1)
    return plan.fully_shard(layer, "dp", granularity, **options).fully_shard("", "dp", **options)


def _gpt2(mesh):
    """The biases of row-parallel projections are Partial while their modules run."""
    plan = zoo.gpt2(mesh, dp="dp", sp=mesh.size(1) > 1)
    return plan.fully_shard(r"transformer\.h\.\d+", "dp").fully_shard("", "dp")


def _mixtral(mesh, ep=None):
    plan = zoo.mixtral(mesh, dp="dp", sp=mesh.size(1) > 1, ep=ep)
    return plan.fully_shard(LAYER, "dp").fully_shard("", "dp")


def _layers_only(mesh, **options):
    """Embeddings, the last norm and the head are replicated along dp, and reduced by plan-api."""
    plan = zoo.llama(mesh, dp="dp", sp=mesh.size(1) > 1)
    return plan.fully_shard(LAYER, "dp", Block(8), **options)


def _fallback(mesh):
    """MLPs run on DTensors."""
    mlp = rf"{LAYER}\.mlp"
    return _llama(mesh).annotate(f"{mlp}.<in>", Shard(0), "dp").eager(mlp)


CASES = {
    "llama": (llama, _llama),
    "llama, whole": (llama, partial(_llama, granularity=Whole(), reshard_after_forward=False)),
    "llama, by pattern": (llama, partial(_llama, granularity={rf"{LAYER}\..*proj\.weight": _ROWS})),
    "llama, by function": (
        llama,
        partial(_llama, granularity=lambda param: Whole() if param.ndim == 1 else None),
    ),
    "llama, quantized": (
        llama,
        partial(_llama, granularity=None, quantize={rf"{LAYER}\.mlp\..*": Tiles(rows=8, cols=8)}),
    ),
    "llama, layers only": (llama, _layers_only),
    "llama, layers by ZeRO-2": (llama, partial(_layers_only, placements="zero2")),
    "llama, ZeRO-1": (llama, partial(_llama, placements="zero1")),
    "llama, DDP": (llama, partial(_llama, placements="ddp")),
    "llama, tied": (partial(llama, tie_word_embeddings=True), _llama),
    "llama, an eager fallback": (llama, _fallback),
    "llama, bfloat16": (llama, partial(_llama, mp_policy=BF16)),
    "llama, offloaded": (llama, partial(_llama, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "llama, float8 gradients": (llama, partial(_llama, send_dtype=torch.float8_e5m2)),
    "gpt2": (models.gpt2, _gpt2),
    "mixtral": (mixtral, _mixtral),
    "mixtral, experts divided along dp": (mixtral, partial(_mixtral, ep="dp")),
}
FAST = (
    "llama, bfloat16",
    "llama, quantized",
    "llama, layers by ZeRO-2",
    "llama, an eager fallback",
    "mixtral, experts divided along dp",
)
SLOW = tuple(name for name in CASES if name not in FAST)


def _microbatch(model, last):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
    return nullcontext()


_train = partial(models.train_with_clipping, microbatch=_microbatch)


def _both_modes(make, plan, guard_steps=0, **options):
    eager = _train(parallelize(make(), plan), **options)
    static = parallelize(make(), plan, mode="static", guard_steps=guard_steps)
    return eager.differences(_train(static, **options)), eager.losses


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        pytest.param((2, 2), FAST, id="FSDP x TP + SP", marks=pytest.mark.slow),
        pytest.param((2, 2), SLOW, id="FSDP x TP + SP, more", marks=pytest.mark.slow),
        pytest.param((2, 1), FAST, id="FSDP"),
        pytest.param((2, 1), SLOW, id="FSDP, more", marks=pytest.mark.slow),
    ],
)
def test_static_mode_trains_bit_for_bit_as_eager(shape, names):
    """With dropout, clipping and AdamW; the first step is compared with Eager by the guard, too."""

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        return {
            name: _both_modes(make, plan(mesh), guard_steps=None)
            for name, (make, plan) in ((name, CASES[name]) for name in names)
        }

    for found in run_ranks(check, shape[0] * shape[1], timeout=580):
        for name, (differences, losses) in found.items():
            assert differences == [], name
            assert losses[-1] != losses[0], name


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "static"])
def test_terms_of_gradients_are_sent_in_the_dtype_of_the_plan(mode):
    """Also of a plan that JSON has stored; forward sends and computes the same."""

    def step(mesh, dtype):
        plan = Plan.from_json(_llama(mesh, send_dtype=dtype).to_json(), mesh)
        model = parallelize(llama(), plan, mode=mode, guard_steps=0)
        torch.manual_seed(0)
        with CommLog() as log:
            loss = models.token_loss(model)
            loss.backward()
        sent = sum(call.input_bytes for call in log.calls if call.op == "all_to_all")
        return loss.item(), log.counts().get("reduce_scatter", 0), sent

    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        return [step(mesh, dtype) for dtype in (None, torch.bfloat16, torch.float8_e4m3fn)]

    elements = sum(param.numel() for param in llama().parameters())
    for wide, bf16, float8 in run_ranks(check, 2):
        assert wide[0] == bf16[0] == float8[0]
        assert bf16[1] == float8[1] == 0
        assert bf16[2] == pytest.approx(2 * elements, rel=0.05)  # rows are padded
        assert float8[2] == pytest.approx(129 / 128 * elements, rel=0.05)


def test_a_dtype_in_which_nothing_is_sent_is_refused():
    with fake_mesh((2, 1), ("dp", "tp")) as mesh:
        with pytest.raises(ValueError, match=r"send_dtype: expected a dtype.*got 'bf16'"):
            Plan(mesh).fully_shard("", "dp", send_dtype="bf16")
        plan = zoo.llama(mesh, dp="dp").fully_shard("", "dp", send_dtype=torch.float32)
        with pytest.raises(ValueError, match=r"send_dtype: expected one of torch\.bfloat16"):
            parallelize(llama(), plan)


@pytest.mark.slow
def test_replicas_microbatches_and_deferred_parameters_train_bit_for_bit_as_in_eager():
    """HSDP by ``replicate=`` and by two axes; accumulation, also of an unsharded model."""

    def check():
        make = partial(llama, num_hidden_layers=2)
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
        two_axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "dp"))
        hsdp = zoo.llama(two_axes, tp=None, dp=("replica", "dp"))
        for path in (LAYER, ""):
            hsdp.fully_shard(path, ("replica", "dp"))
        unsharded = _llama(mesh, granularity=None, reshard_after_forward=False)
        deferred = partial(deferred_init, make)
        cases = {
            "HSDP": (make, _llama(mesh, replicate=2), {}),
            "HSDP on two axes": (make, hsdp, {}),
            "accumulation": (make, _llama(mesh), {"microbatches": 2}),
            "accumulation, HSDP": (make, _llama(mesh, replicate=2), {"microbatches": 2}),
            "accumulation, not resharded": (make, unsharded, {"microbatches": 2}),
            "deferred": (deferred, _llama(mesh), {"guard_steps": None}),
            "deferred, HSDP on two axes": (deferred, hsdp, {"guard_steps": None}),
        }
        found = {
            name: _both_modes(make, plan, **options)
            for name, (make, plan, options) in cases.items()
        }
        not_deferred = {
            name: _train(parallelize(make(), plan)).losses
            for name, (_, plan, _) in cases.items()
            if "deferred" in name
        }
        return found, not_deferred

    for found, not_deferred in run_ranks(check, 4, timeout=580):
        for name, (differences, losses) in found.items():
            assert differences == [], name
            assert losses[-1] != losses[0], name
        for name, losses in not_deferred.items():
            assert found[name][1] == losses, name


@pytest.mark.parametrize(
    "shape", [(4, 1), pytest.param((4, 2), marks=pytest.mark.slow)], ids=["FSDP", "FSDP x TP + SP"]
)
def test_backward_gathers_over_the_ranks_of_reshard_after_forward(shape):
    """Both modes, to the bits of gathers over all ranks."""

    def check():
        mesh, found = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), []
        make = partial(llama, num_hidden_layers=1)
        expected = _train(parallelize(make(), _llama(mesh)))
        for mode in ("eager", "static"):
            model = parallelize(make(), _llama(mesh, reshard_after_forward=2), mode=mode)
            assert expected.differences(_train(model)) == []
            meshes = {
                name: group.all_gather.post_forward_mesh
                for name, module in model.named_modules()
                if isinstance(module, FSDPModule)
                for group in module._get_fsdp_state().groups
            }
            assert set(meshes) == {"", "model.layers.0"}
            found += [tuple(one.shape) for one in meshes.values()]
        return found

    for shapes in run_ranks(check, shape[0] * shape[1], timeout=300):
        assert set(shapes) == {(2, 2)}


@pytest.mark.slow
def test_replicas_of_flattened_axes_train_as_those_of_an_axis_of_their_own():
    """Parameters and norms bit for bit; neighbours of the four ranks are one replica either way.

    Torch sums the loss along flattened axes at once, and so in another order.
    """

    def check():
        axes = ("replica", "dp")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
        trained = []
        for mode, options in (
            ("eager", {}),
            ("eager", {"flat": True, "replicate": 2}),
            ("static", {"flat": True, "replicate": 2}),
        ):
            plan = zoo.llama(mesh, tp=None, dp=axes)
            for path in (LAYER, ""):
                plan.fully_shard(path, axes, Rows(2), **options)
            trained.append(_train(parallelize(llama(), plan, mode=mode)))
        expected, *flat = trained
        for one in flat:
            assert set(one.differences(expected)) <= {"losses"}
            assert one.losses == pytest.approx(expected.losses, abs=1e-6, rel=0)
        assert expected.losses[-1] != expected.losses[0]

    run_ranks(check, 4, timeout=180)


def test_the_guard_casts_inputs_and_outputs_as_mixed_precision_does():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan(mesh).shard("<in>", Shard(0), "dp").annotate("<out>", Shard(0), "dp")
        plan.annotate(r".*\.grad", Partial(), "dp").fully_shard("", "dp", mp_policy=policy)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        model, seen = parallelize(model, plan, mode="static", guard_steps=1), []
        model[0].register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
        out = model(torch.randn(4, 4))
        out.to_local().sum().backward()
        return seen, out.dtype, {param.grad.dtype for param in model.parameters()}

    for seen, dtype, of_grads in run_ranks(check, 2):
        assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
        assert len(seen) == 2  # in the check, and in the call itself
        assert dtype == torch.float32
        assert of_grads == {torch.float32}


@pytest.mark.parametrize("shape", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_no_operator_takes_a_dtensor_and_modules_have_plain_parameters_while_they_run(shape):
    """In forward, backward, optimizer and zero_grad of three steps; in Eager hundreds do."""

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        counted, are_dtensors = {}, {}
        for mode in ("eager", "static"):
            model = parallelize(llama(), _llama(mesh), mode=mode, guard_steps=0)
            module, seen = model.model.layers[0].mlp.down_proj, are_dtensors.setdefault(mode, [])
            module.register_forward_hook(
                lambda own, _, __, seen=seen: seen.append(isinstance(own.weight, DTensor))
            )
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                with DTensorOperators() as operators:
                    models.token_loss(model).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            counted[mode] = operators.counts
            between_steps = (module.weight, optimizer.state[module.weight]["exp_avg"])
            assert all(isinstance(tensor, DTensor) for tensor in between_steps)
        return counted, are_dtensors

    for counted, are_dtensors in run_ranks(check, math.prod(shape), timeout=580):
        assert counted["static"] == {}
        assert counted["eager"].total() > 500
        assert are_dtensors == {"eager": [True] * 3, "static": [False] * 3}


@pytest.mark.parametrize(
    ("shape", "accumulating"),
    [((1, 2), (2, 1)), pytest.param((2, 2), (2, 2), marks=pytest.mark.slow)],
    ids=["2 ranks", "4 ranks"],
)
def test_the_guard_refuses_a_wrong_gradient_and_changes_nothing(shape, accumulating):
    """Between microbatches, too: gradients that are accumulated stay as they are."""

    def wrong(mesh):
        """The gradient of a norm that sequence parallelism makes Partial."""
        norm = rf"{LAYER}\.input_layernorm\.weight\.grad"
        return _llama(mesh).annotate(norm, Replicate(), "tp")

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        with pytest.raises(
            StaticError, match=r"gradient of model.layers.0.input_layernorm"
        ) as error:
            models.token_loss(parallelize(llama(), wrong(mesh), mode="static"))
        mesh, ends = init_device_mesh("cpu", accumulating, mesh_dim_names=("dp", "tp")), []
        for checks in (False, True):
            model = parallelize(llama(), _llama(mesh), mode="static", guard_steps=0)
            torch.manual_seed(1)
            batch = torch.randint(0, models.VOCABULARY, (4, 8))
            for number in range(3):
                model.set_requires_gradient_sync(number == 2)
                model(input_ids=batch, labels=batch).loss.backward()
                if checks:
                    assert installed(model).check(input_ids=batch, labels=batch) == ()
            assert all(isinstance(param, DTensor) for param in model.parameters())
            grads = {name: param.grad.to_local() for name, param in model.named_parameters()}
            ends.append(grads)
            after = _train(model)
            ends.append(after.params)
        return error.value.site, [
            name
            for one, other in zip(ends[:2], ends[2:], strict=True)
            for name in one
            if not one[name].equal(other[name])
        ]

    for site, unlike in run_ranks(check, math.prod(shape), timeout=580):
        assert site == "model.layers.0.input_layernorm.weight"
        assert unlike == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
def test_a_generated_plan_applies_fully_shard(shape):
    """Generated on FakeTensors, from a model that takes no memory."""

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        plan = _llama(mesh)
        batch = torch.randint(0, models.VOCABULARY, (4, 8))
        inputs = {"input_ids": batch, "labels": batch}
        make = partial(llama, num_hidden_layers=2 if shape == (2, 2) else 1)
        static = generate_static(plan, make(), inputs, fake=True)
        eager = parallelize(make(), plan)
        with pytest.raises(ValueError, match="expected a model before fully_shard"):
            generate_static(plan, eager, inputs, fake=True)
        return _train(eager).differences(_train(parallelize(make(), static, mode="static")))

    ranks = math.prod(shape)
    assert run_ranks(check, ranks, timeout=580) == [[]] * ranks


def test_a_model_on_meta_trains_after_its_parameters_are_loaded():
    """Also where they are other objects than before, are replaced, or get another dtype."""

    def train(model, optimizer):
        for _ in range(3):
            model(torch.ones(4, 4, dtype=model.up.weight.dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().to_local() for param in model.parameters()]

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = Plan(mesh).shard("<in:x>", [Replicate(), Replicate()])
        plan.shard(r"up\.(weight|bias)", Shard(0), "tp").fully_shard("", "dp")
        plan.redistribute("up.<out>", Shard(1), Replicate(), "tp", grad_src=Replicate())
        ends = []
        for mode in ("eager", "static"):
            state = parallelize(TwoLinears(), plan, mode=mode).state_dict()
            with torch.device("meta"):
                model = TwoLinears()
            parallelize(model, plan, mode=mode)
            model.load_state_dict(state, assign=True)
            model.up.weight = torch.nn.Parameter(model.up.weight.detach().clone() * 2)
            ends += train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
            model.double()
            ends += train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        half = len(ends) // 2
        return [one.equal(other) for one, other in zip(ends[:half], ends[half:], strict=True)]

    assert all(map(all, run_ranks(check, 4, timeout=580)))


def test_both_modes_gather_and_reduce_the_same():
    """In kind, order and bytes, in each step; prefetches, which the first step lacks, included."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = zoo.llama(mesh, tp=None, dp="dp").fully_shard(LAYER, "dp").fully_shard("", "dp")
        sent = []
        for mode in ("eager", "static"):
            model = parallelize(llama(), plan, mode=mode, guard_steps=0)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                with CommLog() as log:
                    models.token_loss(model).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                sent.append([(call.op, call.input_bytes, call.output_bytes) for call in log.calls])
        return sent

    for first, second, static_first, static_second in run_ranks(check, 2, timeout=300):
        assert len(second) >= 3 * 3  # of two layers and the root: two gathers, one reduction
        assert static_first == first
        assert static_second == second
