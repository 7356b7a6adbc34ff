import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from testkit import Collective, CommLog, fake_mesh, run_ranks


@pytest.fixture
def mesh():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        yield mesh


def only(log):
    (call,) = log.calls
    return call


# --- what each collective is recorded as


def ones(n):
    return torch.ones(n)


def lists(n):
    return [torch.ones(3) for _ in range(n)]


PLAIN = {
    "all_gather-list": (lambda: dist.all_gather(lists(8), ones(3)), ("all_gather", 12, 96, 84)),
    "all_gather-base": (
        lambda: dist.distributed_c10d._get_default_group()._allgather_base(ones(24), ones(3)),
        ("all_gather", 12, 96, 84),
    ),
    "reduce_scatter-list": (
        lambda: dist.reduce_scatter(ones(3), lists(8)),
        ("reduce_scatter", 96, 12, 84),
    ),
    "all_reduce": (lambda: dist.all_reduce(ones(4)), ("all_reduce", 16, 16, 28)),
    "broadcast": (lambda: dist.broadcast(ones(3), 0), ("broadcast", 12, 12, 12)),
    "broadcast-last": (lambda: dist.broadcast(ones(3), 1), ("broadcast", 12, 12, 0)),
    "reduce": (lambda: dist.reduce(ones(3), 1), ("reduce", 12, 12, 12)),
    "reduce-root": (lambda: dist.reduce(ones(3), 0), ("reduce", 12, 12, 0)),
    "gather-root": (lambda: dist.gather(ones(3), lists(8), dst=0), ("gather", 12, 96, 0)),
    "gather": (lambda: dist.gather(ones(3), dst=1), ("gather", 12, 0, 12)),
    "scatter-root": (lambda: dist.scatter(ones(3), lists(8), src=0), ("scatter", 96, 12, 84)),
    "scatter": (lambda: dist.scatter(ones(3), src=1), ("scatter", 0, 12, 0)),
    "all_to_all-list": (lambda: dist.all_to_all(lists(8), lists(8)), ("all_to_all", 96, 96, 84)),
    "all_to_all-even": (
        lambda: dist.all_to_all_single(ones(16), ones(16)),
        ("all_to_all", 64, 64, 56),
    ),
    "send": (lambda: dist.send(ones(3), 1), ("send", 12, 0, 12)),
    "recv": (lambda: dist.recv(ones(3), 1), ("recv", 0, 12, 0)),
    "barrier": (dist.barrier, ("barrier", 0, 0, 0)),
}


@pytest.mark.parametrize(("run", "expected"), PLAIN.values(), ids=PLAIN.keys())
def test_plain_collectives(run, expected):
    with fake_mesh((8,)):
        with CommLog() as log:
            run()
        call = only(log)
    assert (call.op, call.input_bytes, call.output_bytes, call.wire_bytes) == expected
    assert (call.group, call.group_size, call.group_rank) == ("0", 8, 0)
    assert call.dtype == ("" if call.op == "barrier" else "float32")


def functional(group):
    return {
        "all_reduce": funcol.all_reduce(torch.ones(4).bfloat16(), "sum", group),
        "broadcast": funcol.broadcast(torch.ones(4).bfloat16(), 0, group),
        "all_to_all": funcol.all_to_all_single(
            torch.ones(10, 2).bfloat16(), [1, 2, 3, 0], [4, 3, 2, 1], group
        ),
    }


def test_functional_collectives_name_their_group(mesh):
    group = mesh.get_group("tp")
    with CommLog() as log:
        for result in functional(group).values():
            funcol.wait_tensor(result)
    assert {(call.group, call.group_size, call.group_rank, call.dtype) for call in log.calls} == {
        (group.group_name, 4, 0, "bfloat16")
    }
    assert [call.op for call in log.calls] == ["all_reduce", "broadcast", "all_to_all"]
    assert log.calls[0].wire_bytes == 12
    splits = log.calls[2]
    assert (splits.input_splits, splits.output_splits) == ((16, 12, 8, 4), (4, 8, 12, 0))
    assert (splits.input_bytes, splits.output_bytes, splits.wire_bytes) == (40, 24, 24)


