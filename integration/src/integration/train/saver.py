"""When checkpoints are written: at once, or while training goes on.

In the background as `torch.distributed.checkpoint.async_save` does it: the state is copied, which
takes a second time its memory, and a thread writes the copy, with a process group of its own, as
its collectives would mix with those of training otherwise. See checkpoint.py's Note [complete] for
when a checkpoint exists: here rank 0 names the files and renames the folder in a thread, too.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from integration.train.checkpoint import Draft, Identity
from integration.train.retention import remove_older
from integration.train.world import World


class Saver:
    """Writes the checkpoints of a run; all ranks call its methods together.

    Args:
        run: the run folder.
        identity: of the run.
        world: this rank's place.
        background: whether ``save`` may return before a checkpoint is complete.
        keep: how many complete ones stay, 0 for all.
        timeout: in seconds, of the collectives of saving in the background.
    """

    def __init__(
        self,
        run: Path,
        identity: Identity,
        world: World,
        *,
        background: bool,
        keep: int,
        timeout: float,
    ) -> None:
        self._run, self._identity, self._world = run, identity, world
        self._keep = keep
        self._pending: Future[Any] | None = None
        self._group: dist.ProcessGroup | None = None
        if background:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._commits = ThreadPoolExecutor(1, "checkpoint")

    def save(self, step: int, model: nn.Module, optimizer: Any, *, wait: bool = True) -> Path:
        """Write the checkpoint of ``step`` and return its path.

        Args:
            step: steps completed.
            model: as its system wraps it.
            optimizer: of its parameters.
            wait: whether it must be complete on return; if not, and checkpoints are written in
                the background, it will be after the next ``save`` or ``finish`` at the latest.

        Raises:
            CheckpointException: it, or the one before, could not be written.
        """
        self.finish()
        draft = Draft(self._run, step, self._identity, self._world)
        state = draft.begin(model, optimizer)
        if wait or self._group is None:
            dcp.save(state, checkpoint_id=draft.partial)
            self._complete(draft)
            dist.barrier()
        else:
            written = dcp.async_save(state, checkpoint_id=draft.partial, process_group=self._group)
            assert isinstance(written, Future)
            self._pending = self._commits.submit(self._complete, draft, written)
        return draft.final

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            CheckpointException: it could not be written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()
        dist.barrier()  # rank 0 has completed it

    def _complete(self, draft: Draft, written: Future[Any] | None = None) -> None:
        if written is not None:
            written.result()
        # Rank 0's writing ends when that of all ranks has.
        if self._world.is_main:
            draft.commit()
            if self._keep:
                remove_older(self._run, draft.step, self._keep)
