"""Linear layers of a plan in low precision have the bits of one device, but for sums over ranks."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import (
    MXFP8,
    Float8Block,
    Float8Rowwise,
    Float8Tensorwise,
    Plan,
    installed,
    parallelize,
    quantize_weights,
    use_low_precision,
    zoo,
)
from testkit import CommLog, models, run_ranks

RECIPES = (
    Float8Tensorwise(),
    Float8Rowwise(),
    Float8Block("reference", 16),
    MXFP8("reference"),
)
ALL_BUT_THE_HEAD = r"(?!lm_head$).*"
R, P = Replicate(), Partial()
quiet = pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one")


def _llama():
    model = models.llama(num_attention_heads=4, num_key_value_heads=4)
    models.reinitialize(model, 1)
    return model


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _gradients(model):
    return {name: _full(param.grad) for name, param in model.named_parameters()}


def _data_parallel(recipe, mode, ids, options=None, modules=()):
    """The loss and gradients of a LLaMA, of a batch sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    plan = zoo.llama(mesh, tp=None, dp="dp").precision(ALL_BUT_THE_HEAD, recipe)
    for path in modules:
        plan.fully_shard(path, "dp", **options or {})
    model = parallelize(_llama(), plan, mode=mode)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return _full(loss), _gradients(model)


def _microbatches(recipe, ids, order):
    """Gradients of one device for each microbatch, and their sum in an order."""
    of_each = []
    for part in ids.chunk(dist.get_world_size()):
        model = _llama()
        use_low_precision(model, ALL_BUT_THE_HEAD, recipe)
        (model(input_ids=part, labels=part).loss / dist.get_world_size()).backward()
        of_each.append(_gradients(model))
    return {name: order([one[name] for one in of_each]) for name in of_each[0]}


def _ids(samples):
    torch.manual_seed(5)
    return torch.randint(0, models.VOCABULARY, (samples, 8))


def _assert_equal(found, expected):
    different = [name for name, one in expected.items() if not torch.equal(found[name], one)]
    assert not different


@pytest.mark.ranks
@pytest.mark.slow
@quiet
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_four_ranks_have_the_bits_of_accumulated_microbatches_in_each_layout(mode):
    """The order of a sum is that of the layout: of all ranks, or of pairs of ranks in HSDP."""
    from fsdp import Rows

    layers = (r"model\.layers\.\d+", "")

    def check():
        ids = _ids(8)
        for recipe in RECIPES:
            in_order = _microbatches(recipe, ids, sum)
            losses = []
            for modules, options in (
                (("",), {}),
                (layers, {}),
                (layers, {"granularity": Rows(4)}),
                (layers, {"reshard_after_forward": False}),
                (layers, {"placements": "zero2"}),
                (layers, {"placements": "zero1"}),
                (layers, {"placements": "ddp"}),
            ):
                loss, found = _data_parallel(recipe, mode, ids, options, modules)
                _assert_equal(found, in_order)
                losses.append(loss)
            in_pairs = _microbatches(recipe, ids, lambda each: sum(each[:2]) + sum(each[2:]))
            loss, hsdp = _data_parallel(recipe, mode, ids, {"replicate": 2}, layers)
            _assert_equal(hsdp, in_pairs)
            other_loss, ddp = _data_parallel(recipe, mode, ids)
            for name, one in in_order.items():  # all-reduces of gloo have orders of their own
                torch.testing.assert_close(ddp[name], one, rtol=0, atol=1e-6 * one.abs().max())
            assert len({loss.item() for loss in (*losses, loss, other_loss)}) == 1

    run_ranks(check, 4, timeout=400)


class Pair(nn.Module):
    """Two linear layers: the first sharded by its outputs, the second by its inputs."""

    def __init__(self, features):
        super().__init__()
        self.up, self.down = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)

    def forward(self, x):
        return self.down(self.up(x))


def _pair(features=32):
    torch.manual_seed(1)
    return Pair(features)


def _data(samples, tokens, features=32):
    torch.manual_seed(0)
    return torch.randn(samples, tokens, features), torch.randn(samples, tokens, features)


