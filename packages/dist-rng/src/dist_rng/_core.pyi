# Addresses are those of Tensor.data_ptr(); `state` is the address of the 5056 bytes of a CPU
# generator's get_state(), which a fill advances in place. `data` is the address of the local
# tensor's first element. No function checks that the grid is inside the memory at an address.
from collections.abc import Sequence
from enum import Enum

STATE_BYTES: int

class Dtype(Enum):
    float32 = 0
    float64 = 1
    bfloat16 = 2
    float16 = 3
    uint8 = 4
    int8 = 5
    int16 = 6
    int32 = 7
    int64 = 8
    bool = 9
    uint16 = 10
    uint32 = 11
    uint64 = 12

# The releases between which the bits of a CPU's uniform_ and normal_ changed.
class TorchRelease(Enum):
    torch_2_11 = 0
    torch_2_12 = 1
    torch_2_13 = 2

class LocalGrid:
    # Per dim, outermost in memory first.
    def __init__(
        self,
        pieces: Sequence[Sequence[tuple[int, int]]],
        draw_strides: Sequence[int],
        local_strides: Sequence[int],
        windows: Sequence[tuple[int, int]] | None = None,
    ) -> None: ...
    # [draw, count, local, stride] of every run.
    def runs(self) -> list[list[int]]: ...

def instruction_set() -> str: ...

# Selects baseline, avx2 or avx512; returns whether this processor has it. For tests: no bit depends
# on it.
def use_instruction_set(name: str) -> bool: ...
def skip(state: int, words: int) -> None: ...

# How many words lead from one state to a later one; None if they are more than `limit`.
def words_between(before: int, after: int, limit: int) -> int | None: ...
def uniform(
    state: int,
    data: int,
    dtype: Dtype,
    grid: LocalGrid,
    global_numel: int,
    low: float,
    high: float,
    fused: bool,
    release: TorchRelease,
) -> None: ...
def normal(
    state: int,
    data: int,
    dtype: Dtype,
    grid: LocalGrid,
    global_numel: int,
    mean: float,
    std: float,
    blocks: bool,
    fused: bool,
    release: TorchRelease,
) -> None: ...
def bernoulli(
    state: int, data: int, dtype: Dtype, grid: LocalGrid, global_numel: int, p: float
) -> None: ...
def bernoulli_tensor(
    state: int,
    data: int,
    dtype: Dtype,
    grid: LocalGrid,
    global_numel: int,
    probabilities: int,
    probabilities_dtype: Dtype,
) -> bool: ...
def exponential(
    state: int, data: int, dtype: Dtype, grid: LocalGrid, global_numel: int, rate: float
) -> None: ...
def cauchy(
    state: int,
    data: int,
    dtype: Dtype,
    grid: LocalGrid,
    global_numel: int,
    median: float,
    sigma: float,
    fused: bool,
) -> None: ...
def geometric(
    state: int, data: int, dtype: Dtype, grid: LocalGrid, global_numel: int, p: float
) -> None: ...
def log_normal(
    state: int,
    data: int,
    dtype: Dtype,
    grid: LocalGrid,
    global_numel: int,
    mean: float,
    std: float,
    fused: bool,
) -> None: ...
def integers(
    state: int, data: int, dtype: Dtype, grid: LocalGrid, global_numel: int, modulus: int, base: int
) -> None: ...
def all_integers(
    state: int, data: int, dtype: Dtype, grid: LocalGrid, global_numel: int
) -> None: ...

# Defined in register_philox.cpp. A launch is [start, stop, threads, offset].
class PhiloxStream:
    def __init__(
        self,
        seed: int,
        offset: int,
        unroll: int,
        vector: int,
        launches: Sequence[tuple[int, int, int, int]],
    ) -> None: ...

class PhiloxArguments:
    def __init__(self, a: float, b: float, modulus: int, base: int) -> None: ...

def philox_fill(
    data: int,
    dtype: Dtype,
    grid: LocalGrid,
    stream: PhiloxStream,
    kind: int,
    arguments: PhiloxArguments,
    probabilities: int,
) -> None: ...

# The four words of a call, for each of `count` threads.
def philox_calls(seed: int, call: int, thread: int, count: int) -> list[list[int]]: ...