def test_redistributions_of_dtensors(mesh):
    tensor = DTensor.from_local(torch.ones(2, 8), mesh, [Replicate(), Shard(0)])
    partial = DTensor.from_local(torch.ones(2, 8), mesh, [Replicate(), Partial()])
    with CommLog() as log:
        tensor.full_tensor()
        partial.redistribute(mesh, [Replicate(), Replicate()]).to_local() + 1
        partial.redistribute(mesh, [Replicate(), Shard(1)]).to_local() + 1
    log.assert_counts({"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1})
    assert [call.wire_bytes for call in log.calls] == [192, 96, 48]
    assert log.bytes() == 256 + 64 + 64
    assert log.bytes("all_gather") == 256
    assert log.wire_bytes() == 336
    assert log.wire_bytes("all_reduce") == 96
    assert {call.group for call in log.calls} == {mesh.get_group("tp").group_name}


def test_a_plain_collective_among_several_groups_has_an_unknown_group(mesh):
    with CommLog() as log:
        dist.all_reduce(torch.ones(2), group=mesh.get_group("dp"))
        dist.all_reduce(torch.ones(2))
    assert [(call.group, call.wire_bytes) for call in log.calls] == [(None, None)] * 2
    with pytest.raises(ValueError, match=r"\[all_reduce 8 B -> 8 B float32 \(unknown group\)\]"):
        log.wire_bytes()


def test_a_group_that_is_gone_at_the_end_keeps_its_name():
    with CommLog() as log, fake_mesh((2,)) as mesh:
        funcol.wait_tensor(funcol.all_reduce(torch.ones(2), "sum", mesh))
    assert (only(log).group, only(log).group_size) == ("0", None)


def test_coalesced_collectives_are_one():
    with fake_mesh((4,)):
        with CommLog() as log, dist._coalescing_manager():
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(5))
        assert only(log).input_bytes == 32
        with CommLog() as log:
            group = dist.distributed_c10d._get_default_group()
            group.reduce_scatter_tensor_coalesced(
                [torch.ones(1), torch.ones(2).double()], [torch.ones(4), torch.ones(8).double()]
            )
        assert (only(log).input_bytes, only(log).output_bytes) == (80, 20)
        assert only(log).dtype == "mixed"


def test_barriers_count_only_when_asked():
    with fake_mesh((2,)), CommLog() as log:
        dist.barrier()
        dist.all_reduce(torch.ones(1))
    assert log.counts() == {"all_reduce": 1}
    assert log.counts(barriers=True) == {"barrier": 1, "all_reduce": 1}
    log.assert_counts({"all_reduce": 1})
    log.assert_counts({"all_reduce": 1, "barrier": 1}, barriers=True)


def test_other_threads_are_seen_and_order_is_that_of_issue():
    with fake_mesh((2,)), CommLog() as log:
        dist.all_reduce(torch.ones(1))
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)))
        thread.start()
        thread.join()
        dist.all_reduce(torch.ones(3))
    assert [call.input_bytes for call in log.calls] == [4, 8, 12]


def test_nothing_but_collectives_is_recorded(mesh):
    with CommLog() as log:
        tensor = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0), Shard(1)])
        (tensor + tensor).redistribute(mesh, [Shard(0), Shard(1)])
    assert log.calls == ()
    assert log.counts() == {}
    assert log.bytes() == 0
    log.assert_counts({})


def test_no_mode_is_active_while_it_records(mesh):
    with CommLog():
        assert _get_current_dispatch_mode_stack() == []


# --- assertions fail, and say why


def test_assert_counts_fails_on_more_fewer_and_others():
    with fake_mesh((2,)), CommLog() as log:
        dist.all_reduce(torch.ones(1))
        dist.broadcast(torch.ones(2), 0)
    log.assert_counts({"all_reduce": 1, "broadcast": 1, "reduce": 0})
    for wrong in ({"all_reduce": 1}, {"all_reduce": 2, "broadcast": 1}, {}, {"all_gather": 1}):
        with pytest.raises(AssertionError) as caught:
            log.assert_counts(wrong)
        assert str(caught.value).endswith(
            "got {'all_reduce': 1, 'broadcast': 1}; in order:\n"
            "  0: all_reduce 4 B -> 4 B float32 (group 0 of 2)\n"
            "  1: broadcast 8 B -> 8 B float32 (group 0 of 2)"
        )


def test_assert_counts_says_when_nothing_ran():
    with CommLog() as log:
        pass
    with pytest.raises(AssertionError, match="in order:\n  nothing"):
        log.assert_counts({"all_reduce": 1})


def test_a_misspelt_op_is_refused():
    with CommLog() as log:
        pass
    with pytest.raises(ValueError, match="got \\['allreduce'\\]"):
        log.assert_counts({"allreduce": 0})


# --- misuse


