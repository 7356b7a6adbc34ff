"""Owners of matrices: balanced work, and most of the matrix on its owner."""

import random

from fsdp.optim.matrix.assignment import MatrixLoad, choose_owners
from fsdp.optim.muon.newton_schulz import newton_schulz_cost


def test_owners_have_equal_work_and_most_of_their_matrices():
    """Largest first; fixed owners do not change, and their work counts."""
    splits = [(1, 9), (2, 8), (3, 7), (9, 1)]
    assert choose_owners([MatrixLoad(5, split) for split in splits], [0, 0]) == [1, 1, 0, 0]
    fixed = MatrixLoad(3, (9, 0), fixed_owner=0)
    assert choose_owners([fixed, MatrixLoad(3, (8, 1)), MatrixLoad(6, (9, 0))], [0, 0]) == [0, 0, 1]


def test_busiest_rank_exceeds_an_equal_share_by_one_matrix_at_most():
    draw = random.Random(0)
    for _ in range(50):
        ranks = draw.randint(1, 9)
        loads = [
            MatrixLoad(draw.randint(1, 99), tuple(draw.randint(0, 9) for _ in range(ranks)))
            for _ in range(draw.randint(0, 30))
        ]
        busy = [0] * ranks
        for load, owner in zip(loads, choose_owners(loads, [0] * ranks), strict=True):
            busy[owner] += load.cost
        work = [load.cost for load in loads]
        assert max(busy) <= sum(work) / ranks + max(work, default=0)


def test_newton_schulz_cost_counts_multiplications():
    assert newton_schulz_cost((2, 5)) == newton_schulz_cost((5, 2)) == 2 * 2 * 2 * 5 + 2**3
