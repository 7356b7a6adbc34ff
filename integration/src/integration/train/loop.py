"""The training loop, which is the same for every system."""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from integration.data import (
    Batch,
    BatchLoader,
    Modality,
    Samples,
    Tokenization,
    load_samples,
    split,
)
from integration.errors import DivergedError
from integration.train.checkpoint import checkpoint
from integration.train.checkpoint.saver import CheckpointSaver
from integration.train.config import TrainConfig
from integration.train.folders import make_folder
from integration.train.launch.watchdog import Watchdog
from integration.train.launch.world import World
from integration.train.learning_rate import LearningRateSchedule
from integration.train.measurement.collectives import CollectiveCounter
from integration.train.measurement.dropout_masks import DropoutMasks
from integration.train.measurement.evaluation import Evaluator, plain_loss
from integration.train.measurement.expert_load import ExpertLoad, shares
from integration.train.measurement.profiling import StepProfiler
from integration.train.measurement.progress import ProgressDisplay
from integration.train.measurement.throughput import Throughput
from integration.train.metrics import (
    MetricsFile,
    RunStart,
    RunSummary,
    StepRecord,
    write_start,
    write_summary,
)
from integration.train.model.expert_bias import update_expert_biases
from integration.train.model.loss_scale import LossScale, unscale_gradients
from integration.train.model.parallel_model import ParallelModel, parallel_model, weights_hash
from integration.train.optimizers import build_optimizer
from integration.train.setup import Setup
from integration.train.stop import StopRequest

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class Trainer:
    """One run on this rank: model, optimizer, data and progress.

    All ranks construct it together, with equal ``setup``.

    Attributes:
        loss_scale: factor of the loss in the next step's backward; None but with fp16.

    Raises:
        UsageError: the data is too small, or the checkpoint belongs to another run.
    """

    def __init__(self, setup: Setup, world: World) -> None:
        config = setup.config
        self._setup = setup
        self._world = world
        self._device = setup.system.device
        data = _load_data(setup, world)
        self._data_source = data.source
        self._tokens_per_step = config.global_batch * data.tokens
        parts = split(data, config.eval_samples)
        self._loader = _batch_loader(setup, world, parts.training)
        self._sample = data.sample(0, 0)
        # Step of the newest checkpoint in the run folder, as far as this run knows.
        self._saved_step: int | None = None
        self.loss_scale = LossScale() if config.dtype == "fp16" else None
        identity = _identity(setup, data)
        if setup.resume_from is not None:
            manifest = checkpoint.read_manifest(setup.resume_from)
            checkpoint.require_same(manifest, identity, setup.resume_from)
            self._loader.load_state_dict({"step": manifest.step})
            if self.loss_scale is not None:  # one of another dtype has none
                self.loss_scale = manifest.loss_scale or self.loss_scale
        parallel = parallel_model(setup, world)
        self.model, self._parameters = parallel.model, parallel.parameters
        self._load = _expert_load(config, parallel, self._device.current)
        self._evaluator: Evaluator | None = None
        if parts.held_out is not None:
            loader = _batch_loader(setup, world, parts.held_out)
            steps = config.eval_samples // config.global_batch
            self._evaluator = Evaluator(setup.system, self.model, loader, steps=steps)
        self._eval_loss: float | None = None  # of the last evaluation
        self._initial_weights = weights_hash(self.model) if config.fingerprint else None
        self._first_masks: str | None = None
        self._collectives = CollectiveCounter(config.count_collectives)
        optimizer = build_optimizer(
            config.optimizer,
            self.model,
            layers=setup.shape.layers,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            on_buffers=setup.system.on_buffers,
        )
        self.optimizer = setup.system.optimizer(self.model, optimizer)
        self._schedule = LearningRateSchedule(
            self.optimizer,
            steps=config.steps,
            warmup=config.warmup_steps,
            decay=config.decay_steps,
            cosine_to=_last_share(config),
        )
        self._saver = CheckpointSaver(
            config.out,
            identity,
            world,
            background=config.checkpoint_async,
            keep_checkpoints=config.keep_checkpoints,
            timeout=config.timeout,
            device=self._device,
        )
        self._resume()

    def _resume(self) -> None:
        """Loads the checkpoint that the run resumes from, if any."""
        path, config = self._setup.resume_from, self._setup.config
        if path is None:
            return
        checkpoint.load(
            path,
            self.model,
            self.optimizer,
            self._world,
            device=self._device,
            verified=self._setup.resume_verified,
        )
        if path.resolve().parent == (config.out / checkpoint.FOLDER).resolve():
            self._saved_step = self.step

    @property
    def step(self) -> int:
        """Number of completed steps, including those before a resume."""
        return self._loader.step

    def train_step(self) -> Tensor:
        """Runs one step; returns this rank's mean loss before the update, a float64 scalar."""
        loss = self._backward()
        self._update()
        return loss

    def _backward(self) -> Tensor:
        """Accumulates the gradients of the next step and returns its loss."""
        fingerprint = self._setup.config.fingerprint and self.step == 0
        microbatches = next(self._loader)
        masks = DropoutMasks()
        with masks if fingerprint else nullcontext(), self._load.step():
            total = self._accumulate(microbatches)
        if fingerprint:
            self._first_masks = masks.hexdigest()
        return total

    def _update(self, counts: Tensor | None = None) -> float | None:
        """Steps the optimizer; returns the gradients' norm if they are clipped.

        A step of fp16 whose gradients are not finite is skipped.

        Args:
            counts: load of the experts in this step, summed over all ranks; None: it is summed
                here, if it is needed.
        """
        max_norm, norm = self._setup.config.clip_grad_norm, None
        self._schedule.apply(self.step)
        if self._unscale():
            if max_norm is not None:
                norm = float(self._setup.system.clip(self.model, max_norm))
            self.optimizer.step()
            self._balance(counts)
        self.optimizer.zero_grad()
        return norm

    def _balance(self, counts: Tensor | None) -> None:
        """Moves the biases of experts, where the run does."""
        rate = self._setup.config.expert_bias_rate
        if not rate:
            return
        if counts is None:
            counts = self._load.counts[0].clone()
            dist.all_reduce(counts)
        update_expert_biases(self._load.routers, counts, rate)

    def _unscale(self) -> bool:
        """Undoes the loss scale, if there is one; returns whether the optimizer is to step."""
        scale = self.loss_scale
        if scale is None:
            return True
        finite = unscale_gradients(self.model.parameters(), scale.value, self._device.current)
        self.loss_scale = scale.after(finite=finite)
        return finite

    def _accumulate(self, microbatches: Sequence[Batch]) -> Tensor:
        """Accumulates the gradients of microbatches and returns their mean loss."""
        total = torch.zeros((), dtype=torch.float64, device=self._device.current)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        for index, batch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            total += plain_loss(
                self._setup.system.forward_backward(
                    self.model, batch, parts=len(microbatches), last=last, scale=scale
                )
            )
        return total

    def save(self, *, wait: bool = True) -> Path:
        """Writes a checkpoint of the current step into the run folder (`CheckpointSaver.save`)."""
        self._saved_step = self.step
        return self._saver.save(
            self.step, self.model, self.optimizer, wait=wait, loss_scale=self.loss_scale
        )

    def finish_saving(self) -> None:
        """Waits until a checkpoint that is being written in the background is complete."""
        self._saver.finish()

    def run(self, stop: StopRequest) -> bool:
        """Trains to the last step and writes the run folder; returns False if asked to stop."""
        config, is_main = self._setup.config, self._world.is_main
        dist.barrier()  # other ranks may still be validating the folder
        outputs = _Outputs(config, done=self.step, enabled=is_main)
        display = ProgressDisplay(enabled=is_main, total=config.steps, done=self.step)
        profiler = StepProfiler(self._setup.profile_steps, config.out, self._world.rank)
        watchdog = Watchdog(config.out, timeout=config.timeout)
        self._throughput = Throughput.of(self._setup, self._sample)
        with outputs, display, watchdog, closing(profiler):
            if is_main:
                write_start(config.out, self._start())
            for notice in self._setup.notices:
                display.say(notice)
            if self.step:
                display.say(f"resumed from {self._setup.resume_from} at step {self.step}")
            while self.step < config.steps:
                watchdog.step(f"step {self.step + 1}")
                with profiler.step(self.step + 1):
                    record, stopping = self._timed_step(stop)
                if self._is_evaluated():
                    watchdog.step(f"the evaluation after step {self.step}")
                    record = self._evaluated(record)
                outputs.append(record)
                display.show(record)
                if stopping and self.step < config.steps:
                    end = "there is no checkpoint"
                    if self._setup.system.supports_checkpoints:
                        end = f"its checkpoint is {self.save()}"
                    display.say(f"stopped on request at step {self.step}; {end}")
                    return False
                if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                    self.save(wait=False)
            if config.final_checkpoint and self._saved_step != self.step:
                self.save()
            self.finish_saving()
        if self._evaluator is not None and self._eval_loss is None:  # all steps were done before
            self._eval_loss = self._evaluator.loss()
        summary = self._summary()
        if is_main:
            write_summary(config.out, summary)
        return True

    def _start(self) -> RunStart:
        system = self._setup.system
        pipeline = self._setup.config.pp_degree
        words = [system.name, *system.degrees.options]
        if pipeline > 1:
            words.append(f"--pp-degree {pipeline}")
        return RunStart(self.step, " ".join(words), self._world.size)

    def _timed_step(self, stop: StopRequest) -> tuple[StepRecord, bool]:
        started = time.perf_counter()
        generators = self._device.random_state()
        counted = self.step + 1
        with self._collectives.step(counted):
            loss = self._backward()
        # One small reduction sums the loss, the load of experts, and the stop requests, so that all
        # ranks leave the loop after the same step.
        counts = self._load.counts
        stopping = torch.full_like(loss, stop.requested)
        shared = torch.cat([torch.stack([loss, stopping]), counts.flatten().to(loss.dtype)])
        dist.all_reduce(shared)
        mean = float(shared[0]) / self._world.size
        if not math.isfinite(mean):
            raise self._diverged(f"the loss of step {counted} is {mean}", generators)
        scale = self.loss_scale
        counts = shared[2:].view(counts.shape)
        with self._collectives.step(counted):
            norm = self._update(counts[0])
        if self.loss_scale is not None and self.loss_scale.is_too_small:
            self.loss_scale = scale
            raise self._diverged(f"gradients of step {counted} overflow in fp16", generators)
        seconds = time.perf_counter() - started
        record = StepRecord(
            step=self.step,
            loss=mean,
            seconds=seconds,
            tokens=self._tokens_per_step,
            gradient_norm=norm,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            tokens_per_second=self._tokens_per_step / seconds,
            mfu=self._throughput.mfu(seconds),
            loss_scale=None if scale is None else scale.value,
            expert_load=shares(counts[0]),
            dropped_tokens=self._load.dropped(counts, self._tokens_per_step),
        )
        return record, bool(shared[1])

    def _is_evaluated(self) -> bool:
        """Returns whether an evaluation follows the current step."""
        config = self._setup.config
        every = config.eval_every
        is_due = self.step == config.steps or (every > 0 and self.step % every == 0)
        return self._evaluator is not None and is_due

    def _evaluated(self, record: StepRecord) -> StepRecord:
        """Evaluates the held-out samples; returns the step's record with the results."""
        assert self._evaluator is not None
        self._eval_loss = self._evaluator.loss()
        return replace(
            record, eval_loss=self._eval_loss, eval_perplexity=self._perplexity(self._eval_loss)
        )

    def _perplexity(self, loss: float | None) -> float | None:
        if loss is None or self._setup.shape.modality is not Modality.TEXT:
            return None
        return float(torch.tensor(loss, dtype=torch.float64).exp())  # infinite where exp raises

    def _diverged(self, reason: str, generators: dict[str, Tensor]) -> DivergedError:
        """Saves the state before the current step, whose loss or gradients are not finite."""
        config, step = self._setup.config, self.step
        last = step * config.global_batch - 1
        samples = f"(the step has samples {last - config.global_batch + 1} to {last})"
        if not self._setup.system.supports_checkpoints:
            return DivergedError(
                f"{reason}; training stopped before its update, without a"
                f" checkpoint: restart with a smaller --learning-rate or other data {samples}"
            )
        self._loader.load_state_dict({"step": step - 1})
        self._device.set_random_state(generators)
        self.optimizer.zero_grad()
        path = self.save()
        return DivergedError(
            f"{reason}; training stopped before its update, and the"
            f" checkpoint of step {step - 1} is {path}: resume it with a smaller --learning-rate"
            f" or other data {samples}"
        )

    def _summary(self) -> RunSummary:
        setup = self._setup
        peaks: list[int] = [0] * self._world.size
        dist.all_gather_object(peaks, self._collectives.peak_rss_bytes)
        device_peaks: list[int] = [0] * self._world.size
        dist.all_gather_object(device_peaks, self._device.peak_bytes)
        return RunSummary(
            system=setup.system.name,
            model=setup.config.model,
            parameters=self._parameters,
            world_size=self._world.size,
            data_parallel_degree=setup.batch_plan.degree,
            accumulation=setup.batch_plan.accumulation,
            micro_batch=setup.batch_plan.micro_batch,
            steps=setup.config.steps,
            data_source=self._data_source,
            peak_rss_bytes=peaks,
            device=self._device.type,
            peak_device_bytes=device_peaks if self._device.is_accelerator else None,
            initial_weights=self._initial_weights,
            first_masks=self._first_masks,
            collectives=self._collectives.counts,
            product_flops=self._collectives.product_flops,
            eval_loss=self._eval_loss,
            eval_perplexity=self._perplexity(self._eval_loss),
        )


