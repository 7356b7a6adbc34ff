"""FSDP gathers weights as operands: a quarter of the bytes, the bits of quantizing them later."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import fsdp
from plan_api import (
    MXFP8,
    Float8Block,
    Float8Rowwise,
    Float8Tensorwise,
    GatheredOperand,
    use_low_precision,
)
from plan_api.ops.low_precision.graph_products import multiply_in_graph
from plan_api.ops.low_precision.products import choose_kernels, multiply
from plan_api.ops.low_precision.quantize import amax_of, quantize, scales_of
from plan_api.ops.low_precision.weights import QuantizedWeight
from testkit import CommLog, run_ranks

RECIPES = (
    Float8Tensorwise(),
    Float8Rowwise(),
    Float8Block("reference", 16),
    MXFP8("reference"),
)
FEATURES = 256  # so that padding and scales are few beside the elements


class Pair(nn.Module):
    """Two linear layers, recomputed in backward or not."""

    def __init__(self, features, recomputes):
        super().__init__()
        self.up = nn.Linear(features, 2 * features)
        self.down = nn.Linear(2 * features, features, bias=False)
        self._recomputes = recomputes

    def forward(self, x):
        if self._recomputes:
            return checkpoint(self._run, x, use_reentrant=False)
        return self._run(x)

    def _run(self, x):
        return self.down(torch.tanh(self.up(x)))


def _net(features=64, recomputes=False):
    torch.manual_seed(1)
    return nn.Sequential(*(Pair(features, recomputes) for _ in range(2)))


def _operands(recipe):
    return lambda param: GatheredOperand(recipe) if param.ndim == 2 else None


def _sharded(recipe, gathered, model, **options):
    use_low_precision(model, ".*", recipe)
    if gathered:
        options["quantize_fn"] = _operands(recipe)
    for pair in model:
        fsdp.fully_shard(pair, **options)
    return fsdp.fully_shard(model, **options)


def _step(model, x, amp=False):
    """The output, and gradients of a batch that differs by rank."""
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        y = model(x)
    y.float().sin().sum().backward()
    grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    return {"y": y.detach(), **grads}


def _batch(features=64):
    torch.manual_seed(3 + dist.get_rank())
    return torch.randn(2, 5, features)


def _assert_same_bits(recipe, found, expected):
    assert not [name for name in expected if not found[name].equal(expected[name])], recipe


# Whose gathered weights have the same dtype.
LAYOUTS = (
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    {"shard_placement_fn": lambda param: fsdp.Rows(32) if param.ndim == 2 else None},
)
BFLOAT16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


@pytest.mark.ranks
def test_gathered_operands_have_the_bits_of_quantizing_gathered_weights():
    def check():
        x = _batch()
        for recipe in RECIPES:
            expected = _step(_sharded(recipe, False, _net()), x)
            for options in LAYOUTS:
                _assert_same_bits(
                    recipe, _step(_sharded(recipe, True, _net(), **options), x), expected
                )
            recomputing = _sharded(recipe, True, _net(recomputes=True))
            _assert_same_bits(recipe, _step(recomputing, x), expected)
            for options, amp in ((BFLOAT16, False), ({}, True)):
                expected, found = (
                    _step(_sharded(recipe, gathered, _net(), **options), x, amp)
                    for gathered in (False, True)
                )
                _assert_same_bits(recipe, found, expected)

    run_ranks(check, 2, timeout=240)


@pytest.mark.ranks
@pytest.mark.slow
def test_gathered_operands_have_the_same_bits_on_four_ranks():
    def check():
        x, mesh = _batch(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for recipe in RECIPES:
            layouts = [{}, {"mesh": mesh}]
            if not GatheredOperand(recipe).differs_in_backward:
                layouts.append({"reshard_after_forward": 2})
            for options in layouts:
                expected, found = (
                    _step(_sharded(recipe, gathered, _net(), **options), x)
                    for gathered in (False, True)
                )
                _assert_same_bits(recipe, found, expected)
        rowwise = GatheredOperand(Float8Rowwise())
        with pytest.raises(ValueError, match="backward gathers other bytes"):
            fsdp.fully_shard(
                nn.Linear(32, 32, bias=False),
                quantize_fn=lambda param: rowwise,
                reshard_after_forward=2,
            )

    run_ranks(check, 4, timeout=240)


@pytest.mark.ranks
def test_a_quarter_of_the_bytes_is_gathered_in_forward_and_in_backward():
    def check():
        x, ratios = _batch(FEATURES), {}
        for reshard in (True, False):
            for recipe in RECIPES:
                sent = []
                for gathered in (False, True):
                    model = _sharded(
                        recipe, gathered, _net(FEATURES), reshard_after_forward=reshard,
                        strategy="native",
                    )  # fmt: skip
                    with CommLog() as forward:
                        y = model(x)
                    with CommLog() as backward:
                        y.sum().backward()
                    # The first all-reduce compares the ranks' plans.
                    maxima = [c for c in forward.calls if c.op == "all_reduce"][1:]
                    maxima += [c for c in backward.calls if c.op == "all_reduce"]
                    sent.append(
                        (
                            forward.wire_bytes("all_gather"),
                            backward.wire_bytes("all_gather"),
                            sum(call.input_bytes for call in maxima),
                        )
                    )
                plain, own = sent
                fp32 = 2 * plain[0] if reshard else plain[0]
                assert plain[0] + plain[1] == fp32
                assert own[0] + own[2] <= 0.27 * plain[0], recipe
                if reshard:
                    assert sum(own) <= 0.27 * fp32, recipe
                ratios[recipe.name, reshard] = own[1] / plain[0]
        return ratios

    for ratios in run_ranks(check, 2, timeout=240):
        for recipe in ("float8-tensorwise", "float8-block"):
            assert ratios[recipe, False] == 0  # what forward gathered is used again
        for recipe in ("float8-rowwise", "mxfp8"):
            assert 0.2 < ratios[recipe, False] <= 0.27  # what backward needs beside it


@pytest.mark.ranks
def test_other_operators_dequantize_and_memory_is_freed():
    def check():
        for recipe in RECIPES:
            model = _sharded(recipe, True, _net(), reshard_after_forward=True)
            group = model[0]._get_fsdp_state().groups[0]
            expected = model[0].up.weight.full_tensor()
            model[0].unshard()
            weight = model[0].up.weight
            assert isinstance(weight, QuantizedWeight)
            scaling = recipe.output.right
            once = quantize(expected, scaling, scales_of(amax_of(expected, scaling), scaling))
            assert torch.equal(weight + 0, once.dequantized())
            model[0].reshard()
            with pytest.raises(RuntimeError, match="got sharded parameters"):
                weight + 0
            memories = [
                memory
                for operand in group.all_gather._operands.values()
                for memory in operand._memory.values()
            ]
            assert memories
            assert not any(memory.bytes.untyped_storage().size() for memory in memories)

    run_ranks(check, 2)


@pytest.mark.ranks
def test_graphs_find_the_operands_by_the_key_of_a_weight():
    """An operand that is not gathered yet is gathered where its product runs."""

    def check():
        for recipe in RECIPES:
            model = _sharded(recipe, True, _net(), reshard_after_forward=True)
            model[0].unshard()
            weight = model[0].up.weight.detach()
            _, context = weight.__tensor_flatten__()
            in_graph = QuantizedWeight.__tensor_unflatten__(
                {"key": weight.key.clone()}, context, weight.shape, weight.stride()
            )
            assert torch.equal(in_graph * 1, weight * 1)
            assert torch.equal(in_graph.t() * 1, weight.t() * 1)
            for is_gradient in (True, False):
                operands = recipe.grad_input if is_gradient else recipe.output
                tokens = torch.randn(32, weight.shape[0 if is_gradient else 1])
                scales = scales_of(amax_of(tokens, operands.left), operands.left)
                left = quantize(tokens, operands.left, scales)
                kernels = choose_kernels("", recipe, "cpu")
                found = multiply_in_graph(
                    left, in_graph, torch.float32, kernels, is_gradient=is_gradient
                )
                right = weight.of_grad_input() if is_gradient else weight.of_output()
                assert torch.equal(found, multiply(left, right, torch.float32, kernels))
            model[0].reshard()
            with pytest.raises(RuntimeError, match="got sharded parameters"):
                multiply_in_graph(left, in_graph, torch.float32, kernels, is_gradient=False)

    run_ranks(check, 2)


@pytest.mark.ranks
def test_frozen_weights_are_gathered_as_operands():
    def check():
        x = _batch().requires_grad_()
        for recipe in RECIPES:
            found = []
            for gathered in (False, True):
                model = _net()
                for pair in model:
                    pair.up.requires_grad_(False)
                model = _sharded(recipe, gathered, model)
                x.grad = None
                model(x).sin().sum().backward()
                assert model[0].up.weight.grad is None
                found.append((x.grad, model[0].down.weight.grad.full_tensor()))
            assert all(one.equal(other) for one, other in zip(*found, strict=True)), recipe

    run_ranks(check, 2)


@pytest.mark.ranks
def test_what_operands_cannot_be_is_refused():
    def check():
        block = GatheredOperand(Float8Block("reference", 16))
        rows = GatheredOperand(Float8Rowwise())
        for model, options, message in (
            (nn.Linear(32, 32), {"quantize_fn": lambda param: block}, "a torch.float32 of"),
            (
                nn.Linear(32, 32, bias=False),
                {"quantize_fn": lambda p: block, "shard_placement_fn": lambda p: fsdp.Rows(8)},
                r"Rows\(16\)",
            ),
            (
                nn.Linear(32, 32, bias=False),
                {"quantize_fn": lambda param: rows, "placements": "zero2"},
                "quantizes them for each all-gather",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                fsdp.fully_shard(model, **options)
        with pytest.raises(ValueError, match="recipe: expected"):
            GatheredOperand("float8")

    run_ranks(check, 1)


class Tied(nn.Module):
    """A linear layer, of whose weight another operator takes the elements."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 64)

    def forward(self, x):
        return self.linear(x).sin() + self.linear.weight.square().sum()


@pytest.mark.ranks
@pytest.mark.slow  # torch.compile takes seconds
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be")
def test_graphs_have_the_bits_of_eager_products_and_layers_share_one():
    """Operands of backward do not exist in forward; the last module dequantizes its weight, too."""

    def run(backend):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), Tied())
        use_low_precision(model, ".*", Float8Rowwise())
        for module in model:
            fsdp.fully_shard(
                module, quantize_fn=_operands(Float8Rowwise()), reshard_after_forward=True
            )
            if backend is not None:
                module.forward = torch.compile(module.forward, backend=backend, fullgraph=True)
        fsdp.fully_shard(model)
        x = _batch(32).requires_grad_()
        found = _step(model, x) | {"x": x.grad}
        weight = model[0].weight
        with torch.no_grad():
            weight.mul_(2.0)
        x.grad = None
        return found, _step(model, x) | {"x": x.grad}

    def check():
        backend = CompileCounterWithBackend("aot_eager")
        for expected, found in zip(run(None), run(backend), strict=True):
            _assert_same_bits("graphs", found, expected)
        assert backend.frame_count == 2

    run_ranks(check, 1, timeout=240)
