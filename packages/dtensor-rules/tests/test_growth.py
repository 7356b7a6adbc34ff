"""Nothing grows, however many calls there are and however many threads make them."""

import gc
import os
import threading

import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import dtensor_rules
from testkit import fake_mesh

MOST_MB = 10
# It keeps for a while what is freed, so that its own memory grows.
UNDER_ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")


@pytest.fixture
def mesh():
    with fake_mesh((4,)) as mesh, dtensor_rules.enabled():
        yield mesh


def placed(mesh, placement, *shape):
    return DTensor.from_local(torch.ones(shape), mesh, [placement], run_check=False)


def mixed(mesh, count):
    """So many calls: pointwise, in place, views, lists, reductions; with errors among them."""
    x, y = placed(mesh, Shard(0), 2, 4), placed(mesh, Shard(0), 2, 4)
    weight, other = placed(mesh, Replicate(), 4, 4), placed(mesh, Replicate(), 3, 3)
    for index in range(count // 10):
        (x * 2 + y).t().view(4, 8)
        (x @ weight).softmax(-1).sum()
        y.add_(x).mul_(0.5)
        torch.cat([x, y], 1)
        if index % 1000 == 0:
            with pytest.raises(RuntimeError):
                x @ other


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


@pytest.mark.parametrize("calls", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_and_cache_after_many_calls(mesh, calls):
    with torch.no_grad():
        mixed(mesh, 10_000)
        size, memory = dtensor_rules.cache_info().size, resident()
        mixed(mesh, calls)
        assert dtensor_rules.cache_info().size == size
        assert UNDER_ASAN or resident() - memory < MOST_MB
    assert dtensor_rules.cache_info().hits > calls / 2


def test_the_cache_is_bounded_whatever_the_scalars_and_shapes_are(mesh):
    info = dtensor_rules.cache_info()
    dtensor_rules.set_cache_capacity(64)
    try:
        x = placed(mesh, Shard(0), 2, 4)
        for length in range(1, 201):
            placed(mesh, Replicate(), 1, length) * 2
            x * float(length)
        assert dtensor_rules.cache_info().size <= 64
        assert dtensor_rules.cache_info().evictions >= 100
    finally:
        dtensor_rules.set_cache_capacity(info.capacity)


@pytest.mark.parametrize("steps", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_eight_threads_at_one_small_cache(mesh, steps):
    info = dtensor_rules.cache_info()
    dtensor_rules.set_cache_capacity(16)
    wrong = []

    def work(seed):
        try:
            for step in range(steps):
                rows = 1 + (seed + step) % 40
                x = placed(mesh, Shard(0), rows, 4)
                result = (x * 3 + x).t()
                if not torch.equal(result.to_local(), torch.full((4, rows), 4.0)):
                    wrong.append((seed, step))
                if step % 50 == seed:
                    dtensor_rules.cache_clear()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        dtensor_rules.set_cache_capacity(info.capacity)
    assert wrong == []
    assert dtensor_rules.cache_info().size <= 16
    assert sum(op.rule + op.cache for op in dtensor_rules.stats().values()) > 0


def test_eight_threads_with_gradients_neither_wait_for_one_another_nor_mix_them_up(mesh):
    """Autograd keeps copies of DTensors, makes and frees them, with and without the GIL."""
    wrong = []

    def collect(grad):
        gc.collect(0)

    def work(seed):
        try:
            for step in range(60):
                rows = 1 + (seed + step) % 5
                local = torch.linspace(-1, 1, 4 * rows).reshape(rows, 4) + seed
                x = DTensor.from_local(local, mesh, [Shard(0)]).requires_grad_()
                hidden = torch.nn.functional.layer_norm(x, (4,)).softmax(-1)
                hidden.register_hook(collect)
                (torch.nn.functional.gelu(hidden) * x).sum().to_local().backward()
                plain = local.clone().requires_grad_()
                inner = torch.nn.functional.layer_norm(plain, (4,)).softmax(-1)
                (torch.nn.functional.gelu(inner) * plain).sum().backward()
                if not torch.equal(x.grad.to_local(), plain.grad):
                    wrong.append((seed, step))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads), "threads wait for one another"
    assert wrong == []
