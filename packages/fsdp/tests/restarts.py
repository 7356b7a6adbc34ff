"""Trains under torchrun, and resumes from the newest checkpoint: ``restarts.py FOLDER [STEP]``.

With STEP, rank 1 is killed in that step's backward, in the first round only. Into the folder go
``losses-ROUND-RANK.jsonl``, checkpoints, and ``error-RANK.json``: the error of the surviving
rank, and after how many seconds.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp import fully_shard

STEPS, TIMEOUT = 6, 20


class Trainer:
    """A model, its optimizer, and the checkpoints of both in a folder."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.folder = folder
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        for block in self.model:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step):
        """Renames a folder to its final name once everything in it was written."""
        unfinished = self.folder / f"unfinished-{step}"
        dcp.save(self.state(), checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            unfinished.rename(self.folder / f"step-{step}")
        dist.barrier()

    def load(self):
        """Returns the step after the newest checkpoint's."""
        found = sorted(int(path.name[5:]) for path in self.folder.glob("step-*"))
        if not found:
            return 0
        state = self.state()
        dcp.load(state, checkpoint_id=self.folder / f"step-{found[-1]}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return found[-1] + 1

    def step(self, step):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = self.model(torch.randn(4, 6)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def die(module, gradients):
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder, dies_in=None):
    # The agent ends the survivor as soon as it sees the death; it shall write its error first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    again, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
    trainer = Trainer(folder)
    with (folder / f"losses-{again}-{rank}.jsonl").open("w", buffering=1) as losses:
        for step in range(trainer.load(), STEPS):
            if (again, rank, step) == (0, 1, dies_in):
                trainer.model[1].register_full_backward_pre_hook(die)
            began = time.monotonic()
            try:
                loss = trainer.step(step)
            except RuntimeError as error:
                failure = {"error": str(error), "seconds": time.monotonic() - began}
                (folder / f"error-{rank}.json").write_text(json.dumps(failure))
                raise
            losses.write(json.dumps([step, loss]) + "\n")
            if step % 2:
                trainer.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    # gloo's threads may yet ask for the GIL, which ends a finalizing Python (pytorch#190489).
    os._exit(0)
