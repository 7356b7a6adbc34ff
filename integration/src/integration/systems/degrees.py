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
        ep: of the data parallel ranks, those that divide experts and send each other tokens; or
            ``tp`` itself.
        cp: context parallel ranks, which cut sequences.
        cp_method: of attention over them: ring, all-gather or ulysses.
        tp: tensor parallel ranks.
        sp: whether hidden states between attention and MLP are cut along the sequence, by ``tp``.
        loss_parallel: whether logits stay cut along the vocabulary, by ``tp``, up to the loss.
        zero3: whether parameters are shared by phases of the plan instead of by package fsdp.
        static: whether operators run on local tensors, by plan-api's static mode.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    cp_method: str = "ring"
    tp: int = 1
    sp: bool = False
    loss_parallel: bool = False
    zero3: bool = False
    static: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh and their sizes, the outermost first; those of one rank are left out.

        The ranks of ``ep`` are some of the data parallel ones, whose axis is then two: the experts'
        mesh is the others', reshaped.
        """
        experts = self.ep if self.sends_tokens else 1
        sizes = {"dp": self.data // experts, "ep": experts, "cp": self.cp, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}

    @property
    def data(self) -> int:
        """Data parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def sends_tokens(self) -> bool:
        """Whether experts are divided among data parallel ranks."""
        return self.ep > 1 and self.data > 1

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
        """Refuses degrees that do not go together, or do not make up the world.

        Raises:
            UsageError: naming them.
        """
        if self.sends_tokens and min(self.dp_replicate, self.dp_shard) > 1:
            raise UsageError(
                f"--ep {self.ep} divides experts among data parallel ranks of one kind; give"
                " --dp-replicate or --dp-shard, not both"
            )
        if self.sends_tokens and self.data % self.ep:
            raise UsageError(
                f"--ep {self.ep} does not divide the {self.data} data parallel ranks, some of which"
                " are the experts'; give one that does"
            )
        if self.ep > 1 and not self.sends_tokens and self.ep != self.tp:
            raise UsageError(
                f"--ep {self.ep} without data parallelism divides experts among the ranks of --tp,"
                f" which is {self.tp}; give the same number"
            )
        degrees = {name: getattr(self, name) for name in ("dp_replicate", "dp_shard", "cp", "tp")}
        total = math.prod(degrees.values())
        if total != world_size:
            given = [f"{name} {size}" for name, size in degrees.items() if size > 1]
            product = " x ".join(given) or "no degree"
            raise UsageError(
                f"{product} makes {total} ranks and there are {world_size}; give degrees whose"
                " product is the number of ranks"
            )
        for name in ("sp", "loss_parallel"):
            if getattr(self, name) and self.tp == 1:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} cuts along --tp, which is 1; give --tp as well")
        if self.cp_method != "ring" and self.cp == 1:
            raise UsageError(
                f"--cp-method {self.cp_method} is of context parallelism, and --cp is 1; give --cp"
                " as well, or leave --cp-method out"
            )
        if self.static and self.cp > 1:
            raise UsageError(
                f"--static does not know --cp {self.cp}, context parallelism; leave one out"
            )
        if self.zero3 and (self.dp_shard == 1 or self.dp_replicate > 1):
            raise UsageError(
                "--zero3 shares parameters among all data parallel ranks; give --dp-shard, and no"
                " --dp-replicate"
            )
        if self.zero3 and self.sends_tokens:
            raise UsageError(
                f"--zero3 shares experts too, which --ep {self.ep} divides; leave one out"
            )
        if self.static and self.dp_shard > 1:
            raise UsageError(
                f"--static trains with whole parameters, not with --dp-shard {self.dp_shard};"
                f" use --dp-replicate {self.dp_shard}, or leave --static out"
            )
