"""How many ranks each kind of parallelism has, for systems that compose several."""

import math
from dataclasses import dataclass, fields

from integration.errors import UsageError


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis of the mesh, and what goes on along them.

    Attributes:
        dp_replicate: data parallel ranks with copies of parameters.
        dp_shard: data parallel ranks that share parameters (FSDP); beside copies, HSDP.
        tp: tensor parallel ranks.
        sp: whether hidden states between attention and MLP are cut along the sequence, by ``tp``.
        loss_parallel: whether logits stay cut along the vocabulary, by ``tp``, up to the loss.
        zero3: whether parameters are shared by phases of the plan instead of by package fsdp.
        static: whether operators run on local tensors, by plan-api's static mode.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    sp: bool = False
    loss_parallel: bool = False
    zero3: bool = False
    static: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh and their sizes, the outermost first; those of one rank are left out."""
        sizes = {name: getattr(self, name) for name in ("dp_replicate", "dp_shard", "tp")}
        return {name: size for name, size in sizes.items() if size > 1} or {"dp_replicate": 1}

    @property
    def options(self) -> list[str]:
        """What is not the default, as the trainer's command line has it."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                option = f"--{field.name.replace('_', '-')}"
                words.append(option if value is True else f"{option} {value}")
        return words

    def check(self, world_size: int) -> None:
        """Refuse degrees that do not go together, or do not make up the world.

        Raises:
            UsageError: naming them.
        """
        total = math.prod(self.axes.values())
        if total != world_size:
            product = " x ".join(f"{name} {size}" for name, size in self.axes.items())
            raise UsageError(
                f"{product} makes {total} ranks and there are {world_size}; give degrees whose"
                " product is the number of ranks"
            )
        for name in ("sp", "loss_parallel"):
            if getattr(self, name) and self.tp == 1:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} cuts along --tp, which is 1; give --tp as well")
        if self.zero3 and self.dp_shard == 1:
            raise UsageError(
                "--zero3 shares parameters along --dp-shard, which is 1; give it as well"
            )
        if self.static and self.dp_shard > 1:
            raise UsageError(
                f"--static trains with whole parameters, not with --dp-shard {self.dp_shard};"
                f" use --dp-replicate {self.dp_shard}, or leave --static out"
            )
