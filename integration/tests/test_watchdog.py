"""A run that stands still says on each rank where."""

import pickle
import time

import pytest

from integration.errors import UsageError
from integration.train.launch.watchdog import FOLDER, Watchdog
from integration.train.launch.world import World, process_group
from testkit import run_ranks


@pytest.mark.ranks
def test_a_collective_that_one_rank_does_not_come_to_is_named_by_the_others(tmp_path):
    def stand_still(out):
        import time
        from datetime import timedelta
        from pathlib import Path

        import torch
        import torch.distributed as dist

        world = World(dist.get_rank(), 2)
        group = dist.new_group(timeout=timedelta(seconds=6))
        dist.all_reduce(torch.ones(2), group=group)
        message = None

        def lost_in_thought():
            time.sleep(8)

        try:
            with Watchdog(Path(out), timeout=3) as watchdog:
                watchdog.step("step 6")
                watchdog.step("step 7")
                if world.rank == 1:
                    lost_in_thought()
                else:
                    dist.all_reduce(torch.ones(5, dtype=torch.float64), group=group)
        except RuntimeError as error:
            message = str(error)
        return message

    message, nothing = run_ranks(stand_still, 2, str(tmp_path), timeout=240)
    assert nothing is None
    waiting, lost = [
        (tmp_path / FOLDER / f"report-rank{rank}.txt").read_text() for rank in range(2)
    ]
    assert "rank 0 of 2, step 7: it has not ended within 2.7 s\n" in waiting
    assert f"rank 0 of 2, step 7: RuntimeError: {message}\n" in waiting
    assert "number 2, all_reduce of Double [5], started " in waiting
    assert "rank 1 of 2, step 7: it has not ended within 2.7 s\n" in lost
    assert "number 1, all_reduce of Float [2], started " in lost
    assert " in lost_in_thought\n" in lost
    for report in (waiting, lost):
        assert "rank 1 did not reach number 2, which others have started: rank 0 all_r" in report
    assert lost.count("rank 1 of 2") == 1
    for rank in range(2):
        dump = pickle.loads((tmp_path / FOLDER / f"rank{rank}").read_bytes())
        newest = [entry for entry in dump["entries"] if entry["profiling_name"] != "gloo:barrier"]
        assert newest[-1]["output_sizes"] == [[5 - 3 * rank]]


def test_nothing_is_written_by_a_run_that_goes_on_or_whose_user_is_mistaken(tmp_path):
    with process_group(60):
        with Watchdog(tmp_path, timeout=2) as watchdog:
            for number in range(1, 5):
                watchdog.step(f"step {number}")
                time.sleep(0.5)
        with pytest.raises(UsageError), Watchdog(tmp_path, timeout=60):
            raise UsageError("no")
    assert list(tmp_path.iterdir()) == []
