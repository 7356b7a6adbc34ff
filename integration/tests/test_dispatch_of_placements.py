"""ragged-shard's placements through dtensor-rules' cache: what they give with torch's own dispatch.

Both runs are with ragged-shard; only one is with dtensor-rules. Compared are local tensors in bits,
placements, strides, errors and warnings, on real ranks; and once a call's plan is made, the cache
has to answer.
"""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dist_rng
import dtensor_rules
import ragged_shard
from ragged_shard import InterleavedShard, RaggedShard
from testkit import assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks


def operand(*shape):
    return ((torch.arange(torch.Size(shape).numel()).reshape(shape) * 37) % 17 - 8).float()


def seen(result):
    """What of a result is compared: tensors as local parts with their layout, the rest as it is."""
    if isinstance(result, (list, tuple)):
        return [seen(one) for one in result]
    if not isinstance(result, DTensor):
        return result
    local = result.to_local().detach()
    layout = (
        result.placements,
        result.shape,
        result.stride(),
        local.stride(),
        result.requires_grad,
    )
    return [local.clone(), layout]


def in_place(function, x):
    written = [x.clone(), x * 2]
    function(written)
    return written


OPERATORS = {
    "neg": torch.neg,
    "scalar": lambda x: 1 - x * 3,
    "sum of two": lambda x: x + x * 2,
    "clamp": lambda x: x.clamp(-2, 5),
    "where": lambda x: torch.where(x > 0, x, -x),
    "gelu": nn.functional.gelu,
    "to bf16": lambda x: x.to(torch.bfloat16),
    "like": lambda x: [torch.zeros_like(x), x.new_zeros(x.shape), torch.full_like(x, 3.0)],
    "in place": lambda x: x.clone().add_(x, alpha=2).mul_(2).addcmul_(x, x).zero_(),
    "out": lambda x: torch.mul(x, x, out=torch.empty_like(x)),
    "copy_": lambda x: torch.zeros_like(x).copy_(x),
    "foreach": lambda x: torch._foreach_mul([x, x * 2], [x, x]),
    "foreach in place": lambda x: in_place(lambda xs: torch._foreach_add_(xs, xs, alpha=2), x),
    "foreach norm": lambda x: torch._foreach_norm([x, x * 2]),
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "softmax": lambda x: x.softmax(1),
    "amax": torch.amax,
    "detached": lambda x: x.detach().clone().contiguous(),
    "product": lambda x: x @ operand_like(x).t(),
    "equal": lambda x: [torch.equal(x, x), torch.equal(x, x + 1)],
    "viewed": lambda x: x.view(12, 2, 4),
}


def operand_like(x):
    return DTensor.from_local(operand(6, 8), x.device_mesh, [Replicate()], run_check=False)


PLACEMENTS = {
    "rows": RaggedShard((0,), (5, 7)),
    "none on one rank": RaggedShard((0,), (0, 3)),
    "elements": RaggedShard((0, 1), (7, 89)),
    "one owner": RaggedShard.owned_by(1, 2),
    "interleaved": InterleavedShard(0, 3),
}


