"""The degrees of each kind of parallelism, for systems that compose several."""

import re
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from integration.errors import UsageError
from integration.systems._compat import keeps_order_of_ranks
from integration.systems.divisors import alternatives, divisors

# The names of fsdp's ``STRATEGIES``, by the number of the mesh's axes.
_OneAxis: TypeAlias = Literal["ddp", "zero1", "zero2", "zero3"]
_TwoAxes: TypeAlias = Literal["hsdp", "hfsdp"]
Placements: TypeAlias = _OneAxis | _TwoAxes
SendDtype: TypeAlias = Literal["bfloat16", "float8"]
_SEND_DTYPES = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
_CONTEXT_METHODS = ("ring", "all-gather", "ulysses")
_ULYSSES_RING = re.compile(r"ulysses-ring:(\d+)")
# The value of ``--dp-shard`` that stands for the ranks which the other degrees leave.
REST = -1


@dataclass(frozen=True)
class Degrees:
    """The degrees of a mesh, and the options of each kind of parallelism.

    Attributes:
        dp_replicate: data parallel degree with replicated parameters.
        dp_shard: data parallel degree with sharded parameters (FSDP; HSDP with ``dp_replicate``),
            which with ``cp`` are sharded over ``dp_shard`` x ``cp`` ranks.
        ep: expert parallel degree: a divisor of ``dp_shard`` (or of ``dp_replicate`` without it),
            or ``cp`` times a divisor, whose ranks exchange tokens by all-to-all; or else equal to
            ``tp``.
        ep_chunks: parts in which a rank sends its tokens to experts.
        cp: context parallel degree.
        cp_method: context parallel attention: ring, all-gather, ulysses, or ulysses-ring:N: ulysses
            among N consecutive ranks, and a ring across these groups.
        tp: tensor parallel degree.
        sp: whether ``tp`` includes sequence parallelism.
        loss_parallel: whether logits are sharded along the vocabulary, by ``tp``, up to the loss.
        zero3: whether phases of the plan shard parameters, instead of the package fsdp.
        placements: fsdp's, of parameters, gradients and optimizer state; None: all are sharded, and
            with ``dp_replicate`` replicated over it.
        offload: whether sharded parameters, gradients and optimizer state are on the host.
        send_dtype: in which fsdp sends the terms of gradients; None: in that of their sums.
        overlap: the kind whose communication is sent beside the products of linear layers; None: it
            is waited for at once.
        static: whether operators run on local tensors, by plan-api's static mode.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    ep_chunks: int = 1
    cp: int = 1
    cp_method: str = "ring"
    tp: int = 1
    sp: bool = False
    loss_parallel: bool = False
    zero3: bool = False
    placements: Placements | None = None
    offload: bool = False
    send_dtype: SendDtype | None = None
    overlap: Literal["tp"] | None = None
    static: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh and their sizes, the outermost first; axes of one rank are left out."""
        return self.axes_with()

    def axes_with(self, *needed: str) -> dict[str, int]:
        """Returns the axes of the mesh and their sizes, the outermost first.

        Axes of one rank are left out, unless they are needed.

        Expert parallelism among data parallel ranks splits their axis into two: the experts' mesh
        is a reshaped view of the same ranks. Of the ranks of "dp", replicas are the outermost.
        """
        experts = self._experts_of_data or 1
        sizes = {"dp": self.data // experts, "ep": experts, "cp": self.cp, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1 or name in needed} or {
            "dp": 1
        }

    @property
    def ulysses_degree(self) -> int:
        """Consecutive context parallel ranks that shard heads among each other; 1: none do."""
        if self.cp_method == "ulysses":
            return self.cp
        groups = _ULYSSES_RING.fullmatch(self.cp_method)
        return 1 if groups is None else int(groups[1])

    @property
    def offload_policy(self) -> OffloadPolicy:
        """The policy of torch's fully_shard, and of fsdp's."""
        return CPUOffloadPolicy() if self.offload else OffloadPolicy()

    @property
    def dtype_sent(self) -> torch.dtype | None:
        """The dtype of ``send_dtype``."""
        return None if self.send_dtype is None else _SEND_DTYPES[self.send_dtype]

    @property
    def data(self) -> int:
        """Data parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def sends_tokens(self) -> bool:
        """Whether experts are sharded over data and context parallel ranks, which exchange tokens.

        Otherwise they are sharded along ``tp``, whose ranks have the same tokens.
        """
        return self.ep > 1 and self._experts_of_data is not None

    @property
    def dispatches_tokens(self) -> bool:
        """Whether ranks send tokens to each other's experts, along ``tp`` under ``sp``, too."""
        return self.ep > 1 and (self.sends_tokens or self.sp)

    @property
    def expert_axes(self) -> list[str]:
        """Axes of the mesh along which tokens are sent to experts."""
        of_data = self._experts_of_data
        if not self.sends_tokens or of_data is None:
            return []
        return ["ep"] * (of_data > 1) + ["cp"] * (of_data < self.ep)

    @property
    def _experts_of_data(self) -> int | None:
        """Data parallel ranks over which experts are sharded; None: along ``tp``."""
        if self._expert_ranks % self.ep == 0:
            return self.ep
        over_cp, rest = divmod(self.ep, self.cp)
        return over_cp if rest == 0 and self._expert_ranks % over_cp == 0 else None

    @property
    def fitting_ep(self) -> list[int]:
        """Expert parallel degrees that the other degrees allow, in order."""
        of_data = divisors(self._expert_ranks)
        return sorted({*of_data, *(self.cp * each for each in of_data), self.tp})

    @property
    def _expert_ranks(self) -> int:
        """Data parallel ranks among which experts can be sharded: one replica's, if it has some."""
        return self.dp_shard if self.dp_shard > 1 else self.dp_replicate

    @property
    def options(self) -> list[str]:
        """Options of the trainer's command line that are not at their defaults."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                option = f"--{field.name.replace('_', '-')}"
                words.append(option if value is True else f"{option} {value}")
        return words

    def _product(self, *names: str) -> str:
        """Returns the degrees above 1 as a product."""
        sizes = {name: getattr(self, name) for name in names}
        factors = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(factors) or "no degree"

    def fitting(self, name: Literal["cp", "tp"]) -> list[int]:
        """Returns the degrees of a kind that the ranks allow, with ``dp_shard`` for the rest."""
        return divisors(self.dp_shard * (self.cp if name == "cp" else self.tp))

    def rest_of(self, ranks: int) -> int:
        """Returns the ``dp_shard`` that takes the ranks which the other degrees leave.

        Raises:
            UsageError: the product of the others does not divide the ranks.
        """
        product = self.dp_replicate * self.cp * self.tp
        if ranks % product:
            raise UsageError(
                f"--dp-shard {REST}: expected other degrees whose product divides the {ranks}"
                f" ranks, got {product} ({self._product('dp_replicate', 'cp', 'tp')}); give degrees"
                f" whose product is {alternatives(divisors(ranks))}"
            )
        return ranks // product

    def check(self, world_size: int) -> None:
        """Refuses degrees that are incompatible, or whose product is not the world size.

        Raises:
            UsageError: names them.
        """
        self._check_experts()
        total = self.data * self.cp * self.tp
        if total != world_size:
            factors = self._product("dp_replicate", "dp_shard", "cp", "tp")
            others = total // self.dp_shard
            remedy = f"others, whose product is {alternatives(divisors(world_size))}"
            if world_size % others == 0:
                remedy = f"--dp-shard {world_size // others}, or -1, which takes the rest"
            raise UsageError(
                f"expected degrees whose product is the number of ranks, {world_size}, got {total}"
                f" ({factors}); give {remedy}"
            )
        for name in ("sp", "loss_parallel"):
            if getattr(self, name) and self.tp == 1:
                option = name.replace("_", "-")
                raise UsageError(
                    f"--{option}: expected --tp of at least 2, got 1; give --tp as well"
                )
        self._check_context_method()
        if self.zero3 and (self.dp_shard == 1 or self.dp_replicate > 1):
            raise UsageError(
                "--zero3: expected --dp-shard of at least 2 without --dp-replicate, as it shards"
                f" parameters over all data parallel ranks, got --dp-shard {self.dp_shard} and"
                f" --dp-replicate {self.dp_replicate}; give --dp-shard only"
            )
        if self.placements is not None:
            self._check_placements(self.placements)
        for option, is_given in {
            "--offload": self.offload,
            f"--send-dtype {self.send_dtype}": self.send_dtype is not None,
        }.items():
            if is_given and (self.dp_shard == 1 or self.zero3):
                raise UsageError(
                    f"{option}: expected --dp-shard of at least 2 without --zero3, as it is of the"
                    f" parameters that fsdp shards, got --dp-shard {self.dp_shard}"
                    f"{' --zero3' * self.zero3}; give --dp-shard only, or leave"
                    f" {option.split()[0]} out"
                )
        self._check_overlap()
        if self.zero3 and self.sends_tokens:
            raise UsageError(
                f"--zero3: expected --ep 1, as it shards experts too, got --ep {self.ep};"
                " leave one out"
            )

    def _check_experts(self) -> None:
        """Refuses an expert parallel degree that fits no ranks, and chunks that none sends.

        Raises:
            UsageError: names the degrees that would fit, or the other option.
        """
        if self.ep not in self.fitting_ep:
            option = "--dp-shard" if self.dp_shard > 1 else "--dp-replicate"
            equal = f", or --cp {self.cp} times one" if self.cp > 1 else ""
            equal += f", or the value of --tp, {self.tp}" if self.tp > 1 else ""
            raise UsageError(
                f"--ep {self.ep}: expected a divisor of {option} {self._expert_ranks}{equal}, got"
                f" {self.ep}; --ep {alternatives(self.fitting_ep)} would fit"
            )
        if self.ep_chunks > 1 and not self.dispatches_tokens:
            raise UsageError(
                f"--ep-chunks {self.ep_chunks}: expected --ep of at least 2 along --dp-shard,"
                " --dp-replicate, --cp, or --tp with --sp, whose ranks send each other tokens, got"
                f" --ep {self.ep}{f' along --tp {self.tp}' * (self.ep > 1)}; give one of them as"
                " well, or leave --ep-chunks out"
            )

    def _check_context_method(self) -> None:
        """Refuses a method without ranks, and groups of ranks that no ring is across.

        Raises:
            UsageError: names the degrees that would fit, or another method.
        """
        option = f"--cp-method {self.cp_method}"
        if self.cp_method != "ring" and self.cp == 1:
            raise UsageError(
                f"{option}: expected --cp of at least 2, got 1; give --cp as well, or leave"
                " --cp-method out"
            )
        degree = self.ulysses_degree
        fit = [each for each in divisors(self.cp) if 1 < each < self.cp]
        if _ULYSSES_RING.fullmatch(self.cp_method) and degree not in fit:
            remedy = "use --cp-method ulysses, or another --cp"
            if fit:
                remedy = f"give ulysses-ring:N with N = {alternatives(fit)}"
            raise UsageError(
                f"{option}: expected a divisor of --cp {self.cp} between 1 and {self.cp}, as a ring"
                f" is across groups of so many ranks, got {degree}; {remedy}"
            )

    def _check_overlap(self) -> None:
        """Refuses overlap where nothing is sent, or no product is beside it.

        Raises:
            UsageError: names the other option.
        """
        if self.overlap is None:
            return
        option = f"--overlap {self.overlap}"
        if self.tp == 1:
            raise UsageError(
                f"{option}: expected --tp of at least 2, got 1; give --tp as well, or leave"
                " --overlap out"
            )
        if self.zero3:
            raise UsageError(
                f"{option}: expected no --zero3, which gathers the weights of linear layers while"
                " they run; use --dp-shard without --zero3, or leave --overlap out"
            )

    def _check_placements(self, placements: str) -> None:
        """Refuses placements that the mesh of fully_shard cannot have.

        Raises:
            UsageError: names them.
        """
        option = f"--placements {placements}"
        if self.dp_shard == 1 or self.zero3:
            raise UsageError(
                f"{option}: expected --dp-shard of at least 2 without --zero3, as it is of the"
                f" parameters that fsdp shards, got {' '.join(self.options)}; give --dp-shard only"
            )
        check_axes(placements, 2 if self.dp_replicate > 1 else 1)
        others = {"--ep": self.ep, "--cp": self.cp, "--tp": self.tp}
        found = [f"{name} {size}" for name, size in others.items() if size > 1]
        if placements == "hfsdp" and found:
            raise UsageError(
                f"{option}: expected neither --tp, --cp nor --ep, as it shards no parameters of"
                f" other axes over replicas, got {' '.join(found)}; use --placements hsdp"
            )
        if placements == "hfsdp" and not keeps_order_of_ranks():
            raise UsageError(
                f"{option}: expected torch 2.12 or newer, whose process groups keep the order of"
                f" ranks, got {torch.__version__}; use --placements hsdp"
            )


def check_axes(placements: str, axes: int) -> None:
    """Refuses placements that are not of a data parallel mesh of so many axes.

    Raises:
        UsageError: names those that are.
    """
    known = get_args(_OneAxis if axes == 1 else _TwoAxes)
    if placements not in known:
        mesh, remedy = "--dp-replicate with --dp-shard", "leave --dp-replicate out"
        if axes == 1:
            mesh, remedy = "one data parallel axis", f"--system plan with {mesh}"
        raise UsageError(
            f"--placements: expected one of {', '.join(known)} on {mesh}, got {placements}; give"
            f" one of them, or {remedy}"
        )


def context_method(name: str) -> str:
    """Refuses a name of no method of context parallel attention, as a ValueError."""
    groups = _ULYSSES_RING.fullmatch(name)
    if name not in _CONTEXT_METHODS and (groups is None or int(groups[1]) < 2):
        raise ValueError(
            f"expected {', '.join(_CONTEXT_METHODS)}, or ulysses-ring:N with N of at least 2, the"
            f" ranks of a group that shard heads, got {name}; give one of them"
        )
    return name
