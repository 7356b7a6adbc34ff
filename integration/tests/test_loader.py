from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from integration.data import BatchLoader, BatchPlan, TextWindows
from integration.errors import UsageError

LENGTH = 8


class Repeated:
    """Tokens of which every one of window w is w: a sample tells which window it is."""

    unit = "bytes"

    def __init__(self, windows):
        self.tokens = np.arange(windows, dtype=np.uint8).repeat(LENGTH)

    def __len__(self):
        return len(self.tokens)

    def read(self, start, stop):
        return self.tokens[start:stop]


def corpus(windows):
    stream = Repeated(windows)
    return TextWindows(stream, LENGTH, source="made up", size=len(stream), fingerprint="0")


def plan(*, global_batch=8, micro=2, degree=1):
    return BatchPlan(global_batch=global_batch, micro_batch=micro, degree=degree)


def windows_of_step(data, batch_plan, *, seed=0, steps=1, skip=0):
    """Per step, the windows that each rank sees, as [step][rank] lists."""
    loaders = [
        BatchLoader(data, batch_plan, rank=rank, seed=seed) for rank in range(batch_plan.degree)
    ]
    for loader in loaders:
        loader.load_state_dict({"step": skip})
    return [
        [
            [int(row[0]) for batch in next(loader) for row in batch["input_ids"]]
            for loader in loaders
        ]
        for _ in range(steps)
    ]


@given(
    degree=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2]),
    accumulation=st.sampled_from([1, 2, 3]),
    windows=st.integers(24, 60),
    seed=st.integers(0, 5),
)
def test_ranks_are_disjoint_and_together_the_same_batch_at_every_degree(
    degree, micro, accumulation, windows, seed
):
    data = corpus(windows)
    size = micro * accumulation * degree
    cut = plan(global_batch=size, micro=micro, degree=degree)
    whole = plan(global_batch=size, micro=1, degree=1)
    for per_rank, reference in zip(
        windows_of_step(data, cut, seed=seed, steps=6),
        windows_of_step(data, whole, seed=seed, steps=6),
        strict=True,
    ):
        # The multiset is that of one device; within an epoch no window occurs twice.
        assert sorted(chain(*per_rank)) == sorted(chain(*reference))
        assert {len(rank) for rank in per_rank} == {size // degree}


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order():
    data = corpus(24)
    steps = windows_of_step(data, plan(global_batch=8, micro=4, degree=2), steps=6)
    flat = [window for step in steps for rank in step for window in rank]
    assert sorted(flat[:24]) == sorted(flat[24:]) == list(range(24))
    assert flat[:24] != flat[24:]


def test_resuming_at_another_degree_continues_the_stream():
    data = corpus(40)
    straight = windows_of_step(data, plan(degree=1), steps=5)
    resumed = windows_of_step(data, plan(degree=4), steps=2, skip=3)
    for expected, actual in zip(straight[3:], resumed, strict=True):
        assert sorted(chain(*expected)) == sorted(chain(*actual))


def test_the_seed_decides_the_order():
    data = corpus(40)
    first, again, other = (windows_of_step(data, plan(), seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def test_microbatches_have_the_shape_and_dtype_the_model_takes():
    batches = next(BatchLoader(corpus(16), plan(micro=2, degree=2), rank=1, seed=0))
    assert len(batches) == 2
    for batch in batches:
        assert {name: tuple(each.shape) for name, each in batch.items()} == {
            "input_ids": (2, LENGTH),
            "labels": (2, LENGTH),
        }
        assert {each.dtype for each in batch.values()} == {torch.int64}
        assert torch.equal(batch["input_ids"], batch["labels"])


def test_one_loader_yields_the_microbatches_of_all_ranks_concatenated():
    shared = plan(global_batch=16, micro=2, degree=4)
    whole = next(BatchLoader(corpus(16), shared.of_all_ranks(), rank=0, seed=3))
    ranks = [next(BatchLoader(corpus(16), shared, rank=rank, seed=3)) for rank in range(4)]
    assert len(whole) == shared.accumulation == 2
    for microbatch, batch in enumerate(whole):
        parts = [rank[microbatch]["input_ids"] for rank in ranks]
        assert torch.equal(batch["input_ids"], torch.cat(parts))


def test_a_batch_that_cannot_be_cut_is_refused_with_its_numbers():
    with pytest.raises(
        UsageError, match=r"global batch 8 .*micro batch 3 .*degree 2.*multiple of 6"
    ):
        plan(micro=3, degree=2)


@pytest.mark.parametrize("field", ["global_batch", "micro_batch", "degree"])
def test_sizes_below_one_are_refused(field):
    sizes = {"global_batch": 4, "micro_batch": 1, "degree": 1, field: 0}
    with pytest.raises(UsageError, match=f"{field} is 0"):
        BatchPlan(**sizes)


def test_data_shorter_than_a_batch_is_refused():
    with pytest.raises(UsageError, match=r"the data has 56 bytes, fewer than the 64"):
        BatchLoader(corpus(7), plan(), rank=0, seed=0)


def test_a_rank_outside_the_degree_is_refused():
    with pytest.raises(ValueError, match="rank 2 is outside the degree 2"):
        BatchLoader(corpus(16), plan(degree=2), rank=2, seed=0)