@pytest.mark.ranks
@quiet
def test_data_parallel_gradients_have_the_bits_of_accumulated_microbatches():
    layouts = (("eager", ()), ("static", ("",)), ("static", ("up", "down", "")))

    def gradients(model, x, grad):
        y = model(x)
        (y.to_local() if isinstance(y, DTensor) else y).backward(grad)
        return _gradients(model)

    def check():
        mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dist.get_rank()
        x, grad = _data(4, 20)
        for recipe in RECIPES:
            model = _pair()
            use_low_precision(model, ".*", recipe)
            for part in zip(x.chunk(2), grad.chunk(2), strict=True):
                expected = gradients(model, *part)
            for mode, modules in layouts:
                plan = Plan(mesh).redistribute("<in>", R, Shard(0)).precision(".*", recipe)
                plan.annotate(r".*\.grad", P)
                for path in modules:
                    plan.fully_shard(path, "dp")
                model = parallelize(_pair(), plan, mode=mode, guard_steps=0)
                _assert_equal(gradients(model, x, grad.chunk(2)[rank]), expected)

    run_ranks(check, 2, timeout=240)


def _gather_of_pair(recipe, mode, options):
    """Gradients, the bytes that forward gathers, and the values of parameters."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = mesh.get_local_rank("dp")
    plan = Plan(mesh)
    plan.redistribute("<in>", R, Shard(0), "dp").precision(".*", recipe)
    plan.annotate(r".*\.grad", P, "dp")
    for path in ("up", "down", ""):
        plan.fully_shard(path, "dp", **options)
    model = parallelize(_pair(), plan, mode=mode, guard_steps=0)
    x, grad = _data(4, 20)
    with CommLog() as log:
        y = model(x)
    (y.to_local() if isinstance(y, DTensor) else y).backward(grad.chunk(2)[rank])
    sent = sum(call.input_bytes for call in log.calls if call.op in ("send", "all_gather"))
    return _gradients(model), sent, installed(model).lowered.shard_values


@pytest.mark.ranks
@quiet
def test_weights_are_gathered_as_operands_where_granularities_keep_their_blocks():
    from fsdp import Block, Rows

    def check():
        for mode in ("eager", "static"):
            for recipe in RECIPES:
                grads, sent, values = _gather_of_pair(recipe, mode, {})
                assert {name: str(one) for name, one in values.items()} == {
                    f"{name}.weight": f"operand={recipe}" for name in ("up", "down")
                }
                # Rows of 31 elements split rows of 32 and of 64.
                plain, plainly_sent, values = _gather_of_pair(
                    recipe, mode, {"granularity": Block(31)}
                )
                assert all(one.operand is None for one in values.values())
                _assert_equal(grads, plain)
                # Weights of 4096 elements, beside biases of 96 and scales of few elements.
                assert sent < 0.45 * plainly_sent
            values = _gather_of_pair(RECIPES[2], mode, {"granularity": Rows(16)})[2]
            assert values["up.weight"].operand == RECIPES[2]

    run_ranks(check, 2, timeout=240)


def _traffic_of_pair(recipe, mode, options, backend=None):
    """Gradients; bytes sent by forward's gathers, by those in bytes, and by all-reduces; forms."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_local_rank("dp")
    plan = _pair_plan(mesh).redistribute("<in>", R, Shard(0), "dp").precision(".*", recipe)
    plan.annotate(r".*\.grad", P, "dp")
    for path in ("up", "down"):
        plan.fully_shard(path, "dp", reshard_after_forward=True, **options)
        if backend is not None:
            plan.compile(path, backend)
    model = parallelize(_pair(256), plan, mode=mode, guard_steps=0, use=())
    x, grad = _data(4, 20, 256)
    y = model(x)  # compares plans, and compiles, which have calls of their own
    (y.to_local() if isinstance(y, DTensor) else y).backward(grad.chunk(2)[rank])
    model.zero_grad()
    with CommLog() as forward:
        y = model(x)
    with CommLog() as backward:
        (y.to_local() if isinstance(y, DTensor) else y).backward(grad.chunk(2)[rank])
    calls = [*forward.calls, *backward.calls]
    sent = (
        sum(one.input_bytes for one in forward.calls if one.op in ("send", "all_gather")),
        sum(one.input_bytes for one in calls if one.op == "send" and one.dtype == "uint8"),
        sum(one.input_bytes for one in calls if one.op == "all_reduce"),
    )
    values = {str(one) for one in installed(model).lowered.shard_values.values()}
    return _gradients(model), sent, values


