"""The properties of a GPU on which the launches of torch's distribution kernels depend.

torch launches its grid-stride distributions with as many blocks as the tensor needs, but no more
than are resident on the device at once. Which random word an element takes depends on that number.
"""

import operator
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch

BLOCK_SIZE = 256


@dataclass(frozen=True)
class LaunchPolicy:
    """How a release of torch computes the number of blocks of a distribution kernel.

    Attributes:
        since: the first torch release, as (major, minor).
        counts_unroll: whether a block is counted as ``256 * unroll`` elements instead of 256.
    """

    since: tuple[int, int]
    counts_unroll: bool


# calc_execution_policy in aten/src/ATen/native/cuda/DistributionTemplates.h. pytorch#194828 (open)
# would count the unroll: if it is merged, add a policy with counts_unroll=True.
POLICIES = (LaunchPolicy(since=(2, 11), counts_unroll=False),)


def policy_of(torch_version: str) -> LaunchPolicy:
    """Returns the policy of a torch release, such as ``torch.__version__``.

    Raises:
        ValueError: the release is older than the first policy.
    """
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    known = [policy for policy in POLICIES if policy.since <= (major, minor)]
    if not known:
        major, minor = POLICIES[0].since
        raise ValueError(f"expected torch {major}.{minor} or newer, got {torch_version}")
    return known[-1]


@dataclass(frozen=True)
class Geometry:
    """The properties of a GPU on which its launches depend.

    Attributes:
        sm_count: streaming multiprocessors (``multi_processor_count``).
        max_threads_per_sm: resident threads of each (``max_threads_per_multi_processor``).
        major: major compute capability, for display only.
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
        """Checks that the device can launch a block of 256 threads, and converts integers to int.

        Raises:
            TypeError: a number is not an integer.
            ValueError: there is no multiprocessor, or it has fewer than 256 threads.
        """
        for name in ("sm_count", "max_threads_per_sm"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if self.sm_count < 1 or self.max_threads_per_sm < BLOCK_SIZE:
            raise ValueError(
                f"expected at least one SM of at least {BLOCK_SIZE} threads, got"
                f" {self.sm_count} of {self.max_threads_per_sm}"
            )

    @classmethod
    def of_device(cls, device: torch.device | int | str | None = None) -> Self:
        """Returns the geometry of a CUDA device of this machine, by default of the current one."""
        properties = torch.cuda.get_device_properties(device)
        return cls(
            properties.multi_processor_count,
            properties.max_threads_per_multi_processor,
            properties.major,
        )

    @property
    def max_blocks(self) -> int:
        """Number of blocks that are resident on the device at once."""
        return self.sm_count * (self.max_threads_per_sm // BLOCK_SIZE)

    def blocks(self, numel: int, unroll: int = 4, policy: LaunchPolicy = POLICIES[-1]) -> int:
        """Returns the number of blocks with which torch launches a draw of ``numel`` elements.

        Args:
            numel: number of elements of the tensor, or of one of its parts below 2**31; not 0.
            unroll: number of elements that a thread draws from one call.
            policy: the launch policy of the torch release that is reproduced.
        """
        per_block = BLOCK_SIZE * (unroll if policy.counts_unroll else 1)
        return min(-(-numel // per_block), self.max_blocks)

    def threads(self, numel: int, unroll: int = 4, policy: LaunchPolicy = POLICIES[-1]) -> int:
        """Returns the number of threads with which torch launches a draw of ``numel`` elements."""
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
