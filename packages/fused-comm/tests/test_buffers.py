"""Buffers of another allocator: used for every bucket, released when no gradient is in them."""

import gc
import math
import random
import weakref
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fused_comm import GradReducer
from testkit import fake_mesh, loss_with_grad, run_ranks

pytestmark = pytest.mark.ranks

R, P, S0 = Replicate(), Partial(), Shard(0)


@dataclass
class Pool:
    """Makes buffers, and spoils those that are released: a gradient in one would be no number."""

    alive: list = field(default_factory=list)
    made: int = 0

    def __call__(self, numel, dtype, device):
        buffer = Spoiled(self, torch.empty(numel, dtype=dtype, device=device))
        self.alive.append(buffer)
        self.made += 1
        return buffer


@dataclass(eq=False)
class Spoiled:
    pool: Pool
    data: torch.Tensor

    def release(self):
        self.pool.alive.remove(self)  # raises the second time
        self.data.fill_(math.nan)


class Gathered(torch.autograd.Function):
    """A parameter that is sharded at rest; its gradient stays a part of the sum."""

    @staticmethod
    def forward(ctx, param):
        return param.redistribute(placements=[R])

    @staticmethod
    def backward(ctx, grad):
        return grad


def model(mesh, placements=None, count=3):
    torch.manual_seed(0)
    placements = placements or [R] * mesh.ndim
    return [
        torch.nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, placements))
        for _ in range(count)
    ]


def batch(mesh, seed):
    torch.manual_seed(100 + seed)
    return distribute_tensor(torch.randn(8, 4), mesh, [S0] * mesh.ndim)


def loss(params, x):
    for param in params:
        x = torch.tanh(x @ param)
    return x.square().sum()


def add_reference(params, x, sums):
    whole = [p.detach().full_tensor().requires_grad_() for p in params]
    loss(whole, x.full_tensor()).backward()
    for number, param in enumerate(whole):
        sums[number] = sums.get(number, 0) + param.grad


def as_expected(params, sums):
    return all(
        torch.allclose(param.grad.full_tensor(), sums[number], rtol=1e-5, atol=1e-5)
        for number, param in enumerate(params)
        if number in sums
    )


def all_correct(params, reducer, mesh, steps):
    """Whether the gradients of each step are right; nobody has them in the next."""
    correct = []
    for step in range(steps):
        sums, x = {}, batch(mesh, step)
        loss([Gathered.apply(p) for p in params], x).backward()
        add_reference(params, x, sums)
        reducer.finish()
        correct.append(as_expected(params, sums))
        for param in params:
            param.grad = None
    return all(correct)


@pytest.mark.filterwarnings("ignore:.*a second backward began without finish")
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("target", [R, S0])
def test_a_buffer_is_released_when_its_gradients_are_elsewhere(zero_copy, target):
    """Gradients that stay, that are not used for a step, and that come twice in one."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params, pool = model(mesh, [target]), Pool()
        reducer = GradReducer(params, zero_copy=zero_copy, allocate=pool, bucket_mb=160 / 2**20)
        sums, correct, alive = {}, [], []
        for step, used in enumerate([(0, 1, 2), (0, 1, 2), (0, 1), (1, 2), (0, 1, 2), (0, 1, 2)]):
            for again in range(1 + (step in (1, 3))):
                x = batch(mesh, 10 * step + again)
                some = [params[number] for number in used]
                loss([Gathered.apply(p) for p in some], x).backward()
                mine = {at: sums[n] for at, n in enumerate(used) if n in sums}
                add_reference(some, x, mine)
                sums.update({n: mine[at] for at, n in enumerate(used)})
            reducer.finish()
            correct.append(as_expected(params, sums))
            alive.append(len(pool.alive))
        return all(correct), alive[-1] == len(reducer.report().buckets), pool.made

    # Two buckets in six steps, two of them with a second round. Buffers of bucket views are made
    # once, and inputs of reduce-scatters are reused; so is, twice, the buffer of a bucket without
    # gradients.
    made = 2 if target == S0 else 2 * (1 + 2) if zero_copy else 2 * (6 + 2) - 2
    assert run_ranks(check, 2) == [(True, True, made)] * 2


@pytest.mark.parametrize("target", [R, S0])
def test_a_buffer_is_reused_when_its_gradients_are_gone(target):
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params, pool = model(mesh, [target]), Pool()
        reducer = GradReducer(params, allocate=pool)
        correct = all_correct(params, reducer, mesh, steps=4)
        return correct, pool.made

    assert run_ranks(check, 2) == [(True, 1)] * 2


def test_many_scattered_buckets_use_two_buffers():
    """So that memory does not grow with the model (ZeRO-2): one is filled, one is on its way."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params, pool = model(mesh, [S0], count=7), Pool()
        reducer = GradReducer(params, allocate=pool, bucket_mb=64 / 2**20)
        correct = all_correct(params, reducer, mesh, steps=3)
        return len(reducer.report().buckets), correct, pool.made

    assert run_ranks(check, 2) == [(7, True, 2)] * 2


