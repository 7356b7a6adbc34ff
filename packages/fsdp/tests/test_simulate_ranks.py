"""Simulations are validated against real steps on gloo ranks: memory, collectives and bytes."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp
from dbuffer import DBuffer
from fsdp.optim import Adam8bit
from fsdp.simulate import Link, probe, simulate
from testkit import CommLog, models, run_ranks
from testkit.inspection.memory import peak_bytes

pytestmark = pytest.mark.ranks

LAYERS, VOCABULARY = 3, 512
UNITS = r"model\.layers\.\d+"


@dataclass(frozen=True)
class Case:
    """A mesh, the options of `fully_shard`, an optimizer and a model."""

    mesh: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = torch.optim.AdamW
    model: Any = models.llama

    @property
    def ranks(self):
        return torch.Size(self.mesh).numel()


BF16 = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CASES = {
    "2 ranks": Case((2,)),
    "4 ranks": Case((4,)),
    "HSDP of 2 x 2": Case((2, 2)),
    "DDP": Case((4,), {"placements": "ddp"}),
    "ZeRO-1": Case((2,), {"placements": "zero1"}),
    "ZeRO-2": Case((4,), {"placements": "zero2"}),
    "HFSDP of 2 x 2": Case((2, 2), {"placements": "hfsdp"}),
    "never resharded": Case((2,), {"reshard_after_forward": False}),
    "gathered from 2 of 4 in backward": Case((4,), {"reshard_after_forward": 2}),
    "bfloat16, rows, 8-bit Adam": Case(
        (4,),
        {
            "mp_policy": BF16,
            "shard_placement_fn": lambda p: fsdp.Rows(24) if p.ndim == 2 else fsdp.Whole(),
        },
        lambda params: Adam8bit(params, block_size=64, min_8bit_size=0),
    ),
    "Mixtral, experts stacked": Case((2,), model=models.mixtral),
}  # fmt: skip
SLOW = (
    "4 ranks",
    "HSDP of 2 x 2",
    "DDP",
    "ZeRO-2",
    "HFSDP of 2 x 2",
    "bfloat16, rows, 8-bit Adam",
    "never resharded",
    "gathered from 2 of 4 in backward",
    "Mixtral, experts stacked",
)


def _build(case):
    return case.model(num_hidden_layers=LAYERS, hidden_size=64, vocab_size=VOCABULARY)


def _forward(model):
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, 32))
    return model(input_ids=ids, labels=ids).loss


def _local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage_bytes(tensors):
    """Bytes of the storages of local tensors; storages that tensors share count once."""
    storages = [_local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def _counted_collectives():
    """Counts the collectives of buffers, by operation and number of ranks."""
    counts, originals = Counter(), dict(vars(DBuffer))
    for op in ("all_gather", "reduce_scatter", "all_reduce"):

        def call(self, *args, _op=op, **kwargs):
            axis = args[0] if _op == "all_reduce" else self.shard_axis
            counts[_op, self.mesh.size(axis)] += 1
            return originals[f"{_op}_"](self, *args, **kwargs)

        setattr(DBuffer, f"{op}_", call)
    try:
        yield counts
    finally:
        for op in ("all_gather_", "reduce_scatter_", "all_reduce_"):
            setattr(DBuffer, op, originals[op])


@dataclass(frozen=True)
class Measured:
    """What a real step took on a rank, and the rank's index among those of a replica."""

    memory: dict[str, int]
    peak: int
    collectives: dict[tuple[str, int], int]
    sent: int
    rank: int


def _measure(case, model):
    """Shards a model, trains it for two steps and measures the third."""
    mesh = init_device_mesh("cpu", case.mesh)
    for layer in model.model.layers:
        fsdp.fully_shard(layer, mesh=mesh, **case.options)
    fsdp.fully_shard(model, mesh=mesh, **case.options)
    optimizer = case.optimizer(model.parameters())

    def backward():
        _forward(model).backward()

    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = peak_bytes(backward)[0]
    memory = _memory(model, optimizer)
    optimizer.zero_grad()
    with _counted_collectives() as counts, CommLog() as log:
        backward()
    mesh = next(model.parameters()).device_mesh  # HFSDP: of all ranks, in another order
    rank = mesh.get_local_rank(mesh.ndim - 1)
    return Measured(memory, peak, dict(counts), log.bytes("send"), rank)


