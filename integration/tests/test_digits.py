import pytest
import torch

from integration.data import BatchLoader, BatchPlan, Digits, Modality, load_samples, require_source
from integration.data.digits import CLASSES, TIMES
from integration.errors import UsageError


def step(degree, rank, *, seed=0, skip=0):
    plan = BatchPlan(global_batch=16, micro_batch=2, degree=degree)
    loader = BatchLoader(Digits(seed), plan, rank=rank, seed=seed)
    loader.load_state_dict({"step": skip})
    batches = next(loader)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def rows(batch):
    """What tells samples apart, in an order that does not depend on ranks."""
    order = batch["noise"].flatten(1)[:, 0].argsort()
    return {name: each[order] for name, each in batch.items()}


def test_a_sample_is_an_image_with_its_class_a_time_and_noise():
    batch = step(1, 0)
    assert batch["x"].shape == batch["noise"].shape == (16, 1, 8, 8)
    assert batch["x"].min() == -1
    assert batch["x"].max() == 1
    assert batch["t"].min() >= 0
    assert batch["t"].max() < TIMES
    assert len(batch["t"].unique()) > 10
    assert abs(batch["noise"].std() - 1) < 0.1
    assert abs(batch["noise"].mean()) < 0.1


def test_times_and_noise_are_the_same_however_ranks_share_a_batch_and_after_a_resume():
    whole = rows(step(1, 0, skip=2))
    parts = [step(4, rank, skip=2) for rank in range(4)]
    shared = rows({name: torch.cat([part[name] for part in parts]) for name in whole})
    assert all(torch.equal(whole[name], shared[name]) for name in whole)


def test_the_seed_decides_and_so_does_the_place_in_the_run():
    first = step(1, 0)
    assert not torch.equal(first["noise"], step(1, 0, seed=1)["noise"])
    assert not torch.equal(first["noise"], step(1, 0, skip=1)["noise"])


def test_an_image_has_its_own_class_or_none_in_one_of_ten():
    digits = Digits(seed=3)
    given = torch.stack([digits.sample(5, draw)["y"] for draw in range(1000)])
    own = given[given != CLASSES].unique()
    assert own.tolist() == [5]  # the images begin with 0, 1, 2, ...
    assert 0.07 < (given == CLASSES).float().mean() < 0.13


def test_a_batch_of_more_images_than_there_are_is_refused():
    plan = BatchPlan(global_batch=2000, micro_batch=2, degree=1)
    with pytest.raises(UsageError, match=r"expected at most 1797, .* got 2000"):
        BatchLoader(Digits(0), plan, rank=0, seed=0)


def test_a_path_of_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="this model trains on scikit-learn's handwritten digits"):
        require_source(Modality.DIGITS, tmp_path)
    assert isinstance(load_samples(Modality.DIGITS, None, sequence_length=1, seed=0), Digits)
