"""`EventRecorder`: records a step of a parallelized model: its events, and its memory by kind.

The packages run their own code: `fully_shard`'s state machine, a plan's hooks, DTensor's dispatch.
Collectives reach their process group, which may be a fake one, and are recorded there. Tensors of
data are FakeTensors, which need no memory and compute nothing. Integer tensors that code reads,
such as meshes, splits and hashes of plans, are real: under torch's FakeTensorMode a DeviceMesh
could not be read.

Memory is that of the storages of tensors, from their allocation until the last tensor is gone.
What is allocated in a stage of a parameter group belongs to the group (see
`fsdp.collectives.stages`); the group frees it and allocates it again by changing the size of the
storage, so sizes are read again in each of its stages.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.collectives.stages import GroupStage, listen_to_stages
from fsdp.simulate.events import (
    COLLECTIVE_NAMESPACES,
    ComputeWork,
    StageEvent,
    StepEvent,
    operator_work,
    read_collective,
    tensors_in,
)

__all__ = ["IN_STEP", "EventRecorder", "MemoryKind"]

# Their operators are recorded after they have been desugared to local ones.
_DESUGARED = (DTensor, AsyncCollectiveTensor)


class MemoryKind(Enum):
    """What memory is for.

    Attributes:
        PARAMETERS: parameters that are in memory between steps.
        BUFFERS: buffers of modules.
        GATHERED: unsharded parameters of `fully_shard`, and post-forward shards.
        REDUCING: buffers of gradients that are being reduced, and what other ranks have sent.
        GRADIENTS: gradients of the parameters.
        ACTIVATIONS: all other memory, including unsharded gradients.
        UNCOUNTED: memory that training does not have, such as that of a copy.
    """

    PARAMETERS = auto()
    BUFFERS = auto()
    GATHERED = auto()
    REDUCING = auto()
    GRADIENTS = auto()
    ACTIVATIONS = auto()
    UNCOUNTED = auto()


_KINDS = {
    GroupStage.ALL_GATHER: MemoryKind.GATHERED,
    GroupStage.ALL_GATHER_WAIT: MemoryKind.GATHERED,
    GroupStage.RESHARD: MemoryKind.GATHERED,
    GroupStage.COPY_IN: MemoryKind.REDUCING,
    GroupStage.REDUCE_SCATTER: MemoryKind.REDUCING,
    GroupStage.REDUCE_SCATTER_WAIT: MemoryKind.REDUCING,
    GroupStage.GATHER_GRADS: MemoryKind.REDUCING,
    GroupStage.ASSIGN_GRADS: MemoryKind.GRADIENTS,
}
IN_STEP = (
    MemoryKind.GATHERED,
    MemoryKind.REDUCING,
    MemoryKind.GRADIENTS,
    MemoryKind.ACTIVATIONS,
)
"""Kinds that are allocated and freed in a step."""


@dataclass
class _Storage:
    """A storage that is allocated, or that its group may allocate again."""

    kind: MemoryKind
    nbytes: int


class EventRecorder(TorchDispatchMode):
    """Records the operators of this thread within its context; see the module.

    Attributes:
        events: events since `start_step`, in order.
        worst: bytes of `IN_STEP` kinds at the point where their sum was largest since `start_step`.
        most: the largest bytes of each kind since `start_step`, each at its own point.
        fake: whether tensors of data are fake outside of stages, too; if not, modules compute.
        counts_operators: whether operators outside of stages are compute.
        fake_mode: makes fake tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake = self.counts_operators = True
        self._allocated: Counter[MemoryKind] = Counter()
        self._storages: weakref.WeakKeyDictionary[Any, _Storage] = weakref.WeakKeyDictionary()
        self._of_collective: defaultdict[int, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
        self._stages: list[StageEvent] = []
        self._contexts = ExitStack()
        self._watched: list[nn.Parameter] = []
        self.start_step()

    def start_step(self) -> None:
        """Forgets the events so far, but not the memory that is allocated."""
        self.events: list[StepEvent] = []
        self._work = ComputeWork()
        self.worst: dict[MemoryKind, int] = dict.fromkeys(IN_STEP, 0)
        self._most = -1
        self.most: dict[MemoryKind, int] = dict(self._allocated)
        self._update_worst()

    def finish_step(self) -> None:
        """Records the compute since the last event, and the gradients of watched parameters."""
        self._end_compute()
        for param in self._watched:
            self._set_gradient(param)

    def _end_compute(self) -> None:
        if self._work != ComputeWork():
            self.events.append(self._work)
            self._work = ComputeWork()

    def allocated(self, kind: MemoryKind) -> int:
        """Returns the bytes of a kind that are allocated now."""
        return self._allocated[kind]

    def add_work(self, work: ComputeWork) -> None:
        """Records compute that no operator does."""
        self._work += work

    def set_kind(self, tensors: Iterable[torch.Tensor], kind: MemoryKind) -> None:
        """Sets the kind of the memory of tensors, which stays that until it is freed."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = self._track(local, kind)
            self._set(storage, kind, storage.nbytes)

    def watch(self, model: nn.Module) -> None:
        """Sets the kinds of a model's parameters and buffers, and of gradients.

        Gradients have their kind once they are accumulated; those that replace them, such as
        reduced ones, when the step is finished.
        """
        self.set_kind(model.buffers(), MemoryKind.BUFFERS)
        self.set_kind(model.parameters(), MemoryKind.PARAMETERS)
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._set_gradient)
                self._watched.append(param)

    def _set_gradient(self, param: torch.Tensor) -> None:
        if param.grad is not None:
            self.set_kind([param.grad], MemoryKind.GRADIENTS)

    def __enter__(self) -> Any:
        """Begins to record."""
        self._contexts.enter_context(catch_warnings())
        # Buffers check the alignment of their memory; a FakeTensor's address is 0.
        filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        self._contexts.enter_context(listen_to_stages(self))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Ends to record."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._contexts.close()

    # Stages.

    def begin_stage(self, stage: GroupStage, collective: object) -> None:
        """Implements `StageListener`."""
        self._end_compute()
        self._stages.append(StageEvent(stage, id(collective)))
        self._read_sizes()

    def end_stage(self, stage: GroupStage, collective: object) -> None:
        """Implements `StageListener`."""
        self._read_sizes()
        self.events.append(self._stages.pop())

    def _read_sizes(self) -> None:
        """Reads the sizes of the memory of the current stage's collective again."""
        for storage in list(self._of_collective[self._stages[-1].collective]):
            known = self._storages[storage]
            if storage.nbytes() != known.nbytes:
                kind = self._current_kind if not known.nbytes else known.kind
                self._set(known, kind, storage.nbytes())

    # Operators.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator and records its work, its collective and the memory of its results."""
        kwargs = kwargs or {}
        if any(issubclass(one, _DESUGARED) for one in types):
            return NotImplemented
        if active_fake_mode() is not None:  # DTensor infers shapes
            return func(*args, **kwargs)
        for tensor in tensors_in((args, kwargs)):
            # It was allocated before, if it is new.
            self._track(tensor, MemoryKind.UNCOUNTED)
        is_collective = func.namespace in COLLECTIVE_NAMESPACES
        if not is_collective and self._makes_data(func, args, kwargs):
            with self.fake_mode:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if is_collective:
            self._record_collective(func, args, result)
        elif self.counts_operators and not self._stages:
            self.add_work(operator_work(func, args, kwargs, result))
        if self._stages:
            self._read_sizes()
        for tensor in tensors_in(result):
            self._track(tensor, self._current_kind)
        return result

    def _record_collective(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        event = read_collective(func, args, result, self._stages[-1] if self._stages else None)
        if event is None:
            return
        self._end_compute()
        self.events.append(event)
        if event.op == "all_to_all":
            _receive_integers(args, result)

    def _makes_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether an operator creates a tensor of data: floats, or a buffer's bytes."""
        if not self.fake and not self._stages:
            return False
        if not any(argument.name == "device" for argument in func._schema.arguments):
            return False
        given = list(tensors_in((args, kwargs)))
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

    # Memory.

    @property
    def _current_kind(self) -> MemoryKind:
        return _KINDS[self._stages[-1].stage] if self._stages else MemoryKind.ACTIVATIONS

    def _track(self, tensor: torch.Tensor, kind: MemoryKind) -> _Storage:
        """Returns the entry of a tensor's storage; where it is new, of this kind."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage)
        if known is None:
            # DTensor infers strides on tensors of global shapes on meta, which need no memory.
            nbytes = 0 if tensor.device.type == "meta" else storage.nbytes()
            known = self._storages[storage] = _Storage(kind, nbytes)
            self._add(kind, nbytes)
            weakref.finalize(storage, self._free, known).atexit = False
            if self._stages:
                self._of_collective[self._stages[-1].collective].add(storage)
        elif self._is_reused(known):
            self._of_collective[self._stages[-1].collective].add(storage)
            self._set(known, self._current_kind, known.nbytes)
        return known

    def _is_reused(self, storage: _Storage) -> bool:
        """Returns whether gradients are copied into memory that unsharded parameters had."""
        copies_in = bool(self._stages) and self._stages[-1].stage is GroupStage.COPY_IN
        return copies_in and storage.kind is MemoryKind.GATHERED

    def _set(self, storage: _Storage, kind: MemoryKind, nbytes: int) -> None:
        self._add(storage.kind, -storage.nbytes)
        storage.kind, storage.nbytes = kind, nbytes
        self._add(kind, nbytes)

    def _free(self, storage: _Storage) -> None:
        self._allocated[storage.kind] -= storage.nbytes

    def _add(self, kind: MemoryKind, nbytes: int) -> None:
        self._allocated[kind] += nbytes
        self.most[kind] = max(self.most.get(kind, 0), self._allocated[kind])
        if nbytes > 0:
            self._update_worst()

    def _update_worst(self) -> None:
        now = sum(self._allocated[kind] for kind in IN_STEP)
        if now > self._most:
            self._most = now
            self.worst = {kind: self._allocated[kind] for kind in IN_STEP}


def _receive_integers(args: tuple[Any, ...], result: Any) -> None:
    """Makes all ranks send what this rank sends, where code reads it: numbers of tokens.

    A fake process group leaves what is received as it was allocated.
    """
    sent, received = next(tensors_in(args)), next(tensors_in(result), None)
    is_read = not sent.is_floating_point() and not isinstance(sent, FakeTensor)
    if is_read and received is not None and received.shape == sent.shape:
        received.copy_(sent)
