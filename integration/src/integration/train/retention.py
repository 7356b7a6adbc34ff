"""Which checkpoints stay."""

import os
import shutil
from pathlib import Path

from integration.train import checkpoint


def remove_older(run: Path, step: int, keep: int) -> None:
    """Remove what is older than the newest ``keep`` complete checkpoints; one process calls it.

    Checkpoints of steps after ``step``, which has just been completed, are left alone: a run that
    went on from an older one writes them anew. As that of ``step`` itself stays, so does one to
    go on from at any moment, and what the run was resumed from goes only after a newer one is
    complete. A folder is renamed before its files go, so that it is never seen as a damaged one.

    Args:
        run: the run folder.
        step: of the checkpoint that was completed last.
        keep: at least 1.
    """
    folder = run / checkpoint.FOLDER
    for left in folder.glob(".step-*.removed"):  # by a run that was killed here
        shutil.rmtree(left)
    kept = 0
    for path in sorted(folder.glob("step-*"), reverse=True):
        if path.name > checkpoint.folder_name(step):
            continue
        if kept >= keep:
            removed = path.with_name(f".{path.name}.removed")
            os.rename(path, removed)
            shutil.rmtree(removed)
        elif checkpoint.is_complete(path):
            kept += 1
