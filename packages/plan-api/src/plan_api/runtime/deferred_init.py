"""Initialises models without memory, and materialises each rank's shards bitwise as one device.

While the model is initialised its tensors are fake, and the calls on them are recorded on a *tape*.
The tape is replayed on DTensors: random numbers are drawn by dist-rng, so a shard has the numbers
that the global tensor would have there (veScale, appendix 12). It can be replayed for a part of the
model, such as a pipeline stage: of calls that the part does not depend on, only those that draw
random numbers are repeated, without memory, so that the generator advances as on one device.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from plan_api.runtime.local_shards import local_shape, redistribute_compact

__all__ = ["Tape", "deferred_init", "seed_descriptions", "tape_of"]

_Model = TypeVar("_Model", bound=nn.Module)
_Placements = tuple[Placement, ...]

_aten = torch.ops.aten
# The result is another object for the same memory.
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
# The result has the elements of the argument.
_COPIES = {_aten._to_copy.default, _aten.clone.default}
# All elements are equal; the shape is the first argument.
_UNIFORM = {
    _aten.empty.memory_format, _aten.zeros.default, _aten.ones.default, _aten.full.default,
}  # fmt: skip


@dataclass(frozen=True)
class _RecordedCall:
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]  # that are no arguments
    result_indices: tuple[int, ...]  # of these among all results

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields arguments and results."""
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, torch.Tensor):
                yield leaf
        yield from self.results

    @property
    def writes_elements(self) -> bool:
        """Whether it changes its argument in place, each element independently of the others."""
        if not isinstance(self.func, torch._ops.OpOverload):
            return False
        others = pytree.tree_leaves((self.args[1:], self.kwargs))
        in_place = self.func._schema.name.endswith("_") and not self.results
        return in_place and not any(isinstance(other, torch.Tensor) for other in others)


