from collections.abc import Sequence
from typing import TypeAlias

import torch

torch_version: str

class Axis:
    def __init__(self, *, group: str, size: int, rank: int) -> None: ...

class AllGather:
    def __init__(self, axis: Axis, *, dim: int, size: int) -> None: ...

class ReduceScatter:
    def __init__(self, axis: Axis, *, dim: int, reduce_op: str) -> None: ...

class AllReduce:
    def __init__(self, axis: Axis, *, reduce_op: str) -> None: ...

class AllToAll:
    def __init__(
        self,
        axis: Axis,
        *,
        from_dim: int,
        to_dim: int,
        from_size: int,
        to_size: int,
        by_gather: bool,
    ) -> None: ...

class Chunk:
    def __init__(self, axis: Axis, *, dim: int) -> None: ...

class Divide:
    def __init__(self, divisor: int) -> None: ...

Step: TypeAlias = AllGather | ReduceScatter | AllReduce | AllToAll | Chunk | Divide

class Redistribution:
    def __init__(self, steps: Sequence[Step]) -> None: ...
    def apply(self, local: torch.Tensor) -> torch.Tensor: ...
    @property
    def communicates(self) -> bool: ...
    @property
    def steps(self) -> list[Step]: ...
