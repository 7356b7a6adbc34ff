"""Parameters of every kind train as in a replicated model with averaged gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import AdamW, Muon
from ragged_shard import RaggedShard
from testkit import CommLog, models, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 4


class Mlp(nn.Module):
    """Two layers, and the parameter of a case."""

    def __init__(self, width=6, **extra):
        super().__init__()
        self.a, self.b = nn.Linear(width, 8), nn.Linear(8, width)
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Scaled(Mlp):
    def forward(self, x):
        return super().forward(x) * self.scale + self.empty.sum()


class Lora(Mlp):
    def forward(self, x):
        return super().forward(x) + x @ self.down @ self.up


class Mixed(Mlp):
    def forward(self, x):
        return super().forward(x) + self.gate(x.bfloat16()).float()


class Twice(Mlp):
    def forward(self, x):
        return super().forward(super().forward(x))


class Stack(nn.Module):
    """Blocks that run in a changing order, some of them twice or never."""

    def __init__(self, *blocks, orders=None, tied=False, checkpointed=False):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(blocks)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        if tied:
            self.last.weight = self.first.weight
        self.orders = orders or [range(len(blocks))]
        self.checkpointed = checkpointed
        self.calls = 0

    def forward(self, x):
        order = self.orders[self.calls % len(self.orders)]
        self.calls += 1
        x = self.first(x)
        for i in order:
            block = self.blocks[i]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(x)


def _seeded(make):
    torch.manual_seed(7)
    return make()


def _frozen(module):
    module.a.requires_grad_(False)
    return module


def _lora():
    module = Lora(down=nn.Parameter(torch.randn(6, 2)), up=nn.Parameter(torch.randn(2, 6)))
    module.a.requires_grad_(False)
    module.b.requires_grad_(False)
    return module


CASES = {
    "nested": lambda: Stack(Mlp(), Mlp(), Mlp()),
    "tied": lambda: Stack(Mlp(), Mlp(), tied=True),
    "frozen beside trained": lambda: Stack(_frozen(Mlp()), Mlp()),
    "all frozen": lambda: Stack(Mlp().requires_grad_(False), Mlp()),
    "LoRA": lambda: Stack(_lora(), _lora()),
    "two dtypes": lambda: Stack(Mixed(gate=nn.Linear(6, 6, dtype=torch.bfloat16)), Mlp()),
    "scalar and zero-size": lambda: Stack(
        Scaled(scale=nn.Parameter(torch.tensor(0.5)), empty=nn.Parameter(torch.zeros(0, 3))), Mlp()
    ),
    "3-D": lambda: Stack(Mlp(unused=nn.Parameter(torch.randn(3, 2, 2)))),
    "module called twice": lambda: Stack(Mlp(), Mlp(), orders=[(0, 1, 0)]),
    "module never called": lambda: Stack(Mlp(), Mlp(), Mlp(), orders=[(0, 2)]),
    "order changes": lambda: Stack(Mlp(), Mlp(), Mlp(), orders=[(0, 1, 2), (2, 0, 1), (1,)]),
    "weights used twice": lambda: Stack(Twice(), Twice()),
    "activation checkpointing": lambda: Stack(Mlp(), Mlp(), Mlp(), checkpointed=True),
    "checkpointed and twice": lambda: Stack(Mlp(), Mlp(), orders=[(0, 1, 1)], checkpointed=True),
}
# Those that the test of resharding trains too, with the same options and others, and those of
# which another has the harder part.
AGAIN = ("nested", "module called twice", "checkpointed and twice")
AGAIN += ("all frozen", "3-D", "module never called", "activation checkpointing")
GRANULARITIES = {
    "by element": lambda param: None,
    "blocks": lambda param: Block(4),
    "rows": lambda param: Rows(2),
    "whole": lambda param: Whole(),
    "torch's Shard": lambda param: torch.distributed.tensor.Shard(0) if param.ndim else None,
}


def _train(model, average=False):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(3, 6)).square().mean()
        loss.backward()
        for param in trained if average else []:
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _compare(cases, options):
    for case in cases:
        _compare_one(case, options)


def _compare_one(case, options):
    sharded, reference = _seeded(CASES[case]), _seeded(CASES[case])
    for block in sharded.blocks:
        fully_shard(block, **options)
    fully_shard(sharded, **options)
    got, wanted = _train(sharded), _train(reference, average=True)
    assert torch.equal(torch.stack(got), torch.stack(wanted)), (got, wanted)
    sharded.reshard()
    for (name, mine), expected in zip(
        sharded.named_parameters(), reference.parameters(), strict=True
    ):
        assert isinstance(mine, DTensor), name
        assert isinstance(mine.placements[0], RaggedShard), name
        assert torch.equal(mine.full_tensor(), expected), name


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.slow] * (one in AGAIN)) for one in CASES]
)
def test_training_equals_a_replicated_model(case):
    run_ranks(_compare, 2, [case], {})


@pytest.mark.parametrize(
    "granularity",
    [
        # None is the default, and rows are blocks.
        pytest.param(one, marks=[pytest.mark.slow] * (one in ("by element", "rows")))
        for one in GRANULARITIES
    ],
)
def test_training_is_the_same_for_all_granularities(granularity):
    run_ranks(_compare, 2, ["tied"], {"shard_placement_fn": GRANULARITIES[granularity]})


@pytest.mark.parametrize("reshard", [True, False])
def test_training_is_the_same_with_and_without_resharding(reshard):
    run_ranks(_compare, 2, AGAIN, {"reshard_after_forward": reshard})


def test_shards_consist_of_whole_blocks_of_the_granularity():
    def check():
        model = Mlp()
        kinds = {(8, 6): Rows(2), (8,): Whole(), (6, 8): Block(16)}
        fully_shard(model, shard_placement_fn=lambda p: kinds.get(tuple(p.shape)))
        return [p.to_local().numel() for p in model.parameters()]

    weight, bias, second, _ = zip(*run_ranks(check, 2), strict=True)
    assert sum(weight) == sum(second) == 48
    assert not any(n % 12 for n in weight)
    assert sorted(bias) == [0, 8]
    assert not any(n % 16 for n in second)


def test_frozen_parameters_are_gathered_and_not_reduced():
    def check():
        model = Stack(Mlp().requires_grad_(False), Mlp())
        for block in model.blocks:
            fully_shard(block, strategy="native")
        fully_shard(model, strategy="native")
        with CommLog() as log:
            model(torch.randn(3, 6)).sum().backward()
        assert all(p.grad is None for p in model.blocks[0].parameters())
        return log.counts()

    for counts in run_ranks(check, 2):
        # Not resharded after forward: the root. The first verifies that all ranks agree.
        assert counts["reduce_scatter"] == 2


def test_unsharded_parameters_follow_a_change_of_requires_grad():
    def check():
        model = Stack(Mlp())
        fully_shard(model)
        model(torch.randn(3, 6)).sum().backward()
        model.zero_grad()
        model.first.weight.requires_grad_(False)
        model(torch.randn(3, 6)).sum().backward()
        assert model.first.weight.grad is None
        assert model.last.weight.grad is not None
        model.first.weight.requires_grad_(True)
        model(torch.randn(3, 6)).sum().backward()
        assert model.first.weight.grad is not None

    run_ranks(check, 2)


def test_gradients_of_an_earlier_step_are_not_overwritten():
    def check():
        model = fully_shard(Stack(Mlp()))
        model(torch.ones(3, 6)).sum().backward()
        old = model.first.weight.grad
        before = old.full_tensor().clone()
        model.zero_grad()
        model(5 * torch.ones(3, 6)).sum().backward()
        assert torch.equal(old.full_tensor(), before)
        assert not torch.equal(model.first.weight.grad.full_tensor(), before)

    run_ranks(check, 2)


def test_modules_of_a_list_train_as_one_group():
    def check():
        sharded, reference = (_seeded(CASES["nested"]) for _ in range(2))
        fully_shard([sharded.blocks[0], sharded.blocks[1]])
        fully_shard([sharded.blocks[2], sharded.last])
        fully_shard(sharded)
        got, wanted = _train(sharded), _train(reference, average=True)
        assert torch.equal(torch.stack(got), torch.stack(wanted))

    run_ranks(check, 2)


def test_ignored_parameters_are_neither_sharded_nor_reduced():
    def check():
        model = Stack(Mlp())
        ignored = model.first.weight
        fully_shard(model, ignored_params={ignored})
        model(torch.randn(3, 6)).sum().backward()
        assert model.first.weight is ignored
        assert not isinstance(ignored.grad, DTensor)

    run_ranks(check, 2)


def test_gpt2_with_dropout_and_tied_embeddings_trains_as_on_one_device():
    def check():
        losses = []
        for sharded in (True, False):
            model = models.gpt2()
            if sharded:
                for block in model.transformer.h:
                    fully_shard(block)
                fully_shard(model)
            losses.append(models.train(model, steps=5))  # the same batches on all ranks
        return losses

    for sharded, alone in run_ranks(check, 2, timeout=120):
        torch.testing.assert_close(sharded, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer_of", [AdamW, torch.optim.SGD, Muon], ids=["AdamW", "SGD", "Muon"]
)
def test_parameters_gradients_and_the_optimizers_state_are_copied_deeply(optimizer_of):
    """They are views of buffers at some offset, which a copy does not have."""

    def check():
        model = fully_shard(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)]))
        options = {"momentum": 0.9} if optimizer_of is torch.optim.SGD else {}
        optimizer = optimizer_of(model.named_parameters(), lr=0.1, **options)
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        params = list(model.parameters())
        assert any(param._local_tensor.storage_offset() for param in params)
        assert any(param.grad._local_tensor.storage_offset() for param in params)
        state = [tensor for own in optimizer.state.values() for tensor in own.values()]
        for own in (*params, *state):
            copied = copy.deepcopy(own)
            assert type(copied) is type(own)
            assert copied.requires_grad == own.requires_grad
            pairs = (
                [(copied, own)] if own.grad is None else [(copied, own), (copied.grad, own.grad)]
            )
            for one, other in pairs:
                one, other = (getattr(each, "_local_tensor", each) for each in (one, other))
                assert torch.equal(one, other)
                assert not one.numel() or one.data_ptr() != other.data_ptr()

    run_ranks(check, 2)
