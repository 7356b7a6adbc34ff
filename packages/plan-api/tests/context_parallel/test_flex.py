"""FlexAttention of a rank's blocks: the numbers of tiles, on the CPU by torch's operators."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from plan_api import AttentionMask
from plan_api.context_parallel import AttentionCall, AttentionTile, SequenceSharding, TokenOrder
from plan_api.context_parallel.kernels import AttentionOutput, TileOptions, selection
from plan_api.context_parallel.kernels.cuda import CudaEfficient, CudaFlash
from plan_api.context_parallel.kernels.flex import Flex
from plan_api.context_parallel.kernels.operators import Operators
from plan_api.context_parallel.methods import block_attention
from plan_api.context_parallel.methods.block_attention import Block, BlockBackward, BlockForward
from plan_api.context_parallel.tiles import block_tiles

slow = pytest.mark.slow
BATCH, LENGTH, SCALE = 2, 300, 0.3
DOCUMENTS = AttentionMask.of_lengths([170, 30, 100])
MASKS = {
    "causal": AttentionMask(causal=True),
    "window": AttentionMask(causal=True, window=40),
    "window of documents": AttentionMask(window=25)
    & AttentionMask.of_lengths([170, 30, 100], causal=False),
    "documents and padding of each row": DOCUMENTS & AttentionMask(tokens=((0, 290), (20, 300))),
}


def attention_of_a_rank(mask, order, rank, tensors, upstream=None):
    """Returns the output of a rank's queries, and gradients if there is an upstream one.

    The blocks are those of the ranks, as the ring receives them, from the first key attended to.
    """
    query, key, value = tensors
    places = order.positions().chunk(order.ranks)
    own = TokenOrder(LENGTH, (order.parts[rank],))
    call = AttentionCall(None, None, own, mask, SCALE, "attention")
    queries = query[:, :, places[rank]]
    blocks = []
    for source in range(order.ranks):
        tiles = block_tiles(mask, order.parts[rank], order.parts[source], LENGTH, LENGTH)
        if tiles.keys is not None:
            first, at_hand = tiles.keys.start, places[source][tiles.keys]
            block = Block(key[:, :, at_hand], value[:, :, at_hand], tiles, (), first)
            blocks.append((block, at_hand))
    forward = BlockForward(queries, key, value, call, None)
    for block, _ in blocks:
        forward.add(block)
    output = forward.result(None)
    if upstream is None:
        return output.out, ()
    grad = upstream[:, :, places[rank]]
    backward = BlockBackward(grad, forward.query, output, forward.kernels, call, None)
    grads = torch.zeros_like(key), torch.zeros_like(value)
    for block, at_hand in blocks:
        parts = torch.zeros_like(block.key), torch.zeros_like(block.value)
        backward.add(block, *parts)
        for grad, part in zip(grads, parts, strict=True):
            grad[:, :, at_hand] += part
    return output.out, (backward.grad_query, *grads)


def inputs(dtype):
    torch.manual_seed(0)
    sizes = ((4, 16), (2, 16), (2, 8), (4, 8))
    return [torch.randn(BATCH, heads, LENGTH, size, dtype=dtype) for heads, size in sizes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        pytest.param(
            mask,
            dtype,
            marks=() if (name, dtype) == ("window of documents", torch.float64) else slow,
            id=f"{name}, {dtype}",
        )
        for name, mask in MASKS.items()
        if name != "causal"
        for dtype in (torch.float64, torch.float32)
    ],
)
def test_blocks_of_a_rank_equal_tiles_and_one_device(monkeypatch, mask, dtype):
    """In zig-zag order of two ranks, without torch's refusal of backward on a CPU."""
    *tensors, upstream = inputs(dtype)
    whole = [one.clone().requires_grad_() for one in tensors]
    expected = F.scaled_dot_product_attention(
        *whole, mask.dense(LENGTH), scale=SCALE, enable_gqa=True
    )
    expected.backward(upstream)
    order = SequenceSharding("zigzag", 2).token_order(LENGTH)
    by_tiles = [attention_of_a_rank(mask, order, rank, tensors, upstream) for rank in range(2)]
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    CountedFlex.take_blocks(monkeypatch)
    by_blocks = [attention_of_a_rank(mask, order, rank, tensors, upstream) for rank in range(2)]
    assert CountedFlex.calls
    places = order.positions().chunk(2)
    for own, (out, grads), (tiles_out, tiles_grads) in zip(
        places, by_blocks, by_tiles, strict=True
    ):
        close(out, expected[:, :, own])
        close(grads[0], whole[0].grad[:, :, own])
        for one, other in zip((out, *grads), (tiles_out, *tiles_grads), strict=True):
            close(one, other)
    for number, one in enumerate(whole[1:], 1):
        close(sum(grads[number] for _, grads in by_blocks), one.grad)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "mask",
    [MASKS["window of documents"], *(pytest.param(one, marks=slow) for one in MASKS.values())],
)
def test_a_converted_mask_is_that_of_one_device(mask):
    """A mask of one row is that of each row of the batch; forward alone, as torch allows."""
    query, key, value, _ = inputs(torch.float64)
    block_mask = mask.block_mask(LENGTH, query.device)
    out = flex_attention.flex_attention(
        query, key, value, block_mask=block_mask, enable_gqa=True, scale=SCALE
    )
    dense = mask.dense(LENGTH)
    close(
        out, F.scaled_dot_product_attention(query, key, value, dense, scale=SCALE, enable_gqa=True)
    )