def _memory(model, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": _storage_bytes(model.parameters()),
        "gradients": _storage_bytes(param.grad for param in model.parameters()),
        "optimizer": sum(_local(one).nbytes for one in states if isinstance(one, torch.Tensor)),
        "buffers": _storage_bytes(model.buffers()),
    }


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASES[name], id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in CASES
    ],
)
def test_memory_and_collectives_are_those_of_a_real_step(case):
    def check():
        model = _build(case)
        predicted = simulate(
            model, mesh=case.mesh, units=UNITS, optimizer=case.optimizer, forward=_forward,
            exchange=True, **case.options,
        )  # fmt: skip
        return predicted, _measure(case, model)

    for predicted, measured in run_ranks(check, case.ranks):
        expected, memory = predicted.memory, measured.memory
        assert memory["parameters"] == expected.parameters
        assert memory["gradients"] == expected.gradients
        assert memory["buffers"] == expected.buffers
        # A rank's fraction of a state whose last block is shorter is not a whole number of bytes.
        by_rank = predicted.optimizer_by_rank[measured.rank]
        assert memory["optimizer"] == pytest.approx(by_rank, rel=1e-3)
        assert memory["optimizer"] <= 1.001 * expected.optimizer
        if case.optimizer is torch.optim.AdamW:
            assert memory["optimizer"] == by_rank
        assert measured.peak == pytest.approx(expected.worst.total, rel=0.05)
        counts = {(one.op, one.ranks): one.count for one in predicted.collectives}
        assert measured.collectives == counts
        assert measured.sent == sum(one.sent for one in predicted.collectives)


def test_native_collectives_have_the_same_counts_and_bytes():
    def check():
        model = models.llama(num_hidden_layers=LAYERS)
        predicted = simulate(model, mesh=2, units=UNITS)
        for layer in model.model.layers:
            fsdp.fully_shard(layer, strategy="native")
        fsdp.fully_shard(model, strategy="native")
        ids = torch.zeros(1, 4, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        with CommLog() as log:
            model(input_ids=ids, labels=ids).loss.backward()
        return predicted, log.counts(), log.bytes("all_gather"), log.bytes("reduce_scatter")

    for predicted, counts, gathered, reduced in run_ranks(check, 2):
        assert counts == {one.op: one.count for one in predicted.collectives}
        assert [gathered, reduced] == [one.nbytes for one in predicted.collectives]


def test_constants_of_a_probe_predict_the_step_that_it_measured():
    def check():
        model = models.llama(num_hidden_layers=LAYERS)
        before = [param.detach().clone() for param in model.parameters()]
        found = probe(
            model, lambda m: _small_loss(m), units=UNITS, sizes=(2**10, 2**13, 2**16), rounds=2
        )
        predicted = simulate(
            model, mesh=2, units=UNITS, forward=_small_loss, constants=found.constants
        ).time
        assert all(map(torch.equal, model.parameters(), before))
        assert all(param.grad is None for param in model.parameters())
        return found, predicted

    first, second = run_ranks(check, 2)
    for found, predicted in (first, second):
        assert found.constants == first[0].constants  # means over ranks
        assert predicted.total == pytest.approx(found.step)
        assert min(predicted.compute, predicted.gather, predicted.reduce, predicted.update) > 0
        assert isinstance(found.constants.links, Link)
        assert len(found.gather.points) == len(found.update.points) == 3


def _small_loss(model):
    ids = torch.zeros(1, 8, dtype=torch.long)
    return model(input_ids=ids, labels=ids).loss


def test_probe_expects_one_axis_and_two_sizes():
    def check():
        mesh = init_device_mesh("cpu", (1, 2))
        with pytest.raises(ValueError, match="mesh of 2 axes"):
            probe(models.llama(), _small_loss, units=UNITS, mesh=mesh)
        with pytest.raises(ValueError, match=r"sizes=\(8, 8\)"):
            probe(models.llama(), _small_loss, units=UNITS, sizes=(8, 8))

    run_ranks(check, 2)
