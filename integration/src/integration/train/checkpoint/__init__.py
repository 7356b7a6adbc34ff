"""Checkpoints: `checkpoint` has their format, `saver` writes them; `folder_lock` locks a run."""
