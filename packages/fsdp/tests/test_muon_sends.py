"""What Muon sends and who does the work: an owner a matrix, in buckets, nothing where whole."""

import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from fsdp import Block, Whole, fully_shard
from fsdp.optim import Muon
from fsdp.optim.matrix.assignment import MatrixLoad, assign_owners, choose_owners
from fsdp.optim.matrix.exchange import compute_on_owners
from fsdp.optim.matrix.matrices import matrices_of as matrices_in
from fsdp.optim.muon.newton_schulz import newton_schulz_cost
from ragged_shard import RaggedShard
from testkit import CommLog, run_ranks
from testkit.models.matrix_net import (
    matrices_of,
    optimizer_of,
    sharded,
    train,
)


def test_owners_have_equal_work_and_what_they_hold():
    """Largest first; what is fixed stays, and counts."""
    even = choose_owners(
        [
            MatrixLoad(5, (1, 9)),
            MatrixLoad(5, (2, 8)),
            MatrixLoad(5, (3, 7)),
            MatrixLoad(5, (9, 1)),
        ],
        2,
    )
    assert even == [1, 1, 0, 0]
    assert choose_owners(
        [MatrixLoad(3, (9, 0), fixed_owner=0), MatrixLoad(3, (8, 1)), MatrixLoad(6, (9, 0))], 2
    ) == [
        0,
        0,
        1,
    ]
    draw = random.Random(0)
    for _ in range(50):
        ranks = draw.randint(1, 9)
        loads = [
            MatrixLoad(draw.randint(1, 99), tuple(draw.randint(0, 9) for _ in range(ranks)))
            for _ in range(draw.randint(0, 30))
        ]
        busy = [0] * ranks
        for load, owner in zip(loads, choose_owners(loads, ranks), strict=True):
            busy[owner] += load.cost
        work = [load.cost for load in loads]
        assert max(busy) <= sum(work) / ranks + max(work, default=0)
    assert newton_schulz_cost((2, 5)) == newton_schulz_cost((5, 2)) == 2 * 2 * 2 * 5 + 2**3


def sent(granularity, **options):
    model = sharded(fully_shard, granularity)
    optimizer = optimizer_of(Muon, model, **options)
    train(model, optimizer, 1)
    model(torch.arange(6)).backward()
    with CommLog() as log:
        optimizer.step()
    return log, sum(param.numel() for _, param in matrices_of(model))


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_an_nth_of_what_gathering_everything_would(ranks):
    def check():
        log, elements = sent(Block(1))
        log.assert_counts({"all_reduce": 1, "all_to_all": 2})
        return log.wire_bytes("all_to_all"), elements

    found = run_ranks(check, ranks)
    total, naive = sum(own for own, _ in found), found[0][1] * 4 * (ranks - 1)
    assert 0 < total <= naive / ranks


@pytest.mark.ranks
def test_the_next_bucket_comes_while_the_present_one_iterates():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        values = [torch.randn(4, 3) for _ in range(5)]
        params = [distribute_tensor(v, mesh, [RaggedShard((0,), (1, 3))]) for v in values]
        params.append(distribute_tensor(values[0], mesh, [RaggedShard.owned_by(1, 2)]))
        tasks = assign_owners(
            [m for n, p in enumerate(params) for m in matrices_in(p, (4,), str(n), "Muon")],
            newton_schulz_cost,
        )
        events, results = [], {}

        def direction(task):
            events.append(f"gather {task.index}")
            return params[task.index].to_local().reshape(-1)[task.matrix.local_slice]

        def iterate(task, matrix):
            events.append(f"iterate {task.index}")
            return 2 * matrix

        def apply(task, part):
            results[task.index] = part

        with CommLog() as log:
            compute_on_owners(tasks, direction, iterate, apply, bucket_elements=24)  # two
        log.assert_counts({"all_to_all": 6})
        for number, part in results.items():
            assert torch.equal(part, 2 * params[number].to_local().reshape(-1))
        return events, [task.owner for task in tasks]

    found = run_ranks(check, 2)
    for rank, (events, owners) in enumerate(found):
        assert owners == [1, 1, 0, 0, 0, 1]  # where most of it is, and three for each
        first = ["gather 0", "gather 2"]  # of both owners
        home = ["gather 5", "iterate 5"] if rank == 1 else []  # meanwhile
        second = ["gather 1", "gather 3", f"iterate {(2, 0)[rank]}"]
        third = ["gather 4", f"iterate {(3, 1)[rank]}", *(["iterate 4"] if rank == 0 else [])]
        assert events == first + home + second + third


@pytest.mark.ranks
def test_whole_matrices_are_iterated_on_where_they_lie_and_nothing_is_sent():
    def check():
        log, _ = sent(Whole())
        log.assert_counts({})

    run_ranks(check, 2)
