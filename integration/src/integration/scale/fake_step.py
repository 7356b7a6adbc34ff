"""Runs training steps on tensors without data and records their compute and collectives.

Parameters, activations and buffers of collectives are FakeTensors, which need no memory and compute
nothing. Integer tensors that code reads, such as meshes, splits and hashes of plans, are real:
under torch's FakeTensorMode a DeviceMesh could not be read. The packages run their own code, and
collectives reach their process group, where this mode records them.
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
# Their operators are recorded after they have been desugared to local ones.
_DESUGARED = (DTensor, AsyncCollectiveTensor)


class FakeStepRecord:
    """The recorded compute and collectives of this rank.

    Attributes:
        collectives: collectives in the order of issue; those of a single rank are left out.
        flops: FLOPs of matrix products and attention.
        operators: number of operators on local tensors.
    """

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.flops = 0
        self.operators = 0


@contextmanager
def fake_step() -> Iterator[FakeStepRecord]:
    """Creates tensors without data within the context, and records compute and collectives.

    Yields:
        The record, which grows within the context.
    """
    record = FakeStepRecord()
    with catch_warnings():
        # Buffers check the alignment of their memory; a FakeTensor's address is 0.
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
        if any(issubclass(one, _DESUGARED) for one in types):
            return NotImplemented
        if active_fake_mode() is not None:  # DTensor infers shapes
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
        tensors = _tensors(args)
        self._record.collectives.append(_read(name, func, args, result, group, tensors))


def _read(
    op: Op, func: Any, args: tuple[Any, ...], result: Any, group: Any, tensors: list[torch.Tensor]
) -> Collective:
    """Returns a collective as `testkit.CommLog` would record it."""
    ranks, sizes = group.size(), [tensor.nbytes for tensor in tensors]
    if func.namespace == "c10d" and op in ("all_gather", "reduce_scatter"):  # both are arguments
        large, small = max(sizes), min(sizes)
    elif func.namespace == "c10d" or op in ("all_reduce", "all_to_all"):
        large = small = sizes[0]
    else:
        large, small = sorted((sum(sizes), sum(one.nbytes for one in _tensors(result))))[::-1]
    sent, received = (small, large) if op == "all_gather" else (large, small)
    splits = (sent // ranks,) * ranks if op == "all_to_all" else ()
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return Collective(
        op, sent, received, dtype, group.group_name, ranks, group.rank(),
        input_splits=splits, output_splits=splits,
    )  # fmt: skip


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _makes_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an operator creates a tensor of data: floating point, or a buffer's bytes."""
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