def _last_share(config: TrainConfig) -> float | None:
    """Returns the last share of the learning rate of a cosine; None: there is none."""
    if config.schedule != "cosine":
        return None
    return config.min_learning_rate / config.learning_rate


def _load_data(setup: Setup, world: World) -> Samples:
    config, checkpoints = setup.config, setup.resume_from and setup.resume_from.parent
    return load_samples(
        setup.shape.modality,
        config.data,
        sequence_length=config.sequence_length,
        seed=config.seed,
        tokenization=Tokenization(
            config.tokenizer,
            folder=config.out,
            resumed=checkpoints and checkpoints.parent,
            first_on_host=world.is_first_on_host,
        ),
        document_positions=setup.system.has_documents,
    )


def _batch_loader(setup: Setup, world: World, data: Samples) -> BatchLoader:
    """Returns the loader of this rank's microbatches.

    Ranks beyond the data-parallel degree get the same data as others: they share the model.
    """
    plan, rank = setup.batch_plan, setup.system.data_rank(world.rank, world.size)
    if setup.system.shards_batches:
        plan, rank = plan.of_all_ranks(), 0
    return BatchLoader(
        data,
        plan,
        rank=rank,
        seed=setup.config.seed,
        device=setup.system.device,
        on_host=setup.system.inputs_on_host,
    )


