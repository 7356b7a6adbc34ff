"""Runs a training and observes one rank."""

from __future__ import annotations

import json
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from integration.data import POSITIONS
from integration.option_table.recording import local_tensor
from integration.train.metrics import RunSummary, StepRecord, read_metrics, read_summary

if TYPE_CHECKING:
    from integration.systems import System
    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer

# Collectives are counted in the second step and operators in the third: after the initialisation
# of the first step, and so that the two recorders do not observe each other.
STEPS = 3
_COUNTED, _PROFILED = 2, 3
# What is called for communication beside products, and for products in low precision.
_TRANSFER = "plan_api.ops.overlap.transfer.Transfer.wait"
_LOW_PRECISION = "plan_api.ops.low_precision.linear.multiply"
# The operator of attention's backward, once per layer: the fused one, or softmax with dropout.
_ATTENTION_BACKWARD = (
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_softmax_backward_data",
)


@dataclass(frozen=True)
class TrainingObservation:
    """The observations of this rank in a run of `STEPS` steps.

    Attributes:
        parameters: elements of the full model.
        local_numel: elements of this rank's parameters after the run.
        weights: SHA-256 of the full initial weights.
        built_on: device types of the parameters that the system parallelized; ``"fake"`` for
            parameters that were drawn afterwards.
        is_fsdp: whether the model is an `FSDPModule`.
        head_dtype: dtype of the output layer's compute; None if this rank does not have it.
        head_shape: shape of the output layer's result on this rank.
        head_is_dtensor: whether that result is a DTensor.
        head_calls: calls of the output layer in one step.
        knows_documents: whether the decoder runs with positions that restart with documents, or
            with a mask of them.
        collectives: bytes of one step by kind.
        sent: the kinds of collectives of that step, each with a dtype that it sends.
        overlapped: transfers of one step beside products of linear layers.
        quantized: matrix products of one step with operands in low precision; 0 if layers are
            compiled.
        operators: calls of operators in one step, by name; empty unless layers are compiled or the
            run profiles itself.
        activations: calls of activation functions in the forward of one step; 0 if layers are
            compiled.
        activations_again: calls of activation functions in the backward of that step.
        expert_calls: calls of modules of experts in the forward of one step.
        token_exchanges: all-to-alls of tokens and their numbers in that step.
        dropped: share of elements that dropout zeroed in one step; 0 if layers are compiled.
        graphs: number of graphs of torch.compile.
        graph_breaks: number of graph breaks of torch.compile.
        optimizer: name of the optimizer's class.
        state_dtypes: dtypes of the optimizer's state.
        clipped_norm: norm of all gradients in the last step of the optimizer.
        background_saves: checkpoints that were written in the background.
        records: records of ``metrics.jsonl``, on the first rank.
        summary: summary of the run, on the first rank.
        files: relative paths in the run folder, on the first rank.
    """

    parameters: int
    local_numel: int
    weights: str | None
    built_on: tuple[str, ...]
    is_fsdp: bool
    head_dtype: torch.dtype | None
    head_shape: tuple[int, ...] | None
    head_is_dtensor: bool
    head_calls: int
    knows_documents: bool
    collectives: dict[str, int]
    sent: frozenset[tuple[str, str]]
    overlapped: int
    quantized: int
    operators: dict[str, int]
    activations: int
    activations_again: int
    expert_calls: int
    token_exchanges: int
    dropped: float
    graphs: int
    graph_breaks: int
    optimizer: str
    state_dtypes: tuple[torch.dtype, ...]
    clipped_norm: float
    background_saves: int
    records: tuple[StepRecord, ...]
    summary: RunSummary | None
    files: tuple[str, ...]

    @property
    def recomputation(self) -> tuple[int, int]:
        """Operators of layers computed in forward, and recomputed in backward, in one step.

        Activation functions count; in compiled layers, whose graphs always recompute those, the
        reciprocal roots of a layer's two normalizations, which graphs save by default.
        """
        if self.activations:
            return self.activations, self.activations_again
        once = 2 * sum(self.operators.get(name, 0) for name in _ATTENTION_BACKWARD)
        # One more is in the normalization before the output layer; of a DTensor two are counted,
        # of itself and of its local tensor.
        outside = self.head_calls * (2 if self.head_is_dtensor else 1)
        return once, self.operators["aten::rsqrt"] - once - outside