class Tape:
    """The calls on fake tensors, in order."""

    def __init__(self) -> None:
        self._calls: list[_RecordedCall] = []
        # The generator's states, by the number of the call before which the model has set them.
        self._seeded: dict[int, torch.Tensor] = {0: torch.get_rng_state()}

    def record(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Records a call.

        Fake tensors draw nothing, so where the generator's state has changed, the model has set it.
        """
        with _disable_current_modes():
            state = torch.get_rng_state()
            if not torch.equal(state, self._latest):
                self._seeded[len(self._calls)] = state
        arguments = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        new = {
            at: leaf
            for at, leaf in enumerate(pytree.tree_leaves(results))
            if isinstance(leaf, torch.Tensor) and id(leaf) not in arguments
        }
        call = _RecordedCall(func, tuple(args), dict(kwargs), tuple(new.values()), tuple(new))
        self._calls.append(call)

    @property
    def _latest(self) -> torch.Tensor:
        return next(reversed(self._seeded.values()))

    def seeds(self) -> Iterator[str]:
        """Yields hashes of the generator states from which numbers are drawn, in order."""
        starts = sorted(self._seeded)
        for start, end in zip(starts, [*starts[1:], len(self._calls)], strict=True):
            if any(map(_is_random, self._calls[start:end])):
                state = self._seeded[start].numpy().tobytes()
                yield hashlib.sha256(state).hexdigest()[:16]

    def replay(
        self,
        targets: Sequence[tuple[torch.Tensor, _Placements]],
        mesh: DeviceMesh,
        random_shards: bool,
    ) -> list[torch.Tensor]:
        """Repeats all calls with memory.

        Random numbers start from the state in which the model was initialised; afterwards the
        generator has the state of one device, unless it was used or seeded in between.

        Args:
            targets: fake tensors, each with its placements.
            mesh: of the DTensors.
            random_shards: whether dist-rng draws a shard's part of the global random numbers.

        Returns:
            a DTensor for each. A tensor that cannot be made as shards is made whole and sharded.
        """
        now = torch.get_rng_state()
        try:
            with torch.no_grad():
                made = _Replay(self._calls, self._seeded, targets, mesh, random_shards).run()
        finally:
            if not torch.equal(now, self._latest):
                torch.set_rng_state(now)
        return made


class _Replay:
    def __init__(
        self,
        calls: Sequence[_RecordedCall],
        seeded: Mapping[int, torch.Tensor],
        targets: Sequence[tuple[torch.Tensor, _Placements]],
        mesh: DeviceMesh,
        random_shards: bool,
    ) -> None:
        self._calls, self._seeded, self._mesh = calls, seeded, mesh
        self._targets = {id(one): to for one, to in targets}
        self._done: dict[int, torch.Tensor] = {}
        self._random_shards = random_shards
        self._needed = _storages_needed(calls, [one for one, _ in targets])
        self._outside: DeviceMesh | None = None
        self._real: dict[int, torch.Tensor] = {}
        self._shards = self._made_by_shards(targets)

    def run(self) -> list[torch.Tensor]:
        # By storage: a tensor may be changed through a view.
        last = {
            _storage(tensor): at for at, call in enumerate(self._calls) for tensor in call.tensors()
        }
        finished: dict[int, list[torch.Tensor]] = {}
        for at, call in enumerate(self._calls):
            if at in self._seeded:
                torch.set_rng_state(self._seeded[at])
            if any(_storage(one) in self._needed for one in call.tensors()):
                results = self._call(call)
                self._real.update(zip(map(id, call.results), results, strict=True))
            elif _is_random(call):
                self._skip_numbers(call)
            for one in call.tensors():
                finished.setdefault(last[_storage(one)], []).append(one)
            # A whole tensor is sharded after its last call, so that few exist at a time.
            for one in finished.pop(at, ()):
                if (to := self._targets.get(id(one))) is not None and id(one) not in self._done:
                    self._done[id(one)] = self._placed(self._real[id(one)], to)
                self._real.pop(id(one), None)
        return [self._done[target] for target in self._targets]

    def _call(self, call: _RecordedCall) -> list[torch.Tensor]:
        placements = self._shards.get(_storage(call.results[0])) if call.results else None
        if placements is not None and call.func in _UNIFORM:
            return [self._uniform(call, placements)]
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda one: self._real.get(id(one), one), (call.args, call.kwargs)
        )
        results = pytree.tree_leaves(call.func(*args, **kwargs))
        return [results[at] for at in call.result_indices]

    def _skip_numbers(self, call: _RecordedCall) -> None:
        """Advances the generator by the random numbers of a call whose result is not needed."""
        first = call.args[0] if call.args else None
        if self._random_shards and call.writes_elements and isinstance(first, torch.Tensor):
            empty = self._held_by_others(first)
            call.func(empty, *call.args[1:], **call.kwargs)
            return
        # How many numbers it draws may depend on their values, as in `trunc_normal_`.
        args, kwargs = pytree.tree_map_only(torch.Tensor, _allocated, (call.args, call.kwargs))
        call.func(*args, **kwargs)

    def _held_by_others(self, tensor: torch.Tensor) -> DTensor:
        """Returns a DTensor of a tensor's shape and dtype of which this rank holds nothing."""
        if self._outside is None:
            other = dist.get_rank() + 1  # a mesh without this rank; nothing is sent along it
            self._outside = DeviceMesh(self._mesh.device_type, [other], _init_backend=False)
        nothing = torch.empty([0] * tensor.ndim, dtype=tensor.dtype, device=self._mesh.device_type)
        return DTensor.from_local(
            nothing, self._outside, [Replicate()], run_check=False,
            shape=tensor.shape, stride=tensor.stride(),
        )  # fmt: skip

    def _uniform(self, call: _RecordedCall, placements: _Placements) -> torch.Tensor:
        shape = torch.Size(call.args[0])
        hollow = torch.empty(shape, device="meta")
        local_size = local_shape(hollow, self._mesh, placements)
        local = call.func(local_size, *call.args[1:], **call.kwargs)
        stride = hollow.stride()
        return DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def _placed(self, real: torch.Tensor, placements: _Placements) -> torch.Tensor:
        if not isinstance(real, DTensor):
            whole = [p if type(p) is Shard else Replicate() for p in placements]
            real = distribute_tensor(real, self._mesh, whole, src_data_rank=None)
        assert isinstance(real, DTensor)
        return redistribute_compact(real, placements)

    def _made_by_shards(
        self, targets: Sequence[tuple[torch.Tensor, _Placements]]
    ) -> dict[int, _Placements]:
        """Returns the placements of storages whose elements are initialized independently."""
        placed = {_storage(one): _simple(to) for one, to in targets}
        for call in reversed(self._calls):
            if call.func in _COPIES and (to := placed.get(_storage(call.results[0]))):
                placed.setdefault(_storage(call.args[0]), to)
        for call in self._calls:
            random = torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ())
            simple = call.func in (*_UNIFORM, *_ALIASES, *_COPIES) or call.writes_elements
            if not simple or (random and not self._random_shards):
                for one in call.tensors():
                    placed.pop(_storage(one), None)
            elif call.func in _COPIES and _storage(call.args[0]) not in placed:
                placed.pop(_storage(call.results[0]), None)
        return placed


