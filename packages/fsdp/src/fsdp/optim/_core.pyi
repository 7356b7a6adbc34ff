# What update.py does, for many parameters at once, in memory of the host. Addresses are those of
# Tensor.data_ptr(), and nothing here checks what lies there: core.py does.
from collections.abc import Sequence

class Book:
    def __init__(self, values: list[float], boundaries: list[float], zero: int) -> None: ...

class Coefficients:
    def __init__(
        self,
        beta1: float,
        rest1: float,
        beta2: float,
        rest2: float,
        size: float,
        root: float,
        eps: float,
        decay: float,
        coupled: float,
    ) -> None: ...

# Jobs are of parameter, gradient, first moment, its scales, second moment, its scales, elements;
# scales of 0 mean moments of fp32. The jobs with a block that is not finite come back, by index.
def step(
    jobs: Sequence[tuple[int, int, int, int, int, int, int]],
    coefficients: Coefficients,
    block_size: int,
    first: Book,
    second: Book,
    threads: int,
) -> list[int]: ...

# The loops over elements exist for several instruction sets: those that this machine can run, the
# fastest first; those in use, which are these until others are chosen; and choosing them.
def all_loops() -> list[str]: ...
def loops() -> str: ...
def use_loops(name: str) -> None: ...
