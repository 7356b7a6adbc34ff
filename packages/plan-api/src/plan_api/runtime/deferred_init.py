"""Models made without memory, and materialised as each rank's shards, with the bits of one device.

While the model is made its tensors are fake, and what is done to them is recorded on a *tape*. The
tape is replayed on DTensors: what is random goes through dist-rng, so a shard has the numbers that
the whole tensor would have there (veScale, appendix 12).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from plan_api.runtime.shapes import cut, local_shape

__all__ = ["Tape", "deferred_init", "made_from", "tape_of"]

_Model = TypeVar("_Model", bound=nn.Module)
_Placements = tuple[Placement, ...]

_aten = torch.ops.aten
# Nothing but another object for the same memory.
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
# Elements of the result are those of the argument.
_COPIES = {_aten._to_copy.default, _aten.clone.default}
# Each element is the same whatever the shape, which is the first argument.
_UNIFORM = {
    _aten.empty.memory_format, _aten.zeros.default, _aten.ones.default, _aten.full.default,
}  # fmt: skip


@dataclass(frozen=True)
class _Call:
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]  # that are new
    places: tuple[int, ...]  # of those among all

    def tensors(self) -> Iterator[torch.Tensor]:
        """Arguments and results."""
        for one in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(one, torch.Tensor):
                yield one
        yield from self.results

    @property
    def writes_elements(self) -> bool:
        """Whether it changes its argument in place, each element by itself or by its place."""
        if not isinstance(self.func, torch._ops.OpOverload):
            return False
        others = pytree.tree_leaves((self.args[1:], self.kwargs))
        in_place = self.func._schema.name.endswith("_") and not self.results
        return in_place and not any(isinstance(one, torch.Tensor) for one in others)


class Tape:
    """What was done to fake tensors, in order."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        # By the number of the call before which the model has seeded the generator: its state.
        self._seeded: dict[int, torch.Tensor] = {0: torch.get_rng_state()}

    def record(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Remembers a call; results that are arguments are nothing new.

        Nothing draws while tensors are fake, so where the generator's state is another, the model
        has set it.
        """
        with _disable_current_modes():
            state = torch.get_rng_state()
            if not torch.equal(state, self._latest):
                self._seeded[len(self._calls)] = state
        given = {id(one) for one in pytree.tree_leaves((args, kwargs))}
        new = {
            at: one
            for at, one in enumerate(pytree.tree_leaves(results))
            if isinstance(one, torch.Tensor) and id(one) not in given
        }
        call = _Call(func, tuple(args), dict(kwargs), tuple(new.values()), tuple(new))
        self._calls.append(call)

    @property
    def _latest(self) -> torch.Tensor:
        return next(reversed(self._seeded.values()))

    def seeds(self) -> Iterator[str]:
        """Hashes of the generator's states from which something is drawn, in order."""
        starts = sorted(self._seeded)
        for start, end in zip(starts, [*starts[1:], len(self._calls)], strict=True):
            if any(map(_is_random, self._calls[start:end])):
                state = self._seeded[start].numpy().tobytes()
                yield hashlib.sha256(state).hexdigest()[:16]

    def replay(
        self,
        wanted: Sequence[tuple[torch.Tensor, _Placements]],
        mesh: DeviceMesh,
        random_shards: bool,
    ) -> list[torch.Tensor]:
        """Does it all again with memory.

        Random numbers begin where they began when the model was made; afterwards the generator is
        where one device would have it, unless it has been used or seeded in between.

        Args:
            wanted: fake tensors, each with its placements.
            mesh: of the DTensors.
            random_shards: whether shards have the random numbers of the whole, by dist-rng.

        Returns:
            a DTensor for each. Where a tensor cannot be made by shards, it is made whole and cut.
        """
        now = torch.get_rng_state()
        try:
            with torch.no_grad():
                made = _Replay(self._calls, self._seeded, wanted, mesh, random_shards).run()
        finally:
            if not torch.equal(now, self._latest):
                torch.set_rng_state(now)
        return made


class _Replay:
    def __init__(
        self,
        calls: Sequence[_Call],
        seeded: Mapping[int, torch.Tensor],
        wanted: Sequence[tuple[torch.Tensor, _Placements]],
        mesh: DeviceMesh,
        random_shards: bool,
    ) -> None:
        self._calls, self._seeded, self._mesh = calls, seeded, mesh
        self._wanted = {id(one): to for one, to in wanted}
        self._done: dict[int, torch.Tensor] = {}
        self._random_shards = random_shards
        self._real: dict[int, torch.Tensor] = {}
        self._shards = self._made_by_shards(wanted)

    def run(self) -> list[torch.Tensor]:
        # By storage: a tensor may be changed through another that lies in the same memory.
        last = {_storage(one): at for at, call in enumerate(self._calls) for one in call.tensors()}
        over: dict[int, list[torch.Tensor]] = {}
        for at, call in enumerate(self._calls):
            if at in self._seeded:
                torch.set_rng_state(self._seeded[at])
            results = self._call(call)
            self._real.update(zip(map(id, call.results), results, strict=True))
            for one in call.tensors():
                over.setdefault(last[_storage(one)], []).append(one)
            # What is whole so far is cut as soon as it is done, so that there is one at a time.
            for one in over.pop(at, ()):
                if (to := self._wanted.get(id(one))) is not None and id(one) not in self._done:
                    self._done[id(one)] = self._placed(self._real[id(one)], to)
                self._real.pop(id(one), None)
        return [self._done[one] for one in self._wanted]

    def _call(self, call: _Call) -> list[torch.Tensor]:
        placements = self._shards.get(_storage(call.results[0])) if call.results else None
        if placements is not None and call.func in _UNIFORM:
            return [self._uniform(call, placements)]
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda one: self._real.get(id(one), one), (call.args, call.kwargs)
        )
        results = pytree.tree_leaves(call.func(*args, **kwargs))
        return [results[at] for at in call.places]

    def _uniform(self, call: _Call, placements: _Placements) -> torch.Tensor:
        shape = torch.Size(call.args[0])
        hollow = torch.empty(shape, device="meta")
        part = local_shape(hollow, self._mesh, placements)
        local = call.func(part, *call.args[1:], **call.kwargs)
        stride = hollow.stride()
        return DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def _placed(self, real: torch.Tensor, placements: _Placements) -> torch.Tensor:
        if not isinstance(real, DTensor):
            whole = [p if type(p) is Shard else Replicate() for p in placements]
            real = distribute_tensor(real, self._mesh, whole, src_data_rank=None)
        assert isinstance(real, DTensor)
        return cut(real, placements)

    def _made_by_shards(
        self, wanted: Sequence[tuple[torch.Tensor, _Placements]]
    ) -> dict[int, _Placements]:
        """The storages that are made and changed by each element alone, and how they are placed."""
        placed = {_storage(one): _simple(to) for one, to in wanted}
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


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._tape.record(func, args, kwargs or {}, results)
        return results


