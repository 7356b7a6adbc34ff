# The compiled step of Adam8bit on the CPU, with the bits of its reference in adam8bit/update.py.
# Addresses are those of Tensor.data_ptr(); the caller, update_many, checks the tensors.
from collections.abc import Sequence

class CodeBookTable:
    def __init__(self, values: list[float], boundaries: list[float], zero: int) -> None: ...

class Coefficients:
    def __init__(
        self,
        beta1: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        step_size: float,
        inv_bias_correction2_sqrt: float,
        eps: float,
        param_decay: float,
        l2_factor: float,
    ) -> None: ...

# Each parameter is a tuple of the addresses of parameter, gradient, first moment, its scales,
# second moment and its scales, and the number of elements. Scales of address 0 mean fp32 moments.
# Returns the indices of the parameters that have a block that is not finite.
def step(
    params: Sequence[tuple[int, int, int, int, int, int, int]],
    coefficients: Coefficients,
    block_size: int,
    first: CodeBookTable,
    second: CodeBookTable,
    threads: int,
) -> list[int]: ...

# The kernels exist for several instruction sets: those that this machine supports, the fastest
# first; the ones in use, by default the fastest; and selecting others.
def available_kernels() -> list[str]: ...
def active_kernels() -> str: ...
def select_kernels(name: str) -> None: ...
