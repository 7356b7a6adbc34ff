"""Steps without numbers: tensors that hold data have shapes alone, and everything else is real.

Parameters, activations and buffers of collectives are FakeTensors, which need no memory and compute
nothing. What code looks at, such as meshes, splits and hashes of plans (integers), is real: under
torch's own FakeTensorMode a DeviceMesh could not be read. So the packages run their own code, and
collectives reach the process group that they would reach; this mode sees them pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.simulate.tracing import operator_work
from plan_api.inspect.track.collectives import collective_name, get_process_group
from testkit import Collective
from testkit.comm_log import Op

__all__ = ["FakeStepRecord", "fake_step"]

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# They make of an operator what is recorded.
_LATER = (DTensor, AsyncCollectiveTensor)


class FakeStepRecord:
    """What a step did on this rank.

    Attributes:
        collectives: in the order in which they were issued, those of one rank left out.
        flops: of matrix products and attention.
        operators: that ran on local tensors.
    """

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.flops = 0
        self.operators = 0


@contextmanager
def fake_step() -> Iterator[FakeStepRecord]:
    """Makes tensors without data within the block, and records what is computed and sent.

    Yields:
        the record, which grows while the block runs.
    """
    record = FakeStepRecord()
    with catch_warnings():
        # Buffers look whether their memory is aligned; a FakeTensor's address is 0, which is.
        filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        with _FakeStepMode(record):
            yield record


class _FakeStepMode(TorchDispatchMode):
    def __init__(self, record: FakeStepRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one, _LATER) for one in types):
            return NotImplemented
        if active_fake_mode() is not None:  # DTensor asks for shapes alone
            return func(*args, **kwargs)
        if func.namespace in _COLLECTIVES:
            result = func(*args, **kwargs)
            if name := collective_name(func):
                self._note(name, func, args, result)
            return result
        if _makes_data(func, args, kwargs):
            with self._fake:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        work = operator_work(func, args, kwargs, result)
        self._record.flops += work.flops
        self._record.operators += work.ops
        return result

    def _note(self, name: Any, func: Any, args: tuple[Any, ...], result: Any) -> None:
        group = get_process_group(func, args)
        if group is None or group.size() == 1 or name == "barrier":
            return
        ours = _tensors(args)
        self._record.collectives.append(_read(name, func, args, result, group, ours))


def _read(
    op: Op, func: Any, args: tuple[Any, ...], result: Any, group: Any, ours: list[torch.Tensor]
) -> Collective:
    """A collective as `testkit.CommLog` would have it."""
    ranks, sizes = group.size(), [tensor.nbytes for tensor in ours]
    if func.namespace == "c10d" and op in ("all_gather", "reduce_scatter"):  # both are arguments
        large, small = max(sizes), min(sizes)
    elif func.namespace == "c10d" or op in ("all_reduce", "all_to_all"):
        large = small = sizes[0]
    else:
        large, small = sorted((sum(sizes), sum(one.nbytes for one in _tensors(result))))[::-1]
    given, taken = (small, large) if op == "all_gather" else (large, small)
    splits = (given // ranks,) * ranks if op == "all_to_all" else ()
    dtype = str(ours[0].dtype).removeprefix("torch.")
    return Collective(
        op, given, taken, dtype, group.group_name, ranks, group.rank(),
        input_splits=splits, output_splits=splits,
    )  # fmt: skip


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _makes_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator makes a new tensor of data: floating, or bytes of a buffer."""
    if not any(argument.name == "device" for argument in func._schema.arguments):
        return False
    given = _tensors((args, kwargs))
    if any(isinstance(one, FakeTensor) for one in given):
        return False  # the result is one too
    if kwargs.get("dtype") is not None:
        dtype = kwargs["dtype"]
    elif given:
        dtype = given[0].dtype
    else:
        dtype = torch.get_default_dtype()
    sized = given or (args and isinstance(args[0], list | tuple))
    return bool(sized) and (dtype.is_floating_point or dtype == torch.uint8)