@contextlib.contextmanager
def _whole_calls(tape: Tape) -> Iterator[None]:
    """Records as one call what looks at the values that it has drawn, to draw some again."""
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


_tapes: weakref.WeakKeyDictionary[nn.Module, Tape] = weakref.WeakKeyDictionary()


def deferred_init(model_fn: Callable[..., _Model], *args: Any, **kwargs: Any) -> _Model:
    """Makes a model without memory for its parameters, which `parallelize` makes as shards.

    With dist-rng installed they have, bit for bit, the values of one device, and no rank holds more
    than its shards; without it they have them too, but each is made whole first, one at a time.

    Args:
        model_fn: makes the model, on the device on which it is to be.
        args: for it.
        kwargs: for it.

    Returns:
        the model, of fake tensors.

    Raises:
        RuntimeError: it looks at values, which are not there.
    """
    tape = Tape()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Recorder(tape), _whole_calls(tape):
            model = model_fn(*args, **kwargs)
    except DataDependentOutputException as error:
        raise RuntimeError(
            f"deferred_init: the model looks at values of its tensors while it is made ({error}), "
            f"and they have none yet: make it as usual, and give it to parallelize"
        ) from error
    _tapes[model] = tape
    return model


def tape_of(model: nn.Module) -> Tape | None:
    """The tape of a model that was made by `deferred_init`."""
    return _tapes.get(model)


def made_from(model: nn.Module) -> Iterator[str]:
    """What a model of `deferred_init` is made from, as text that all ranks have to share."""
    if (tape := tape_of(model)) is not None:
        yield from (f"deferred_init: random numbers from seed state {one}" for one in tape.seeds())


def _is_random(call: _Call) -> bool:
    """Whether it draws; functions that are recorded as one call are initialisers that do."""
    if not isinstance(call.func, torch._ops.OpOverload):
        return True
    return torch.Tag.nondeterministic_seeded in call.func.tags


def _simple(placements: _Placements) -> _Placements:
    """Those in which torch's operators can make a tensor; where others cut, it is cut later."""
    simple = (Replicate, Shard, _StridedShard)
    return tuple(p if type(p) in simple else Replicate() for p in placements)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
