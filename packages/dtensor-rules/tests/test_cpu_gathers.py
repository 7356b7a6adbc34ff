"""Functional all_gathers of CPU tensors, which break torch's heap, and not while enabled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import dtensor_rules
from testkit import run_python, run_ranks

SCRIPT = Path(__file__).with_name("gathers_in_flight.py")


@pytest.mark.slow  # thousands of gathers
def test_many_at_once_leave_the_heap_whole():
    done = subprocess.run(
        [sys.executable, SCRIPT, "enabled"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("whose", "collective"),
    [
        ("torch", "c10d::allgather_into_tensor_coalesced_"),
        ("enabled", "c10d::_allgather_base_"),
        ("disabled", "c10d::allgather_into_tensor_coalesced_"),
    ],
)
def test_the_collective_is(whose, collective):
    """Canary, torch's: where it is another one, cpu_gathers.cpp can perhaps go.

    That torch's breaks the heap, `gathers_in_flight.py torch` shows, but not on a busy machine.
    """
    done = run_python(str(SCRIPT), whose, "--once")
    assert [name for name in done.stdout.split() if "gather" in name] == [collective], done


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_give_what_torch_gives(dtype):
    """Every dtype, strides, a lazy conjugate, no elements, one or several of them."""

    def check():
        dtensor_rules.enable()
        rank = dist.get_rank()
        op, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
        whole = torch.arange(24).reshape(4, 6).to(dtype)
        whole = whole * (1 + 1j) if dtype.is_complex else whole
        own = whole.tensor_split(2)[rank]
        kinds = {"plain": own, "transposed": own.t(), "empty": own[:0], "conjugate": own.conj()}
        several = op.all_gather_into_tensor_coalesced(list(kinds.values()), 2, name)
        for (kind, each), also in zip(kinds.items(), several, strict=True):
            parts = [torch.empty_like(each.contiguous()) for _ in range(2)]
            dist.all_gather(parts, each.resolve_conj().contiguous())
            one = op.wait_tensor(op.all_gather_into_tensor(each, 2, name))
            assert torch.equal(one, torch.cat(parts)), kind
            assert torch.equal(op.wait_tensor(also), torch.cat(parts)), kind
        mesh = init_device_mesh("cpu", (2,))
        placed = DTensor.from_local(own, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        assert torch.equal(placed.to_local(), whole)

        dtensor_rules.disable()

    run_ranks(check, 2)


@pytest.mark.ranks
def test_scalars_are_gathered_to_a_vector():
    def check():
        group = dist.group.WORLD.group_name
        with dtensor_rules.enabled():
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(
                torch.tensor(3.0 + dist.get_rank()), 2, group
            )
            assert torch.ops._c10d_functional.wait_tensor(gathered).tolist() == [3.0, 4.0]
            x = distribute_tensor(
                torch.arange(8.0).view(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)]
            )
            assert x.argmax().full_tensor().item() == 7  # by a gather of scalars on torch 2.11

    run_ranks(check, 2)