def test_causal_attention_is_of_tiles(monkeypatch):
    """Which have fused kernels without a mask."""
    CountedFlex.take_blocks(monkeypatch)
    order = SequenceSharding("zigzag", 2).token_order(LENGTH)
    attention_of_a_rank(AttentionMask(causal=True), order, 0, inputs(torch.float32)[:3])
    assert CountedFlex.calls == 0


@pytest.mark.parametrize(
    ("dtype", "features", "has_dropout", "takes"),
    [
        (torch.bfloat16, 64, False, True),
        (torch.float32, 64, False, True),
        (torch.float32, 64, True, False),
        (torch.float32, 8, False, False),
        (torch.float64, 64, False, False),
    ],
)
def test_devices_that_compile_it_take_it_for_masked_blocks(
    monkeypatch, dtype, features, has_dropout, takes
):
    monkeypatch.setattr(selection, "has_triton", lambda: True)
    with FakeTensorMode():
        query = torch.empty(1, 2, 2, 8, features, dtype=dtype, device="cuda")
    selected = selection.select_block_kernel(query, None, has_dropout=has_dropout)
    assert isinstance(selected, Flex) is takes
    monkeypatch.setattr(selection, "has_triton", lambda: False)
    assert selection.select_block_kernel(query, None) is None
    assert selection.select_block_kernel(query.cpu(), None) is None


class _Operands(TorchDispatchMode):
    """Collects the numbers of dims of tensors that fused attention takes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_scaled_dot_product" in func.__name__:
            names = [one.name for one in func._schema.arguments]
            tensors = zip(names, args, strict=False)
            self.found.append({n: one.ndim for n, one in tensors if n in ("query", "key", "value")})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", [CudaFlash, CudaEfficient])
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_kernels_of_cuda_take_four_dims_without_those_of_groups(kernel, kind):
    """By the shapes of torch's operators, as there may be no GPU."""
    with _Operands() as operands:
        query, grad = torch.empty(2, 1, 2, 3, 64, 16, device="meta", dtype=torch.bfloat16)
        key, value = torch.empty(2, 1, 2, 64, 16, device="meta", dtype=torch.bfloat16)
        mask = torch.ones(64, 64, device="meta", dtype=torch.bool) if kind == "masked" else None
        tile = AttentionTile(slice(None), slice(0, 64), slice(0, 64), kind)
        options, one = TileOptions(kind == "causal", mask), kernel(SCALE, 3)
        rows, grad_rows = query.flatten(1, 2), grad.flatten(1, 2)
        output = one.forward(rows, key, value, tile, options)
        of_rows = AttentionOutput(output.out.flatten(1, 2), output.lse.flatten(1, 2))
        grads = one.backward(grad_rows, rows, key, value, of_rows, tile, options)
    assert output.out.shape == grads.query.shape == query.shape
    assert output.lse.shape == query.shape[:-1]
    assert grads.key.shape == grads.value.shape == key.shape
    assert operands.found == [{"query": 4, "key": 4, "value": 4}] * 2


class CountedFlex(Flex):
    """Counts the calls of FlexAttention."""

    calls = 0

    @classmethod
    def take_blocks(cls, monkeypatch):
        """Selects it for blocks, and for tiles a kernel with its rows, as CUDA's are."""
        kernels = {"select_block_kernel": cls, "select_kernel": Operators}
        for name, kernel in kernels.items():
            monkeypatch.setattr(
                block_attention,
                name,
                lambda query, scale, kernel=kernel, **_: kernel(scale, query.shape[2]),
            )
        cls.calls = 0

    def _attention(self, *args):
        type(self).calls += 1
        return super()._attention(*args)


def close(actual, expected):
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}[actual.dtype]
    assert (actual - expected).abs().max() < tolerance
