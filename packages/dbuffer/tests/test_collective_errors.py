"""Ranks that do not all take part: errors that name what was under way, and no wrong numbers."""

import os
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from dbuffer import DBuffer, errors, verify
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import fake_mesh, run_ranks

pytestmark = pytest.mark.ranks

COLLECTIVES = {
    "all_gather": (Shard(0), DBuffer.all_gather_),
    "reduce_scatter": (Partial(), DBuffer.reduce_scatter_),
    "all_reduce": (Partial(), DBuffer.all_reduce_),
}


@contextmanager
def mesh_with(timeout):
    """A mesh whose collectives wait some seconds; nobody leaves before all have seen the errors."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",))
    dist.barrier()


def buffer_on(mesh, placement, strategy, name="", names=("a", "b")):
    layout = plan_layout([TensorSpec(name, 4) for name in names], mesh.size())
    made = DBuffer(
        layout, mesh, [placement], torch.float32, full=True, strategy=strategy, name=name
    )
    made.set_placements([Replicate()])
    made.copy_from([torch.full((4,), float(mesh.get_local_rank())) for _ in names])
    made.set_placements([placement])
    return made


@pytest.mark.parametrize("strategy", ["native", pytest.param("exchange", marks=pytest.mark.slow)])
def test_a_rank_that_is_missing_is_told_with_collective_axis_and_buffer(strategy):
    def check():
        for what, (placement, start) in COLLECTIVES.items():
            with mesh_with(timeout=1) as mesh:
                buffer = buffer_on(mesh, placement, strategy)
                if dist.get_rank() == 1:
                    continue
                with pytest.raises(RuntimeError, match=f"^DBuffer: {what} of 'a', 'b' ") as caught:
                    start(buffer)
                message = str(caught.value)
                assert "(8 elements of torch.float32)" in message
                assert "over axis 'fsdp' of ranks [0, 1] failed on rank 0: " in message
                assert "imed out" in message
                assert "init_process_group(timeout=)" in message
                assert "imed out" in str(caught.value.__cause__)

    run_ranks(check, 2)


def test_a_connection_that_ends_is_told_so_too():
    def check():
        group = dist.new_group()
        if dist.get_rank() == 1:
            dist.destroy_process_group(group)
            del group  # closes its sockets
        else:
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",))
            buffer = buffer_on(mesh, Shard(0), "exchange", name="the head")
            message = r"all_gather of the head .* failed on rank 0: .*[Cc]onnection"
            with pytest.raises(RuntimeError, match=message):
                buffer.all_gather_()
        dist.barrier()

    run_ranks(check, 2)


def test_verify_names_the_buffers_that_a_rank_does_not_compare():
    def check():
        with mesh_with(timeout=1) as mesh:
            buffer = buffer_on(mesh, Shard(0), "auto")
            if dist.get_rank() == 0:
                with pytest.raises(RuntimeError, match=r"verify of 1 buffers, .* of 'a', 'b', ov"):
                    verify([buffer])

    run_ranks(check, 2)


def different(kind, mesh, strategy):
    """What each of two ranks starts: the sizes are the same."""
    rank = mesh.get_local_rank()
    if kind == "collective":
        what = ("all_gather", "reduce_scatter")[rank]
        placement, start = COLLECTIVES[what]
        return buffer_on(mesh, placement, strategy), start
    if kind == "name":
        return buffer_on(mesh, Shard(0), strategy, name=f"layer {rank}"), DBuffer.all_gather_
    names = ("a", "b") if rank == 0 else ("c", "d")
    return buffer_on(mesh, Shard(0), strategy, names=names), DBuffer.all_gather_


@pytest.mark.parametrize("kind", ["collective", "name", "tensors"])
def test_exchanges_of_different_buffers_never_meet(kind):
    def check():
        with mesh_with(timeout=1) as mesh:
            buffer, start = different(kind, mesh, "exchange")
            before = buffer._flat.clone()
            with pytest.raises(RuntimeError, match=r"imed out|onnection"):
                start(buffer)
            torch.testing.assert_close(buffer._flat, before, rtol=0, atol=0)

    run_ranks(check, 2)


def test_exchanges_may_be_started_in_another_order_on_each_rank():
    def check():
        with mesh_with(timeout=30) as mesh:
            buffers = [buffer_on(mesh, Shard(0), "exchange", name=name) for name in "xyz"]
            for number, buffer in enumerate(buffers):
                buffer._flat.add_(10.0 * number)
            order = buffers if dist.get_rank() == 0 else buffers[::-1]
            handles = {buffer: buffer.all_gather_(async_op=True) for buffer in order}
            for number, buffer in enumerate(buffers):
                handles[buffer].wait()
                assert buffer.local.tolist() == [10.0 * number] * 4 + [10.0 * number + 1] * 4

    run_ranks(check, 2)


@pytest.mark.parametrize("strategy", ["native", "exchange"])
@pytest.mark.parametrize("kind", ["collective", "name", "tensors"])
def test_names_are_compared_before_each_collective_if_wanted(kind, strategy):
    def check():
        os.environ[errors.CHECK] = "1"
        try:
            with mesh_with(timeout=30) as mesh:
                same = buffer_on(mesh, Shard(0), strategy)
                same.all_gather_()
                assert same.local.tolist() == [0.0] * 4 + [1.0] * 4
                buffer, start = different(kind, mesh, strategy)
                before = buffer._flat.clone()
                with pytest.raises(RuntimeError) as caught:
                    start(buffer)
                torch.testing.assert_close(buffer._flat, before, rtol=0, atol=0)
        finally:
            del os.environ[errors.CHECK]
        return str(caught.value)

    others = {
        "collective": "reduce_scatter of 'a', 'b'",
        "name": "all_gather of layer 1",
        "tensors": "all_gather of 'c', 'd'",
    }
    for message in run_ranks(check, 2):
        assert "the same collective, got: rank 0 starts DBuffer: all_gather" in message
        assert f"; rank 1 starts DBuffer: {others[kind]}" in message


def test_a_check_is_on_or_off(monkeypatch):
    monkeypatch.setenv(errors.CHECK, "yes")
    with (
        fake_mesh((2,)) as mesh,
        pytest.raises(ValueError, match=r"DBUFFER_CHECK .*0 or 1, got 'yes'"),
    ):
        buffer_on(mesh, Shard(0), "auto")


def test_tags_leave_room_for_the_kind_of_collective():
    tags = {errors.tag_of(f"layer {i}", 8, torch.float32) for i in range(1000)}
    assert len(tags) == 1000
    assert all(0 <= tag < 2**29 for tag in tags)


def test_only_errors_of_waiting_get_more_words():
    with fake_mesh((2,), ("fsdp",)) as mesh:
        axis = buffer_on(mesh, Shard(0), "auto")._axes[0]
        for error in (torch.OutOfMemoryError("full"), ValueError("wrong")):
            with (
                pytest.raises(type(error)) as caught,
                errors.collective_errors(lambda: "a gather", axis),
            ):
                raise error
            assert caught.value is error
        message = r"^a gather over axis 'fsdp'"
        with (
            pytest.raises(dist.DistBackendError, match=message) as caught,
            errors.collective_errors(lambda: "a gather", axis),
        ):
            raise dist.DistBackendError("NCCL is unhappy")
        assert isinstance(caught.value.__cause__, dist.DistBackendError)