@dataclass
class _ModuleHooks:
    """Calls of the output layer and of activation functions, by the number of completed steps."""

    head: Counter[int] = field(default_factory=Counter)
    result: Tensor | None = None
    experts: Counter[int] = field(default_factory=Counter)
    forward: Counter[int] = field(default_factory=Counter)
    backward: Counter[int] = field(default_factory=Counter)
    knows_documents: bool = False

    def find_documents(self, model: nn.Module) -> None:
        """Notes whether the decoder in ``model``, which may be a stage's part, knows documents."""

        def find(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            from plan_api.context_parallel.batch import current_batch

            positions = kwargs.get(POSITIONS)
            self.knows_documents = positions is not None or current_batch() is not None

        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "model":
                module.register_forward_pre_hook(find, with_kwargs=True)

    def install(self, trainer: Trainer, model: nn.Module) -> None:
        """Counts calls in ``model``; of activation functions only where layers are not compiled."""

        def count_head(module: nn.Module, args: Any, result: Tensor) -> None:
            self.head[trainer.step] += 1
            self.result = result.detach()

        def count_activation(module: nn.Module, args: Any, result: Tensor) -> None:
            in_backward = torch._C._current_graph_task_id() != -1
            (self.backward if in_backward else self.forward)[trainer.step] += 1

        def count_experts(module: nn.Module, args: Any, result: Tensor) -> None:
            self.experts[trainer.step] += torch._C._current_graph_task_id() == -1

        compiled = trainer._setup.config.compile != "none"
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "lm_head":
                module.register_forward_hook(count_head)
            elif name.rpartition(".")[2] == "experts":
                module.register_forward_hook(count_experts)
            elif name.rpartition(".")[2] == "act_fn" and not compiled:
                module.register_forward_hook(count_activation)

    def observed(self) -> dict[str, Any]:
        """Returns the fields of `TrainingObservation` that hooks see."""
        local = None if self.result is None else local_tensor(self.result)
        return {
            "head_dtype": None if local is None else local.dtype,
            "head_shape": None if local is None else tuple(local.shape),
            "head_is_dtensor": isinstance(self.result, DTensor),
            "head_calls": self.head[_COUNTED],
            "knows_documents": self.knows_documents,
            "expert_calls": self.experts[_COUNTED],
            "activations": self.forward[_COUNTED],
            "activations_again": self.backward[_COUNTED],
        }


def observe(config: TrainConfig, world: World) -> TrainingObservation:
    """Runs a training on this rank and reports what it did; all ranks call it.

    Args:
        config: of `STEPS` steps, whose collectives are counted in step 2.
        world: of the default process group.

    Raises:
        UsageError: the configuration is refused.
    """
    from torch._dynamo.utils import counters

    from integration.train.model.parallel_model import weights_hash
    from integration.train.setup import prepare
    from integration.train.stop import StopRequest

    torch._dynamo.reset()
    counters.clear()
    setup = prepare(config, world.size)
    built_on = _record_devices(setup.system)
    recorder = _StepRecorder(config)
    trainer = _trainer_with(recorder)(setup, world)
    recorder.modules.install(trainer, trainer.model)
    for part in setup.system.evaluated_modules(trainer.model):
        recorder.modules.find_documents(part)
    weights = None
    if config.pp_degree == 1:  # a stage has only its own
        weights = weights_hash(trainer.model)
    norms: list[float] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(setup.system.clip(trainer.model, float("inf"))))
    )
    with mock.patch.object(dcp, "async_save", wraps=dcp.async_save) as saves:
        assert trainer.run(StopRequest())
    return TrainingObservation(
        parameters=trainer._parameters,
        local_numel=sum(local_tensor(param).numel() for param in trainer.model.parameters()),
        weights=weights,
        built_on=tuple(sorted(built_on)),
        is_fsdp=isinstance(trainer.model, FSDPModule),
        collectives={each.kind: each.bytes for each in trainer._collectives.counts or ()},
        sent=frozenset(
            (call.op, call.dtype) for log in trainer._collectives._logs for call in log.calls
        ),
        overlapped=recorder.calls[_TRANSFER],
        quantized=recorder.calls[_LOW_PRECISION],
        operators=recorder.operators_of_run(world.rank),
        token_exchanges=recorder.token_exchanges,
        dropped=recorder.dropped,
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        optimizer=type(trainer.optimizer).__name__,
        state_dtypes=_state_dtypes(trainer.optimizer),
        clipped_norm=norms[-1],
        background_saves=saves.call_count,
        records=tuple(read_metrics(config.out)) if world.is_main else (),
        summary=read_summary(config.out) if world.is_main else None,
        files=_files(config.out) if world.is_main else (),
        **recorder.modules.observed(),
    )


def _record_devices(system: System) -> set[str]:
    """Returns the device types of the parameters with which ``parallelize`` will be called."""
    built_on: set[str] = set()
    parallelize = system.parallelize

    def parallelize_and_record(model: nn.Module, *args: Any) -> nn.Module:
        built_on.update(_device_type(param) for param in model.parameters())
        return parallelize(model, *args)

    system.parallelize = parallelize_and_record  # type: ignore[method-assign, assignment]
    return built_on


