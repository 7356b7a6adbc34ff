"""The learning rate over a run: warm-up, stable, decay; whatever a checkpoint holds."""

import pytest
import torch

from integration.train.learning_rate import LearningRateSchedule


def schedule(**options):
    parameter = torch.nn.Parameter(torch.ones(1))
    other = torch.nn.Parameter(torch.ones(1))
    groups = [{"params": [parameter], "lr": 2.0}, {"params": [other]}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    return optimizer, LearningRateSchedule(optimizer, **options)


@pytest.mark.parametrize(
    ("warmup", "decay", "shares"),
    [
        (0, 0, [1, 1, 1, 1, 1, 1]),
        (2, 0, [0.5, 1, 1, 1, 1, 1]),
        (0, 4, [1, 1, 1, 0.75, 0.5, 0.25]),
        (3, 3, [1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3]),
    ],
)
def test_it_rises_stays_and_falls(warmup, decay, shares):
    optimizer, found = schedule(steps=6, warmup=warmup, decay=decay)
    for step, share in enumerate(shares, 1):
        found.apply(step)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [2 * share, share]
        )


@pytest.mark.parametrize(
    ("warmup", "last", "shares"),
    [
        (0, 0.0, [1, 0.75, 0.25, 0]),
        (1, 0.0, [1, 0.75, 0.25, 0]),
        (2, 0.2, [0.5, 1, 0.6, 0.2]),
        (4, 0.5, [0.25, 0.5, 0.75, 1]),
    ],
)
def test_a_cosine_falls_from_the_last_step_of_warm_up_to_the_last_step(warmup, last, shares):
    _, found = schedule(steps=4, warmup=warmup, decay=0, cosine_to=last)
    assert [found.share(step) for step in range(1, 5)] == pytest.approx(shares)


def test_one_step_has_the_full_rate():
    _, found = schedule(steps=1, warmup=0, decay=0, cosine_to=0.1)
    assert found.share(1) == 1


def test_a_checkpoint_does_not_change_what_it_is_a_share_of():
    optimizer, found = schedule(steps=6, warmup=2, decay=0)
    found.apply(1)
    optimizer.load_state_dict(optimizer.state_dict())
    found.apply(2)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 1.0]
