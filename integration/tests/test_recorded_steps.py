"""What the recorder counts of a plan's step and of a pipeline is what real ranks send."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from fsdp.collectives.stages import GroupStage
from fsdp.simulate.events import CommEvent
from fsdp.simulate.recorder import EventRecorder, MemoryKind
from integration.scale.shapes import SHAPES, Depth
from integration.scale.traffic import sent_collective
from plan_api import parallelize, zoo
from testkit import CommLog, fake_mesh, run_ranks

LLAMA, MIXTRAL, *_ = SHAPES
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
# In other stages gradients are redistributed along the axes of the plan.
OF_GROUPS = (GroupStage.ALL_GATHER, GroupStage.REDUCE_SCATTER)
SEQUENCE, WIDTH, MICROBATCHES = 16, 8, 4


@dataclass(frozen=True)
class Case:
    """A mesh, the arguments of the zoo's plan of a model, and the axes that fully_shard shards."""

    axes: dict[str, int]
    plan: dict[str, Any]
    sharded: list[str] = field(default_factory=list)
    batch: int = 1
    shape: Any = LLAMA


CASES = {
    "EP": Case({"ep": 2}, {"tp": None, "dp": ["ep"], "ep": "ep"}, batch=2, shape=MIXTRAL),
    "TP+SP x FSDP": Case(
        {"dp": 2, "tp": 2}, {"dp": ["dp"], "sp": True, "loss_parallel": True}, ["dp"], batch=2
    ),
    "CP, ring": Case({"cp": 2}, {"tp": None, "cp": "cp", "cp_method": "ring"}),
    "CP, Ulysses": Case({"cp": 2}, {"tp": None, "cp": "cp", "cp_method": "ulysses"}),
    "CP, all-gather x FSDP": Case(
        {"dp": 2, "cp": 2},
        {"tp": None, "dp": ["dp"], "cp": "cp", "cp_method": "all-gather"},
        ["dp"],
        batch=2,
    ),
}


def _parallelized(case, mesh):
    """Returns the model on meta."""
    plan = getattr(zoo, case.shape.zoo)(mesh, **case.plan)
    if case.sharded:
        plan.fully_shard(r"model\.layers\.\d+", case.sharded)
        plan.fully_shard("", case.sharded)
    depth = Depth(2, 0) if case.shape is LLAMA else Depth(0, 2)
    model = replace(case.shape, extra=TINY).build(depth).to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(_route_evenly)
    return parallelize(model, plan, src_data_rank=None)


def _route_evenly(module, args):
    """Chooses experts in turn; what a router chooses depends on data."""
    hidden, index, weights = args
    local = getattr(index, "_local_tensor", index)
    chosen = torch.arange(local.numel()) % TINY["num_local_experts"]
    return hidden, chosen.view(local.shape), weights


def _step(model, case):
    model.zero_grad()
    tokens = torch.zeros(case.batch, SEQUENCE, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()


def _storage_bytes(tensors):
    """Bytes of the storages of local tensors; storages that tensors share count once."""
    storages = [getattr(one, "_local_tensor", one).untyped_storage() for one in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _real(case):
    """Calls and bytes by operation of the second step, and bytes of parameters and gradients."""
    mesh = init_device_mesh("cpu", tuple(case.axes.values()), mesh_dim_names=tuple(case.axes))
    model = _parallelized(case, mesh).to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    _step(model, case)
    with CommLog() as log:
        _step(model, case)
    grads = [param.grad for param in model.parameters()]
    return _totals(log.calls), _storage_bytes(model.parameters()), _storage_bytes(grads)


def _totals(calls):
    """Calls and bytes by operation; the bytes are the larger of input and output."""
    found = defaultdict(lambda: (0, 0))
    for one in calls:
        number, nbytes = found[one.op]
        found[one.op] = (number + 1, nbytes + max(one.input_bytes, one.output_bytes))
    return dict(found)


def _comms(recorder):
    return [event for event in recorder.events if isinstance(event, CommEvent)]


def _recorded(case):
    """What `_real` returns, of rank 0 of a fake world; and what its groups of fully_shard send."""
    with fake_mesh(tuple(case.axes.values()), tuple(case.axes)) as mesh:
        model = _parallelized(case, mesh)
        with EventRecorder() as recorder:
            recorder.watch(model.to_empty(device="cpu"))
            for _ in range(2):
                recorder.start_step()
                _step(model, case)
                recorder.finish_step()
        allocated = [
            recorder.allocated(kind) for kind in (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS)
        ]
    of_groups = [one for one in _comms(recorder) if one.during and one.during.stage in OF_GROUPS]
    own = [event for event in _comms(recorder) if event not in of_groups]
    return (_totals(own), *allocated), sum(sent_collective(one).wire_bytes for one in of_groups)


FAST = ("EP", "TP+SP x FSDP")


def _marks(name):
    """One case of a single axis, and one of a product on four ranks, are in the fast tier."""
    return [] if name in FAST else [pytest.mark.slow]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=_marks(name)) for name, case in CASES.items()]
)
def test_a_plan_sends_what_is_recorded(case):
    real, *_ = run_ranks(_real, torch.Size(case.axes.values()).numel(), case, timeout=180)
    recorded, of_groups = _recorded(case)
    if case.sharded:  # on gloo the buffers of groups are exchanged by sends
        _, sent = real[0].pop("send")
        real[0].pop("recv")
        assert of_groups == sent
    assert recorded == real


# A pipeline.

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class StaticStage(PipelineStage):
    """A stage whose shapes are given: it asks no other rank, which a fake world has not.

    Since 2.13 the ranks of a pipeline vote in the first step whether all shapes are given.
    """

    def _warmup_forward_vote(self, *args, **kwargs):
        return torch.ones(1, dtype=torch.int32)

    _warmup_backward_result = _warmup_forward_vote


def _run_pipeline(schedule, number, group):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    example = torch.zeros(2, WIDTH)
    moved = example.clone().requires_grad_()  # between the stages
    stage = StaticStage(
        module, number, 2, torch.device("cpu"),
        input_args=(moved if number else example,),
        output_args=(moved,),
        group=group,
    )  # fmt: skip
    run = SCHEDULES[schedule](
        stage, n_microbatches=MICROBATCHES, loss_fn=lambda out, y: (out - y).square().mean()
    )
    whole = torch.zeros(2 * MICROBATCHES, WIDTH)
    return lambda: run.step(whole) if number == 0 else run.step(target=whole)


def _real_pipeline(schedule):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    step = _run_pipeline(schedule, mesh.get_local_rank(), mesh.get_group())
    step()
    with CommLog() as log:
        step()
    return _totals(log.calls)


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_sends_what_is_recorded(schedule):
    for rank, real in enumerate(run_ranks(_real_pipeline, 2, schedule)):
        with fake_mesh((2,), ("pp",), rank=rank) as mesh, EventRecorder() as recorder:
            step = _run_pipeline(schedule, rank, mesh.get_group())
            step()
            recorder.start_step()
            step()
            recorder.finish_step()
        recorded = _totals(_comms(recorder))
        assert recorded == real
        assert recorded["send"] == (MICROBATCHES, 4 * 2 * WIDTH * MICROBATCHES)