def _identity(setup: Setup, data: Samples) -> checkpoint.Identity:
    config = setup.config
    return checkpoint.Identity(
        model=asdict(setup.shape),
        data_fingerprint=data.fingerprint,
        sequence_length=config.sequence_length,
        global_batch=config.global_batch,
        seed=config.seed,
        optimizer=config.optimizer,
        tokenizer=data.tokenizer,
        eval_samples=config.eval_samples,
    )


def _expert_load(
    config: TrainConfig, parallel: ParallelModel, device: torch.device | str
) -> ExpertLoad:
    if config.compile != "none":  # compiled layers run without hooks
        return ExpertLoad(nn.Identity(), {}, device)
    drops = config.capacity_factor is not None
    return ExpertLoad(parallel.model, parallel.routers, device, drops=drops)


def _tensorboard_writer(folder: Path, first_step: int) -> "SummaryWriter":
    # Half a second to import, which other ranks and runs without it save.
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(folder, purge_step=first_step)


class _Outputs(AbstractContextManager["_Outputs"]):
    """The files that are written in every step: metrics.jsonl, and TensorBoard's if enabled."""

    def __init__(self, config: TrainConfig, *, done: int, enabled: bool) -> None:
        self._metrics: MetricsFile | None = None
        self._writer: SummaryWriter | None = None
        if enabled:
            make_folder(config.out)
            self._metrics = MetricsFile(config.out, keep_steps=done)
            if config.tensorboard:
                self._writer = _tensorboard_writer(config.out / "tensorboard", done + 1)

    def append(self, record: StepRecord) -> None:
        if self._metrics is not None:
            self._metrics.append(record)
        if self._writer is not None:
            self._writer.add_scalar("loss", record.loss, record.step)
            self._writer.add_scalar("seconds per step", record.seconds, record.step)
            optional = {
                "tokens per second": record.tokens_per_second,
                "MFU": record.mfu,
                "gradient norm": record.gradient_norm,
                "learning rate": record.learning_rate,
                "evaluation loss": record.eval_loss,
                "evaluation perplexity": record.eval_perplexity,
                "loss scale": record.loss_scale,
            }
            for layer, loads in enumerate(record.expert_load or ()):
                for expert, load in enumerate(loads):
                    optional[f"expert load/layer {layer}, expert {expert}"] = load
            for layer, drops in enumerate(record.dropped_tokens or ()):
                for expert, number in enumerate(drops):
                    optional[f"dropped tokens/layer {layer}, expert {expert}"] = number
            for name, value in optional.items():
                if value is not None:
                    self._writer.add_scalar(name, value, record.step)

    def __exit__(self, *_: object) -> None:
        for output in (self._metrics, self._writer):
            if output is not None:
                output.close()