@dataclass
class _AttentionFactors:
    """Factors by which attention over sharded sequences multiplies its weights, by dropout."""

    zeros: int = 0
    factors: int = 0

    @property
    def share(self) -> float:
        """Share of zeros."""
        return self.zeros / self.factors if self.factors else 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the factors that are drawn within the block."""
        from plan_api.context_parallel.dropout import DropoutMasks

        draw = DropoutMasks.factors

        def draw_and_count(masks: DropoutMasks, *args: Any) -> Tensor:
            found = draw(masks, *args)
            self.zeros += int((found == 0).sum())
            self.factors += found.numel()
            return found

        with mock.patch.object(DropoutMasks, "factors", draw_and_count):
            yield


@dataclass
class _TokenExchanges:
    """All-to-alls of tokens that are dispatched to experts, and of their numbers."""

    started: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts those that are started within the block."""
        from plan_api.runtime.policies.kept_exchanges import exchanged

        def count(start: Callable[[], Tensor]) -> Tensor:
            def start_and_count() -> Tensor:
                self.started += 1
                return start()

            return exchanged(start_and_count)

        with mock.patch("plan_api.ops.expert_dispatch.rows.exchanged", count):
            yield


class _StepRecorder:
    """Records the first step's dropout masks, and what a later one exchanges or runs."""

    def __init__(self, config: TrainConfig) -> None:
        from integration.train.measurement.dropout_masks import DropoutMasks

        self._config = config
        self._operators = Counter[str]()
        self._masks, self.modules = DropoutMasks(), _ModuleHooks()
        self._of_attention, self._exchanges = _AttentionFactors(), _TokenExchanges()
        self.calls = Counter[str]()

    def backward(self, step: int, backward: Callable[[], Tensor]) -> Tensor:
        """Calls ``backward`` after ``step`` completed steps."""
        compiled = self._config.compile != "none"
        if step == 0 and self._config.dropout and not compiled:
            with self._masks, self._of_attention.counted():
                return backward()
        if step + 1 == _COUNTED and not compiled:
            with self._counted_calls():
                return backward()
        # Operators are evidence for compiled layers only; a run that profiles itself has a trace.
        if step + 1 != _PROFILED or not compiled or self._config.profile_steps:
            return backward()
        with torch.profiler.profile() as profile:
            loss = backward()
        self._operators.update(event.name for event in profile.events())
        return loss

    @contextmanager
    def _counted_calls(self) -> Iterator[None]:
        """Counts the calls of what options add to a step within the block."""
        names = [_TRANSFER] * (self._config.overlap is not None)
        names += [_LOW_PRECISION] * (self._config.precision != "none")
        with ExitStack() as stack:
            for name in names:
                function = pkgutil.resolve_name(name)

                def called(*args: Any, _name: str = name, _function: Any = function) -> Any:
                    self.calls[_name] += 1
                    return _function(*args)

                stack.enter_context(mock.patch(name, called))
            if self._config.ep > 1:
                stack.enter_context(self._exchanges.counted())
            yield

    @property
    def token_exchanges(self) -> int:
        """All-to-alls of tokens in the counted step."""
        return self._exchanges.started

    @property
    def dropped(self) -> float:
        """Share of elements that dropout zeroed, in attention over sharded sequences, too."""
        return self._masks.share or self._of_attention.share

    def operators_of_run(self, rank: int) -> dict[str, int]:
        """Returns calls of operators by name; from the trace of a run that profiles itself."""
        if self._config.profile_steps:  # torch has one profiler at a time
            path = self._config.out / f"profile/rank{rank}.pt.trace.json"
            events = json.loads(path.read_text())["traceEvents"]
            self._operators.update(event.get("name", "") for event in events)
        return dict(self._operators)


def _trainer_with(recorder: _StepRecorder) -> type[Trainer]:
    from integration.train.loop import Trainer

    class ObservedTrainer(Trainer):
        def _backward(self) -> Tensor:
            return recorder.backward(self.step, super()._backward)

    return ObservedTrainer


def _state_dtypes(optimizer: torch.optim.Optimizer) -> tuple[torch.dtype, ...]:
    state = [each for of_parameter in optimizer.state.values() for each in of_parameter.values()]
    return tuple({local_tensor(each).dtype: None for each in state if _is_array(each)})


def _files(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))


def _device_type(param: Tensor) -> str:
    from torch._subclasses import FakeTensor

    return "fake" if isinstance(param, FakeTensor) else param.device.type


def _is_array(state: object) -> bool:
    return isinstance(state, Tensor) and state.ndim > 0
