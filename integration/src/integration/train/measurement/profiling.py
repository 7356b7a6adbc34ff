"""Profiles steps: torch's trace of each rank, and the tensors that are allocated after them."""

import gc
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from integration.errors import UsageError

FOLDER = "profile"
_MIB = 2**20


@dataclass(frozen=True)
class StepRange:
    """Steps to profile, the last one included."""

    first: int
    last: int

    @staticmethod
    def parse(text: str) -> "StepRange":
        """Parses ``FIRST:LAST`` or ``STEP``.

        Raises:
            UsageError: the text has another form, or the range is empty.
        """
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        if match is None:
            raise UsageError(
                f"--profile-steps: expected a range such as 10:13, got {text}; give one"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last:
            raise UsageError(
                f"--profile-steps: expected a first step of at least 1 and a last step not before"
                f" it, got {text}; give another range"
            )
        return StepRange(first, last)


class StepProfiler:
    """Profiles the steps of a range, and writes the profile after the last of them.

    ``rankN.pt.trace.json`` is a Chrome trace with allocations, for TensorBoard, Perfetto and
    chrome://tracing; ``rankN.memory.txt`` lists the tensors that are allocated after the last step.
    On CUDA devices ``rankN.memory.pickle`` is a snapshot for pytorch.org/memory_viz.

    Args:
        steps: range of steps, if any.
        run: the run folder.
        rank: rank of this process.
    """

    def __init__(self, steps: StepRange | None, run: Path, rank: int) -> None:
        self._steps = steps
        self._folder = run / FOLDER
        self._rank = rank
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Encloses step ``number``, counted from 1."""
        if self._steps is None or not self._steps.first <= number <= self._steps.last:
            yield
            return
        if self._profiler is None:
            self._start()
        with torch.profiler.record_function(f"step {number}"):
            yield
        if number == self._steps.last:
            self.close()

    def close(self) -> None:
        """Writes the profile, if the run ends before the range."""
        profiler, self._profiler = self._profiler, None  # it can be stopped only once
        if profiler is None:
            return
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._file("pt.trace.json")))
        self._file("memory.txt").write_text(live_tensors())
        if torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(str(self._file("memory.pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.memory._record_memory_history()
        self._profiler = torch.profiler.profile(record_shapes=True, profile_memory=True)
        self._profiler.start()

    def _file(self, suffix: str) -> Path:
        return self._folder / f"rank{self._rank}.{suffix}"


def live_tensors() -> str:
    """Returns a table of the memory of this rank's Python tensors, the largest first.

    Tensors with the same shape and dtype are one row. A storage that several tensors share counts
    once, at its full size; of DTensors and others that dispatch in Python, those inside count.
    """
    gc.collect()
    seen: set[int] = set()
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for tensor in gc.get_objects():
        # Not isinstance, which queries the class of proxies, some of which raise.
        # Those that dispatch in Python have no memory: they wrap others, or are FakeTensors.
        cls = type(tensor)
        if not issubclass(cls, Tensor) or cls.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            continue
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() == 0:
            continue
        seen.add(storage.data_ptr())
        kind = f"{tensor.dtype!s:<15} {tuple(tensor.shape)}"
        count[kind] += 1
        total[kind] += storage.nbytes()
    lines = [f"{sum(total.values()) / _MIB:12.3f} MiB in {sum(count.values())} tensors"]
    lines += [
        f"{size / _MIB:12.3f} MiB {count[kind]:6d} x {kind}" for kind, size in total.most_common()
    ]
    return "\n".join(lines) + "\n"