@pytest.mark.ranks
@pytest.mark.slow
@quiet
def test_weights_that_tensor_parallelism_shards_are_gathered_as_operands():
    """Magnitudes are reduced over the ranks of both axes, of which the second has one scale."""
    from fsdp import Block

    def check():
        for mode in ("eager", "static"):
            for recipe in RECIPES:
                grads, sent, values = _traffic_of_pair(recipe, mode, {})
                assert values == {f"operand={recipe}"}
                plain, plainly_sent, _ = _traffic_of_pair(recipe, mode, {"granularity": Block(31)})
                _assert_equal(grads, plain)
                # Both passes gather; magnitudes are reduced by more all-reduces, or by fewer.
                more = max(0, sent[2] - plainly_sent[2])
                assert 0 < sent[1] + more <= 0.27 * 2 * plainly_sent[0], (recipe, sent)
                assert not plainly_sent[1]

    run_ranks(check, 4, timeout=240)


@pytest.mark.ranks
@pytest.mark.slow
@quiet
def test_compiled_modules_gather_the_operands_and_have_the_bits_of_eager_ones():
    from fsdp import Block

    def check():
        for mode in ("eager", "static"):
            for recipe in RECIPES:
                torch._dynamo.reset()
                grads, sent, values = _traffic_of_pair(recipe, mode, {}, "aot_eager")
                assert values == {f"operand={recipe}"}
                expected, eager_sent, _ = _traffic_of_pair(recipe, mode, {})
                _assert_equal(grads, expected)
                assert sent == eager_sent
                _, plainly_sent, _ = _traffic_of_pair(recipe, mode, {"granularity": Block(31)})
                more = max(0, sent[2] - plainly_sent[2])
                assert 0 < sent[1] + more <= 0.27 * 2 * plainly_sent[0], (recipe, sent)

    run_ranks(check, 4, timeout=400)