class _TapeRecorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._tape.record(func, args, kwargs or {}, results)
        return results


@contextlib.contextmanager
def _recorded_initialisers(tape: Tape) -> Iterator[None]:
    """Records `trunc_normal_` as one call: it looks at the values that it has drawn."""
    original = nn.init._no_grad_trunc_normal_

    @functools.wraps(original)
    def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tape.record(original, (tensor, *args), kwargs, tensor)
        return tensor

    nn.init._no_grad_trunc_normal_ = recorded
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


class _DeferredMode(FakeTensorMode):
    """The mode of the fake tensors of one model, which therefore know their tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tape = tape


def deferred_init(model_fn: Callable[..., _Model], *args: Any, **kwargs: Any) -> _Model:
    """Makes a model without memory for its parameters, which `parallelize` materialises as shards.

    Their values are bitwise those of one device. With dist-rng installed no rank allocates more
    than its shards; without it each parameter is made whole first, one at a time.

    Args:
        model_fn: makes the model, on its device.
        args: of ``model_fn``.
        kwargs: of ``model_fn``.

    Returns:
        the model, with fake tensors.

    Raises:
        RuntimeError: it reads values of tensors, which fake tensors do not have.
    """
    tape = Tape()
    try:
        with (
            _DeferredMode(tape),
            _TapeRecorder(tape),
            _recorded_initialisers(tape),
        ):
            model = model_fn(*args, **kwargs)
    except DataDependentOutputException as error:
        raise RuntimeError(
            f"deferred_init: expected a model that does not read values of its tensors while it is "
            f"made, got {error}: make it without deferred_init, and pass it to parallelize"
        ) from error
    return model


def tape_of(model: nn.Module) -> Tape | None:
    """Returns the tape of a model of `deferred_init`, or of a part of one; None for others."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, _DeferredMode):
            return tensor.fake_mode.tape
    return None


def seed_descriptions(model: nn.Module) -> Iterator[str]:
    """Yields the seeds of a model of `deferred_init` as text, for comparison between ranks."""
    if (tape := tape_of(model)) is not None:
        yield from (
            f"deferred_init: random numbers from seed state {seed}" for seed in tape.seeds()
        )


def _is_random(call: _RecordedCall) -> bool:
    """Whether it draws random numbers, as all initialisers recorded as one call do."""
    if not isinstance(call.func, torch._ops.OpOverload):
        return True
    return torch.Tag.nondeterministic_seeded in call.func.tags


def _storages_needed(
    calls: Sequence[_RecordedCall], targets: Sequence[torch.Tensor]
) -> frozenset[int]:
    """Returns the storages of tensors, and of all that they are computed from."""
    needed = {_storage(one) for one in targets}
    for call in reversed(calls):
        used = {_storage(one) for one in call.tensors()}
        if used & needed:
            needed |= used
    return frozenset(needed)


def _allocated(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with memory in place of a fake one."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _simple(placements: _Placements) -> _Placements:
    """Replaces placements that torch's operators cannot make by Replicate."""
    simple = (Replicate, Shard, _StridedShard)
    return tuple(p if type(p) in simple else Replicate() for p in placements)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