@pytest.mark.parametrize("part", ["gradient", "local tensor", "view"])
def test_a_gradient_that_is_still_referenced_is_not_overwritten(part):
    """In memory of torch's, which counts its views."""
    parts = {"gradient": lambda g: g, "local tensor": DTensor.to_local, "view": DTensor.t}

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh)
        reducer = GradReducer(params)
        saved = []
        for step in range(4):
            loss(params, batch(mesh, step)).backward()
            reducer.finish()
            mine = parts[part](params[0].grad)
            saved.append((mine, mine.clone()))
            for param in params:
                param.grad = None
        return [torch.equal(*(getattr(x, "_local_tensor", x) for x in pair)) for pair in saved]

    assert run_ranks(check, 2) == [[True] * 4] * 2


@pytest.mark.filterwarnings("ignore:.*a second backward began without finish")
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("target", [R, S0])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_any_pattern_of_gradients_adds_up(shape, zero_copy, target, op):
    """Each on some ranks, up to three times in a step, kept for some; an axis may wait."""

    def check():
        mesh = init_device_mesh("cpu", shape)
        params, pool = model(mesh, [R, target][-len(shape) :], count=4), Pool()
        reducer = GradReducer(
            params, zero_copy=zero_copy, op=op, allocate=pool, bucket_mb=160 / 2**20
        )
        choose = random.Random(zero_copy + 2 * (op == "sum"))
        ranks = dist.get_world_size()
        sums, wrong = {}, []
        for step in range(30):
            waits = len(shape) > 1 and choose.random() < 0.5
            reducer.set_requires_gradient_sync(not waits, axes=[0] if len(shape) > 1 else None)
            for _ in range(choose.randint(1, 3)):
                total = 0
                for number, param in enumerate(params):
                    for rank in range(ranks):
                        value = choose.randint(-9, 9)
                        # The first comes each time everywhere, so that all are in as many rounds.
                        if number and choose.random() < 0.5:
                            continue
                        sums[number] = sums.get(number, 0) + value
                        if rank == dist.get_rank():
                            local = torch.full((4, 4), float(value))
                            grad = DTensor.from_local(local, mesh, [P] * mesh.ndim, run_check=False)
                            total = total + loss_with_grad(param, grad)
                total.backward()
            reducer.finish()
            if waits:
                continue
            for number, param in enumerate(params):
                if number not in sums:
                    wrong += [(step, number)] * (param.grad is not None)
                    continue
                expected = sums[number] / (ranks if op == "avg" else 1)
                if param.grad is None or (param.grad.to_local() != expected).any():
                    wrong.append((step, number))
                elif param.grad.placements != param.placements:
                    wrong.append((step, number, param.grad.placements))
                if choose.random() < 0.3:
                    param.grad = None
                    sums.pop(number)
        return wrong, len(pool.alive) < 24

    world = math.prod(shape)
    assert run_ranks(check, world) == [([], True)] * world


@pytest.mark.parametrize("zero_copy", [False, True])
def test_an_axis_may_be_deferred_with_gradients_of_autograd(zero_copy):
    """HSDP's deferral on 2 x 2, with buffers that are spoiled when they are released."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        params, pool = model(mesh), Pool()
        reducer = GradReducer(params, zero_copy=zero_copy, allocate=pool)
        correct = []
        for step in range(3):
            sums = {}
            for micro in range(3):
                reducer.set_requires_gradient_sync(micro == 2, axes=["replicate"])
                x = batch(mesh, 10 * step + micro)
                loss(params, x).backward()
                reducer.finish()
                add_reference(params, x, sums)
                expected = (R, R) if micro == 2 else (P, R)
                correct.append(all(p.grad.placements == expected for p in params))
            correct.append(as_expected(params, sums))
            for param in params:
                param.grad = None
        return all(correct), len(pool.alive) <= 4

    assert run_ranks(check, 4) == [(True, True)] * 4


def test_a_gradient_that_is_accumulated_twice_on_one_rank_only_is_an_error():
    """Else the second round here would be added to the next step's first elsewhere."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh)
        reducer = GradReducer([(f"layer{n}", p) for n, p in enumerate(params)])
        loss(params, batch(mesh, 0)).backward()
        reducer.finish()
        for param in params:
            param.grad = None
        first, second, third = (
            torch.autograd.grad(loss(params, batch(mesh, seed)), params) for seed in (1, 2, 3)
        )

        def give(grads):
            for param, grad in zip(params, grads, strict=True):
                reducer.accumulate(param, grad)

        give(first)
        if dist.get_rank() == 0:
            give(second)
            with pytest.raises(RuntimeError, match=r"layer2, layer1, layer0 were accumulated"):
                reducer.finish()
        else:
            reducer.finish()
            give(third)  # meets the other's second round
            reducer.finish()
        return True

    assert run_ranks(check, 2) == [True] * 2


def test_unreferenced_parameters_are_freed_with_their_reducer():
    with fake_mesh((2,)) as mesh:
        params = model(mesh)
        reducer = GradReducer(params)
        for step in range(2):
            loss(params, batch(mesh, step)).backward()
            reducer.finish()
        seen = [weakref.ref(one) for one in (reducer, *params)]
        del params, reducer
        gc.collect()
        assert [one() for one in seen] == [None] * len(seen)