@pytest.mark.ranks
@pytest.mark.slow
@quiet
def test_operands_of_sharded_weights_have_the_bits_of_tensor_parallelism_alone():
    """The largest element is on one rank; gathers of both orders of magnitudes find it."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x, grad = _data(4, 20)
        for recipe in RECIPES:
            found = []
            for mode, modules in (("eager", ()), ("eager", ("up", "down")), ("static", ("",))):
                plan = _pair_plan(mesh).precision(".*", recipe)
                for path in modules:
                    plan.fully_shard(path, "dp")
                model = _pair()
                with torch.no_grad():
                    model.up.weight[-1, -1] = model.down.weight[-1, -1] = 9.0
                model = parallelize(model, plan, mode=mode, guard_steps=0)
                y = model(x)
                y = y.to_local() if isinstance(y, DTensor) else y
                y.backward(grad)
                found.append({"y": y.detach(), **_gradients(model)})
            for one in found[1:]:
                _assert_equal(one, found[0])

    run_ranks(check, 4, timeout=240)


def _pair_plan(mesh):
    plan = Plan(mesh)
    plan.shard(r"up\.(weight|bias)", Shard(0), "tp").shard(r"down\.weight", Shard(1), "tp")
    plan.redistribute("up.<in>", R, R, "tp", grad_src=P, grad_dst=R)
    plan.redistribute("down.<out>", P, R, "tp")
    return plan.redistribute(r"down\.bias", R, P, "tp")


# Bytes of the all-reduces that scales add to forward and backward.
_OF_SCALES = {
    # The first layer's weight, the second one's input and weight; the first one's gradient.
    "float8-tensorwise": ([4, 8], [4]),
    # The second layer's 120 tokens and 32 rows; the first one's 120 tokens and 32 columns.
    "float8-rowwise": ([608], [608]),
    "float8-block": ([], []),
    "mxfp8": ([], []),
}


def _run_pair(recipe, mode, mesh):
    """Output, gradients and the bytes of all-reduces in forward and in backward."""
    model, (x, grad) = _pair(), _data(3, 40)
    if mode == "one device":
        use_low_precision(model, ".*", recipe)
    else:
        plan = _pair_plan(mesh)
        if recipe is not None:
            plan.precision(".*", recipe)
        parallelize(model, plan, mode=mode, guard_steps=0, use=("fused-comm",))
    if mode == "static":
        assert not installed(model).check(x)
    x.requires_grad_()
    with CommLog() as forward:
        y = model(x)
    with CommLog() as backward:
        y = y.to_local() if isinstance(y, DTensor) else y
        y.backward(grad)
    logs = forward.calls, backward.calls
    assert not {call.op for log in logs for call in log} - {"all_reduce"}
    values = {"y": y.detach(), "x": _full(x.grad), **_gradients(model)}
    return values, [Counter(call.input_bytes for call in log) for log in logs]


@pytest.mark.ranks
@quiet
def test_tensor_parallel_scales_are_reduced_once_and_are_those_of_one_device():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for recipe in RECIPES:
            one, _ = _run_pair(recipe, "one device", mesh)
            values = []
            for mode in ("eager", "static"):
                value, bytes_ = _run_pair(recipe, mode, mesh)
                _, without = _run_pair(None, mode, mesh)
                values.append(value)
                found[recipe.name, mode] = [a - b for a, b in zip(bytes_, without, strict=True)]
            _assert_equal(values[1], values[0])
            for name, expected in one.items():
                within = {"rtol": 0, "atol": 2e-6 * expected.abs().max()}
                torch.testing.assert_close(values[0][name], expected, **within)
        return found

    for found in run_ranks(check, 2, timeout=240):
        for (recipe, _), bytes_ in found.items():
            assert bytes_ == [Counter(one) for one in _OF_SCALES[recipe]]


@pytest.mark.ranks
@quiet
def test_ranks_of_a_fused_projection_share_the_scale_of_its_weight():
    """Its shard is no Shard of torch; the weight's largest element is on one rank."""
    from ragged_shard import InterleavedShard

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = []
        for mode in (None, "eager", "static"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 12))
            with torch.no_grad():
                model[0].weight[-1, -1] = 9.0
            if mode is None:
                use_low_precision(model, "0", Float8Tensorwise())
            else:
                plan = Plan(mesh).shard(r"0\.(weight|bias)", InterleavedShard(0, 3), "tp")
                plan.shard("<in:input>", R, "tp").precision("0", Float8Tensorwise())
                parallelize(model, plan, mode=mode, guard_steps=0)
            out = model(torch.arange(32.0).view(4, 8))
            out = out.to_local() if isinstance(out, DTensor) else out
            out.sum().backward()
            grad = next(model.parameters()).grad
            found.append((out.detach(), grad.to_local() if isinstance(grad, DTensor) else grad))
        return found

    for rank, (one, *others) in enumerate(run_ranks(check, 2)):
        expected = one[0].view(4, 3, 2, 2)[:, :, rank].reshape(4, 6)
        grad = one[1].view(3, 2, 2, 8)[:, rank].reshape(6, 8)
        for out, own_grad in others:
            assert torch.equal(out, expected)
            assert torch.equal(own_grad, grad)


def test_weights_are_quantized_once_and_not_if_other_modules_have_them():
    first, second, table = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8)
    second.weight = first.weight
    model = nn.ModuleDict({"first": first, "second": second, "table": table})
    quantized = quantize_weights(model, "first|second", Float8Tensorwise())
    assert list(quantized) == ["first.weight"]
    error = (quantized["first.weight"].dequantized() - first.weight).abs().max()
    assert 0 < error <= first.weight.abs().max() / 16  # half a step of three bits
    with pytest.raises(ValueError, match=r"got that of first, which another module has as first"):
        quantize_weights(model, "first", Float8Tensorwise())
    table.weight = first.weight
    with pytest.raises(ValueError, match=r"got that of first, which another module has"):
        quantize_weights(model, "first|second", Float8Tensorwise())