def outcome(function, *args):
    """A result as `seen`, or the error, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = seen(function(*args))
        except Exception as error:
            result = [type(error), str(error)]
    return [result, [(one.category, str(one.message)) for one in caught]]


def drawn(tensor):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without dist-rng the numbers are the rank's own
        return torch.rand_like(tensor)


def both(function, shape=(2,)):
    """What a function of a mesh gives without dtensor-rules and with it, in its third run."""
    # A test before this one may have left them on in these processes.
    dtensor_rules.disable()
    dist_rng.uninstall()
    mesh = init_device_mesh("cpu", shape)
    ragged_shard.reset_fallbacks()
    native, gathered = function(mesh), ragged_shard.fallbacks()
    with dtensor_rules.enabled():
        first = function(mesh)
        function(mesh)
        dtensor_rules.stats_clear()
        ragged_shard.reset_fallbacks()
        planned = function(mesh)
        stats = dtensor_rules.stats()
    for name in native:
        # The first run makes the plans; a warning comes once.
        assert_same(native[name][0], first[name][0], f"{name}, not cached")
        assert_same(native[name], planned[name], name)
    assert ragged_shard.fallbacks() == gathered
    return stats


def assert_same(expected, actual, what):
    if isinstance(expected, torch.Tensor):
        assert_bitwise(actual, expected, what)
    elif isinstance(expected, list):
        assert type(actual) is list, what
        assert len(actual) == len(expected), what
        for one, other in zip(expected, actual, strict=True):
            assert_same(one, other, what)
    else:
        assert actual == expected, what


# What ragged-shard does with plain tensors of asynchronous collectives, below DTensor; and
# torch.equal, whose all-reduce is torch's for placements that dtensor-rules does not know.
BELOW = {"subclass", "plain tensor"}
LEFT = {"aten.equal.default": {"unsupported"}}


def run_both(function, world_size=2, shape=(2,), left=LEFT):
    """On ranks: nothing is planned again in a third run, and the cache answers."""
    for stats in run_ranks(both, world_size, function, shape, timeout=240):
        assert {name: one.miss for name, one in stats.items() if one.miss} == {}
        reasons = {
            name: set(one.fallthrough) - BELOW
            for name, one in stats.items()
            if not name.startswith("DTensor.")  # methods are torch's for these placements
        }
        assert {name: why for name, why in reasons.items() if why} == left
        yield stats


def every_operator(placement, mesh):
    x = distribute_tensor(operand(12, 8), mesh, [placement])
    return {name: outcome(function, x) for name, function in OPERATORS.items()}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_operators(name):
    for stats in run_both(functools.partial(every_operator, PLACEMENTS[name])):
        for op in ("neg.default", "gelu.default", "_foreach_mul.List", "_foreach_norm.Scalar"):
            assert stats[f"aten.{op}"].cache > 0, op
        for op in ("add_.Tensor", "mul.out", "_foreach_add_.List"):
            assert stats[f"aten.{op}"].rule > 0, op


def mixed(mesh):
    """Operands that are brought to the ragged one, with collectives or without."""
    ragged = distribute_tensor(operand(12, 8), mesh, [RaggedShard((0,), (5, 7))])
    elements = distribute_tensor(operand(12, 8), mesh, [RaggedShard((0, 1), (5, 7))])
    replica = DTensor.from_local(operand(12, 8), mesh, [Replicate()], run_check=False)
    others = {
        "replica": replica,
        "shard": distribute_tensor(operand(12, 8), mesh, [Shard(1)]),
        "other units": distribute_tensor(operand(12, 8), mesh, [RaggedShard((0, 1), (1, 1))]),
        "sum": DTensor.from_local(operand(12, 8) / 2, mesh, [Partial()]),
        "row": DTensor.from_local(operand(8), mesh, [Replicate()], run_check=False),
        "scalar": torch.tensor(3.0),
    }
    found = {name: outcome(torch.add, ragged, other) for name, other in others.items()}
    found |= {f"elements {name}": outcome(torch.add, elements, x) for name, x in others.items()}
    found["in place on a replica"] = outcome(replica.add_, ragged)
    found["in place without a rule"] = outcome(torch.Tensor.cumsum_, elements, 0)
    found["random"] = outcome(torch.Tensor.random_, elements, 9)
    found["drawn on shards"] = outcome(drawn, ragged)
    with ragged_shard.strict():
        found["gathers"] = outcome(torch.add, elements, others["row"])
    return found


def test_operands_of_several_kinds():
    for stats in run_both(mixed, left={}):
        assert stats["aten.add.Tensor"].cache > 10


class Block(nn.Module):
    """A fused projection, its parts put to use, and a way back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = linear(x, self.qkv).chunk(3, -1)
        q, k, v = (part.view(*part.shape[:2], 4, 2).transpose(1, 2) for part in (q, k, v))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return linear(mixed.transpose(1, 2).reshape(x.shape), self.out)


def linear(x, module):
    """The module's product; ragged parameters are gathered for it, as FSDP does."""
    whole = [Replicate()] * x.device_mesh.ndim
    weight, bias = (
        p.redistribute(placements=whole) if any(map(is_ragged, p.placements)) else p
        for p in (module.weight, module.bias)
    )
    return nn.functional.linear(x, weight, bias)


def is_ragged(placement):
    return isinstance(placement, RaggedShard)


def trained(mesh, place, steps=3, **options):
    """A block's losses, gradients and parameters under AdamW, each as `seen`."""
    block = Block()
    for module in (block.qkv, block.out):
        for name, value in list(module.named_parameters()):
            placed = distribute_tensor(value.detach(), mesh, place(module is block.qkv, name))
            module.register_parameter(name, nn.Parameter(placed))
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1, **options)
    whole = [Replicate()] * mesh.ndim
    x = DTensor.from_local(operand(2, 6, 8) / 8, mesh, whole, run_check=False)
    found = {}
    for step in range(steps):
        loss = block(x).square().sum()
        loss.backward()
        for parameter in block.parameters():
            norm = outcome(nn.utils.clip_grad_norm_, [parameter], 1.0)
            found[f"norm {len(found)}"] = norm
        tensors = [loss, *(p.grad for p in block.parameters()), *block.parameters()]
        found[f"step {step}"] = outcome(lambda tensors=tensors: tensors)
        optimizer.step()
        optimizer.zero_grad()
    return found


def interleaved(fused, name):
    if fused:
        return [InterleavedShard(0, 3)]
    return [Shard(1) if name == "weight" else Replicate()]


def ragged(fused, name):
    return [RaggedShard((0,), (1, 3))]


def hybrid(fused, name):
    return [Replicate(), RaggedShard((0,), (3, 1))]


PLACES = {"interleaved": (interleaved, (2,)), "ragged": (ragged, (2,)), "hybrid": (hybrid, (2, 2))}


@pytest.mark.parametrize(
    ("place", "shape", "how"),
    [
        pytest.param(
            *PLACES[name],
            how,
            id=f"{name}-{how}",
            # How AdamW steps and where its parameters are do not depend on each other.
            marks=[] if how == "foreach" else [pytest.mark.slow],
        )
        for name in PLACES
        for how in ("foreach", "fused")
    ],
)
def test_training(place, shape, how):
    train = functools.partial(trained, place=place, **{how: True})
    for stats in run_both(train, 2 * len(shape), shape, left={}):
        assert stats["aten.addmm.default"].cache > 0
