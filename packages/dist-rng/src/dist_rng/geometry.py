"""The GPU whose random stream is reproduced: what its launches depend on.

torch launches its grid-stride distributions with as many blocks as the tensor needs, but no more
than the device holds at once; which element meets which random word depends on that number.
"""

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 256


@dataclass(frozen=True)
class LaunchPolicy:
    """How a release of torch chooses the blocks of a distribution kernel.

    Attributes:
        since: the first torch release, as (major, minor).
        counts_unroll: whether a block counts for ``256 * unroll`` elements rather than 256.
    """

    since: tuple[int, int]
    counts_unroll: bool


# calc_execution_policy in aten/src/ATen/native/cuda/DistributionTemplates.h. pytorch#194828 (open)
# would count the unroll: then add a line with counts_unroll=True.
POLICIES = (LaunchPolicy(since=(2, 11), counts_unroll=False),)


def policy_of(torch_version: str) -> LaunchPolicy:
    """Return the policy of a torch release, such as ``torch.__version__``.

    Raises:
        ValueError: the release is older than all that are known.
    """
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    known = [policy for policy in POLICIES if policy.since <= (major, minor)]
    if not known:
        raise ValueError(f"torch {torch_version} is too old: its launches are not known")
    return known[-1]


@dataclass(frozen=True)
class Geometry:
    """What the launches of a GPU depend on.

    Attributes:
        sm_count: streaming multiprocessors (``multi_processor_count``).
        max_threads_per_sm: resident threads of each (``max_threads_per_multi_processor``).
        major: major compute capability, for display alone.
    """

    sm_count: int
    max_threads_per_sm: int
    major: int | None = field(default=None, compare=False)

    A100: ClassVar["Geometry"]
    A10: ClassVar["Geometry"]
    A10G: ClassVar["Geometry"]
    A30: ClassVar["Geometry"]
    A40: ClassVar["Geometry"]
    B200: ClassVar["Geometry"]
    GH200: ClassVar["Geometry"]
    H100: ClassVar["Geometry"]
    H100_PCIE: ClassVar["Geometry"]
    H200: ClassVar["Geometry"]
    L4: ClassVar["Geometry"]
    L40S: ClassVar["Geometry"]
    RTX_3090: ClassVar["Geometry"]
    RTX_4090: ClassVar["Geometry"]
    RTX_5090: ClassVar["Geometry"]
    T4: ClassVar["Geometry"]
    V100: ClassVar["Geometry"]

    def __post_init__(self) -> None:
        """Check that such a device can launch a block of 256 threads; make integers plain ints.

        Raises:
            TypeError: a number that is no integer.
            ValueError: there is no multiprocessor, or it holds fewer than 256 threads.
        """
        for name in ("sm_count", "max_threads_per_sm"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if self.sm_count < 1 or self.max_threads_per_sm < BLOCK_SIZE:
            raise ValueError(
                f"a GPU has at least one SM of {BLOCK_SIZE} threads, not"
                f" {self.sm_count} of {self.max_threads_per_sm}"
            )

    @classmethod
    def of_device(cls, device: "torch.device | int | str | None" = None) -> Self:
        """Return the geometry of a CUDA device of this machine; the current one by default."""
        import torch

        properties = torch.cuda.get_device_properties(device)
        return cls(
            properties.multi_processor_count,
            properties.max_threads_per_multi_processor,
            properties.major,
        )

    @property
    def max_blocks(self) -> int:
        """Blocks that the device holds at once."""
        return self.sm_count * (self.max_threads_per_sm // BLOCK_SIZE)

    def blocks(self, numel: int, unroll: int = 4, policy: LaunchPolicy = POLICIES[-1]) -> int:
        """Return the blocks with which torch launches a draw of ``numel`` elements.

        Args:
            numel: elements of the whole tensor, or of one of its parts below 2**31; not 0.
            unroll: elements that a thread takes from one random call.
            policy: that of the torch release which is reproduced.
        """
        per_block = BLOCK_SIZE * (unroll if policy.counts_unroll else 1)
        return min(-(-numel // per_block), self.max_blocks)

    def threads(self, numel: int, unroll: int = 4, policy: LaunchPolicy = POLICIES[-1]) -> int:
        """Return the threads with which torch launches a draw of ``numel`` elements."""
        return BLOCK_SIZE * self.blocks(numel, unroll, policy)


# SMs: NVIDIA's architecture white papers and data sheets, SXM form unless named. Threads per SM:
# "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide, which gives
# 2048 for 7.0, 8.0, 9.0 and 10.0, 1536 for 8.6, 8.9 and 12.0, 1024 for 7.5.
Geometry.V100 = Geometry(80, 2048, 7)
Geometry.T4 = Geometry(40, 1024, 7)
Geometry.A100 = Geometry(108, 2048, 8)
Geometry.A30 = Geometry(56, 2048, 8)
Geometry.A10 = Geometry(72, 1536, 8)
Geometry.A10G = Geometry(80, 1536, 8)
Geometry.A40 = Geometry(84, 1536, 8)
Geometry.RTX_3090 = Geometry(82, 1536, 8)
Geometry.L4 = Geometry(58, 1536, 8)
Geometry.L40S = Geometry(142, 1536, 8)
Geometry.RTX_4090 = Geometry(128, 1536, 8)
Geometry.H100 = Geometry(132, 2048, 9)
Geometry.H100_PCIE = Geometry(114, 2048, 9)
Geometry.H200 = Geometry(132, 2048, 9)
Geometry.GH200 = Geometry(132, 2048, 9)
Geometry.B200 = Geometry(148, 2048, 10)
Geometry.RTX_5090 = Geometry(170, 1536, 12)
