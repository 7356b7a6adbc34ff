"""What is recorded of a step: memory by kind, stages in order, collectives outside of groups."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp
from fsdp.collectives.stages import GroupStage, group_stage, listen_to_stages
from fsdp.simulate.events import CommEvent, ComputeWork, StageEvent
from fsdp.simulate.recorder import EventRecorder, MemoryKind
from testkit import fake_mesh

WIDTH, ROWS = 32, 8
NBYTES = 4 * WIDTH * WIDTH  # of a matrix


def _two_linears():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])


def _recorded(shard, mesh, prepare=lambda model, recorder: None):
    """Records the second step of two Linears on fake tensors."""
    recorder = EventRecorder()
    with recorder:
        with torch.device("meta"):
            model = _two_linears()
        model = shard(model, mesh).to_empty(device="cpu")
        recorder.watch(model)
        prepare(model, recorder)
        for _ in range(2):
            model.zero_grad()
            recorder.start_step()
            model(torch.zeros(ROWS, WIDTH)).sum().backward()
            recorder.finish_step()
        return recorder, {kind: recorder.allocated(kind) for kind in MemoryKind}


def _fully_sharded(model, mesh):
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh, strategy="native")
    return fsdp.fully_shard(model, mesh=mesh, strategy="native")


def _tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def _comms(recorder):
    return [event for event in recorder.events if isinstance(event, CommEvent)]


def test_stages_of_a_step_are_in_the_order_of_the_state_machine():
    with fake_mesh((4,)) as mesh:
        recorder, _ = _recorded(_fully_sharded, mesh)
    stages = [event.stage for event in recorder.events if isinstance(event, StageEvent)]
    forward = [GroupStage.ALL_GATHER, GroupStage.ALL_GATHER_WAIT, GroupStage.ALL_GATHER]
    assert stages[:3] == forward  # the second layer is prefetched
    assert stages.count(GroupStage.ALL_GATHER) == stages.count(GroupStage.ALL_GATHER_WAIT) == 4
    assert stages.count(GroupStage.RESHARD) == 4
    last = [GroupStage.ASSIGN_GRADS, GroupStage.REDUCE_SCATTER_WAIT]
    assert stages[-2:] == last
    issued = [(event.op, event.during.stage) for event in _comms(recorder)]
    assert set(issued) == {
        ("all_gather", GroupStage.ALL_GATHER),
        ("reduce_scatter", GroupStage.REDUCE_SCATTER),
    }


def test_memory_by_kind_of_fully_shard():
    with fake_mesh((4,)) as mesh:
        recorder, allocated = _recorded(_fully_sharded, mesh)
    assert allocated[MemoryKind.PARAMETERS] == allocated[MemoryKind.GRADIENTS] == 2 * NBYTES // 4
    assert allocated[MemoryKind.GATHERED] == allocated[MemoryKind.REDUCING] == 0
    # The first layer was prefetched when the second one's gradient is there.
    assert recorder.worst[MemoryKind.GATHERED] == 2 * NBYTES
    flops = sum(event.flops for event in recorder.events if isinstance(event, ComputeWork))
    assert flops == 5 * 2 * ROWS * WIDTH * WIDTH  # the input needs no gradient


def _work(compute):
    """The work of operators on a fake tensor of 64 elements."""
    with EventRecorder() as recorder:
        tensor = torch.zeros(8, 8)
        recorder.start_step()
        compute(tensor)
        recorder.finish_step()
    found = [event for event in recorder.events if isinstance(event, ComputeWork)]
    return sum(found, ComputeWork())


def test_operators_without_a_kernel_read_no_memory_and_queries_are_no_operators():
    assert _work(lambda tensor: tensor.device) == ComputeWork()
    for alone in (
        torch.t,
        torch.empty_like,
        lambda tensor: tensor.new_empty(4),
        lambda tensor: torch.ops.aten._unsafe_view(tensor, [64]),
    ):
        assert _work(alone) == ComputeWork(ops=1)
    assert _work(torch.neg) == ComputeWork(nbytes=2 * 4 * 64, ops=1)


def test_gradients_in_the_memory_of_parameters_count_as_reducing():
    seen = []

    def observe(model, recorder):
        kinds = (MemoryKind.GATHERED, MemoryKind.REDUCING)
        model[1].set_all_reduce_hook(lambda _: seen.append([*map(recorder.allocated, kinds)]))

    with fake_mesh((4,)) as mesh:
        _recorded(_fully_sharded, mesh, observe)
    assert seen == [[NBYTES, NBYTES]] * 2  # the first layer is gathered


def test_memory_peaks_where_gradients_are_copied_to_a_larger_dtype():
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def shard(model, mesh):
        return fsdp.fully_shard(model, mesh=mesh, mp_policy=policy, strategy="native")

    with fake_mesh((4,)) as mesh:
        recorder, _ = _recorded(shard, mesh)
    assert recorder.worst[MemoryKind.REDUCING] == 2 * NBYTES
    assert recorder.worst[MemoryKind.GATHERED] == 0  # freed before
    assert recorder.worst[MemoryKind.ACTIVATIONS] >= NBYTES  # gradients in bfloat16


def test_collectives_and_gradients_of_tensor_parallelism():
    with fake_mesh((2,)) as mesh:
        recorder, allocated = _recorded(_tensor_parallel, mesh)
    assert allocated[MemoryKind.PARAMETERS] == allocated[MemoryKind.GRADIENTS] == NBYTES
    (reduced,) = _comms(recorder)
    assert (reduced.op, reduced.ranks, reduced.during) == ("all_reduce", 2, None)
    assert reduced.input_bytes == 4 * ROWS * WIDTH


def test_memory_before_the_recorder_is_not_counted():
    outside = torch.zeros(16, 16)
    with EventRecorder() as recorder:
        view = outside.t()
        inside = view + 1
        assert recorder.allocated(MemoryKind.ACTIVATIONS) == inside.nbytes
        del inside
        assert recorder.allocated(MemoryKind.ACTIVATIONS) == 0
        assert recorder.worst[MemoryKind.ACTIVATIONS] == outside.nbytes


def test_tensors_on_meta_need_no_memory():
    with EventRecorder() as recorder:
        torch.empty(1024, 1024, device="meta").stride()  # as for the strides of a DTensor
        made = torch.zeros(16, 16) + 1
    assert recorder.allocated(MemoryKind.ACTIVATIONS) == made.nbytes
    assert recorder.worst[MemoryKind.ACTIVATIONS] == 2 * made.nbytes


def test_the_most_of_each_kind_is_at_its_own_point():
    with EventRecorder() as recorder:
        activations = torch.zeros(16, 16)
        recorder.set_kind([activations], MemoryKind.GRADIENTS)
        torch.zeros(8, 8)
    assert recorder.most[MemoryKind.ACTIVATIONS] == 4 * 16 * 16
    assert recorder.most[MemoryKind.GRADIENTS] == 4 * 16 * 16
    assert sum(recorder.worst.values()) == 4 * (16 * 16 + 8 * 8)


def test_sends_and_receives_are_recorded():
    with fake_mesh((2,)), EventRecorder() as recorder:
        work = [dist.isend(torch.zeros(8), 1), dist.irecv(torch.empty(4), 1)]
        assert all(one is not None for one in work)
        sent, received = _comms(recorder)
    assert (sent.op, sent.input_bytes, sent.output_bytes) == ("send", 32, 0)
    assert (received.op, received.input_bytes, received.output_bytes) == ("recv", 0, 16)


def test_a_dtensor_is_recorded_by_its_local_operators():
    with fake_mesh((2,)) as mesh, EventRecorder() as recorder:
        tensor = distribute_tensor(torch.empty(4, 4), mesh, [Shard(0)], src_data_rank=None)
        recorder.set_kind([tensor], MemoryKind.PARAMETERS)
        assert isinstance(tensor, DTensor)
        assert recorder.allocated(MemoryKind.PARAMETERS) == 32
        del tensor
        gc.collect()
        assert recorder.allocated(MemoryKind.PARAMETERS) == 0


def test_listeners_are_restored_after_an_error():
    heard = []

    class Listener:
        def begin_stage(self, stage, collective):
            heard.append((stage, collective))

        def end_stage(self, stage, collective):
            heard.append(None)

    listening = listen_to_stages(Listener())
    with pytest.raises(RuntimeError), listening, group_stage(GroupStage.RESHARD, "one"):
        raise RuntimeError
    with group_stage(GroupStage.RESHARD, "two"):
        pass
    assert heard == [(GroupStage.RESHARD, "one")]


def test_memory_that_is_resized_within_a_stage_counts_at_its_largest():
    collective, nbytes = object(), 4096
    with EventRecorder() as recorder:
        with group_stage(GroupStage.ALL_GATHER, collective):
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        buffer.untyped_storage().resize_(0)
        with group_stage(GroupStage.RESHARD, collective):
            recorder.start_step()
            buffer.untyped_storage().resize_(3 * nbytes)
            torch.empty(0)  # sizes are read at operators
            buffer.untyped_storage().resize_(0)
        assert recorder.worst[MemoryKind.GATHERED] == 3 * nbytes
        assert recorder.allocated(MemoryKind.GATHERED) == 0
