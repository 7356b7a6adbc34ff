"""Matrices are gathered on their owners in buckets, overlapped with the computation."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from fsdp.optim.matrix.assignment import assign_owners
from fsdp.optim.matrix.exchange import compute_on_owners
from fsdp.optim.matrix.matrices import matrices_of
from fsdp.optim.muon.newton_schulz import newton_schulz_cost
from ragged_shard import RaggedShard
from testkit import CommLog, run_ranks


@pytest.mark.ranks
def test_next_bucket_is_gathered_while_owners_compute():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        values = [torch.randn(4, 3) for _ in range(5)]
        params = [distribute_tensor(v, mesh, [RaggedShard((0,), (1, 3))]) for v in values]
        params.append(distribute_tensor(values[0], mesh, [RaggedShard.owned_by(1, 2)]))
        tasks = assign_owners(
            [m for n, p in enumerate(params) for m in matrices_of(p, (4,), str(n), "Muon")],
            newton_schulz_cost,
        )
        events, results = [], {}

        def local_part(task):
            events.append(f"gather {task.index}")
            return params[task.index].to_local().reshape(-1)[task.matrix.local_slice]

        def compute(task, matrix):
            events.append(f"compute {task.index}")
            return 2 * matrix

        def apply(task, part):
            results[task.index] = part

        with CommLog() as log:
            compute_on_owners(tasks, local_part, compute, apply, bucket_elements=24)  # two matrices
        log.assert_counts({"all_to_all": 6})
        for index, part in results.items():
            assert torch.equal(part, 2 * params[index].to_local().reshape(-1))
        return events, [task.owner for task in tasks]

    found = run_ranks(check, 2)
    for rank, (events, owners) in enumerate(found):
        assert owners == [1, 1, 0, 0, 0, 1]  # most of the matrix, and three matrices each
        first = ["gather 0", "gather 2"]  # one of each owner
        unexchanged = ["gather 5", "compute 5"] if rank == 1 else []  # during the first gather
        second = ["gather 1", "gather 3", f"compute {(2, 0)[rank]}"]
        third = ["gather 4", f"compute {(3, 1)[rank]}", *(["compute 4"] if rank == 0 else [])]
        assert events == first + unexchanged + second + third