def test_nesting_is_refused_and_harms_nothing():
    with fake_mesh((2,)):
        with CommLog() as log:
            dist.all_reduce(torch.ones(1))
            with pytest.raises(RuntimeError, match="expected no other active CommLog"), CommLog():
                pass
            dist.all_reduce(torch.ones(1))
        assert log.counts() == {"all_reduce": 2}


def test_a_log_is_used_once_and_read_after_its_block():
    log = CommLog()
    with log, pytest.raises(RuntimeError, match="expected a block that has ended"):
        _ = log.calls
    with pytest.raises(RuntimeError, match="expected an unused log"), log:
        pass
    with CommLog():
        pass


def test_somebody_elses_observer_is_respected(tmp_path):
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    observer.start()
    with pytest.raises(RuntimeError, match="expected no active execution trace"), CommLog():
        pass
    torch.ones(1).sqrt()
    observer.stop()
    observer.unregister_callback()
    assert "aten::sqrt" in (tmp_path / "trace.json").read_text()
    with CommLog():
        pass


def test_the_blocks_error_comes_through_and_the_record_is_kept():
    def fail():
        dist.all_reduce(torch.ones(1))
        raise KeyError

    log = CommLog()
    with fake_mesh((2,)), pytest.raises(KeyError), log:
        fail()
    assert log.counts() == {"all_reduce": 1}


def test_lists_that_torch_truncates_are_refused():
    with (
        fake_mesh((4097,)),
        pytest.raises(RuntimeError, match="expected at most 4096 tensors"),
        CommLog(),
    ):
        dist.all_gather([torch.ones(1)] * 4097, torch.ones(1))


def test_it_is_silent(capfd):
    with CommLog():
        torch.ones(1)
    assert capfd.readouterr() == ("", "")


# --- on ranks


def logged(step):
    with CommLog() as log:
        step()
    return log.calls


def tensors(call):
    return call.op, call.input_bytes, call.output_bytes


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def with_ddp():
    wrapped = DistributedDataParallel(model())
    return logged(lambda: wrapped(torch.ones(2, 4)).sum().backward())


def with_fsdp():
    wrapped = model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in wrapped:
        fully_shard(layer, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    return logged(lambda: wrapped(torch.ones(2, 4)).sum().backward())


@pytest.mark.ranks
def test_ddps_reducer():
    for calls in run_ranks(with_ddp, 2):
        assert [tensors(call) for call in calls] == [("all_reduce", 160, 160)]
        assert calls[0].wire_bytes == 160


@pytest.mark.ranks
def test_fsdp2():
    for calls in run_ranks(with_fsdp, 2):
        assert [call.op for call in calls] == ["all_gather"] * 4 + ["reduce_scatter"] * 2
        assert {tensors(call)[1:] for call in calls[:4]} == {(40, 80)}
        assert {tensors(call)[1:] for call in calls[4:]} == {(80, 40)}


@pytest.mark.ranks
def test_point_to_point_and_coalescing():
    def step():
        other = 1 - dist.get_rank()
        exchange = [
            dist.P2POp(dist.isend, torch.ones(3), other),
            dist.P2POp(dist.irecv, torch.ones(3), other),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(4))
        manager.wait()

    expected = [("send", 12, 0), ("recv", 0, 12), ("all_reduce", 28, 28)]
    for calls in run_ranks(lambda: logged(step), 2):
        assert [tensors(call) for call in calls] == expected


@pytest.mark.ranks
def test_work_that_ends_while_the_block_ends():
    # Without the wait in CommLog one block in fifty ended in a segmentation fault.
    def step():
        tensor = torch.ones(5)
        for _ in range(40):
            with CommLog() as log:
                time.sleep(0.02 * dist.get_rank())  # then rank 1 finds rank 0 there already
                work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            log.assert_counts({"all_reduce": 1})
        return tensor[0].item()

    assert run_ranks(step, 2) == [2.0**40] * 2


@pytest.mark.ranks
def test_groups_of_functional_collectives_are_right_after_gloos_own_nodes():
    # gloo ends its trace nodes on other threads; the trace's own parent links go wrong then.
    def step():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        order = ["tp", "dp", "dp", "tp", "dp"]
        with CommLog() as log:
            for name in order:
                funcol.wait_tensor(funcol.all_reduce(torch.ones(2), "sum", mesh.get_group(name)))
                dist.all_reduce(torch.ones(2))
        names = [mesh.get_group(name).group_name for name in order]
        got = [call.group for call in log.calls]
        assert got == [name for pair in zip(names, [None] * 5, strict=True) for name in pair]

    run_ranks(step, 4)


def test_a_collective_is_a_value():
    assert Collective("send", 1, 0, "int8") == Collective("send", 1, 0, "int8")
