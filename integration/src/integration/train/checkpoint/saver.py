"""Saves checkpoints, synchronously or in the background.

In the background `torch.distributed.checkpoint.async_save` copies the state, which takes as much
memory again, and a thread writes the copy. It uses a separate process group, as its collectives
would otherwise interleave with those of training. A second thread completes the checkpoint on
rank 0; see Note [complete checkpoints] in checkpoint.py.

A checkpoint that cannot be written, for example on a full disk, ends the run on all ranks with a
sentence, instead of training on without checkpoints. Its files are removed; earlier checkpoints
remain.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from integration.device import CPU, Device
from integration.errors import UnwrittenError
from integration.train.checkpoint import checkpoint
from integration.train.checkpoint.checkpoint import CheckpointDraft, Identity, newest_complete
from integration.train.checkpoint.writer import CheckpointWriter
from integration.train.launch.world import World
from integration.train.model.loss_scale import LossScale


class CheckpointSaver:
    """Writes the checkpoints of a run; all ranks call its methods together.

    Args:
        run: the run folder.
        identity: identity of the run.
        world: this rank and the world size.
        background: whether ``save`` may return before a checkpoint is complete.
        keep_checkpoints: how many complete checkpoints to keep, 0 for all.
        timeout: timeout of the collectives of saving in the background, in seconds.
        device: of the ranks.
    """

    def __init__(
        self,
        run: Path,
        identity: Identity,
        world: World,
        *,
        background: bool,
        keep_checkpoints: int,
        timeout: float,
        device: Device = CPU,
    ) -> None:
        self._run, self._identity, self._world, self._device = run, identity, world, device
        self._keep_checkpoints = keep_checkpoints
        self._pending: tuple[CheckpointDraft, Future[None]] | None = None
        self._group: dist.ProcessGroup | None = None
        if background:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._commits = ThreadPoolExecutor(1, "checkpoint")

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Any,
        *,
        wait: bool = True,
        loss_scale: LossScale | None = None,
    ) -> Path:
        """Writes the checkpoint of ``step`` and returns its path.

        Args:
            step: number of completed steps.
            model: the model as its system has wrapped it.
            optimizer: optimizer of its parameters.
            wait: whether it must be complete on return; otherwise, in the background, it is
                complete after the next ``save`` or ``finish`` at the latest.
            loss_scale: of the next step; None but with fp16.

        Raises:
            UnwrittenError: it, or the previous one, could not be written.
            CheckpointException: saving failed for another reason.
        """
        self.finish()
        draft = CheckpointDraft(
            self._run, step, self._identity, self._world, self._device, loss_scale
        )
        state = draft.begin(model, optimizer)
        writer = CheckpointWriter(draft.partial)
        if wait or self._group is None:
            self._settle(draft, lambda: self._write(draft, state, writer))
        else:
            written = dcp.async_save(state, storage_writer=writer, process_group=self._group)
            assert isinstance(written, Future)
            self._pending = draft, self._commits.submit(self._complete, draft, writer, written)
        return draft.final

    def finish(self) -> None:
        """Waits until the checkpoint that is being written is complete.

        Raises:
            UnwrittenError: it could not be written.
            CheckpointException: saving failed for another reason.
        """
        if self._pending is None:
            return
        (draft, pending), self._pending = self._pending, None
        self._settle(draft, pending.result)

    def _settle(self, draft: CheckpointDraft, complete: Callable[[], None]) -> None:
        """Waits for a checkpoint, and for rank 0, which decides whether it was written."""
        refused: OSError | None = None
        try:
            complete()
        except CheckpointException as error:  # on all ranks, with the same failures
            errors = [wrapped[0] for wrapped in error.failures.values()]
            refused = next((each for each in errors if isinstance(each, OSError)), None)
            if refused is None:
                raise
        except OSError as error:  # on rank 0 only, after DCP
            refused = error
        reasons = [None if refused is None else refused.strerror]
        dist.broadcast_object_list(reasons)
        if reasons[0] is None:
            return
        if self._world.is_main:
            draft.discard()
        newest = newest_complete(self._run).path
        rest = f"the newest complete one is {newest}" if newest else "there is no complete one"
        raise UnwrittenError(
            f"the checkpoint of step {draft.step} could not be written to {draft.final.parent}"
            f" ({reasons[0]}); {rest}: correct that and run the same command again to resume"
        ) from refused

    def _write(
        self, draft: CheckpointDraft, state: dict[str, Any], writer: CheckpointWriter
    ) -> None:
        dcp.save(state, storage_writer=writer)
        self._complete(draft, writer)

    def _complete(
        self, draft: CheckpointDraft, writer: CheckpointWriter, written: Future[Any] | None = None
    ) -> None:
        if written is not None:
            written.result()
        # Writing ends on rank 0 when it has ended on all ranks.
        if self._world.is_main:
            draft.commit(writer.checksums)
            if self._keep_checkpoints:
                remove_older(self._run, draft.step, keep_checkpoints=self._keep_checkpoints)


def remove_older(run: Path, step: int, *, keep_checkpoints: int) -> None:
    """Removes all but the newest complete checkpoints; one process calls it.

    Checkpoints of steps after ``step``, which has just been completed, are not removed: a run that
    was resumed from an older checkpoint writes them again. As the checkpoint of ``step`` itself is
    kept, there is always one to resume from, and the one that the run was resumed from is removed
    only after a newer one is complete. A folder is renamed before its files are removed, so that it
    never looks like a damaged checkpoint.

    Args:
        run: the run folder.
        step: step of the checkpoint that was completed last.
        keep_checkpoints: number of complete checkpoints to keep, at least 1.
    """
    folder = run / checkpoint.FOLDER
    for removed in folder.glob(".step-*.removed"):  # left by a run that was killed here
        shutil.rmtree(removed)
    complete = 0
    for path in sorted(folder.glob("step-*"), reverse=True):
        if path.name > checkpoint.folder_name(step):
            continue
        if complete >= keep_checkpoints:
            removed = path.with_name(f".{path.name}.removed")
            os.rename(path, removed)
            shutil.rmtree(removed)
        elif checkpoint.is_complete(path):
            complete += 1
