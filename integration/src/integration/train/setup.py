"""Everything about a run that can be wrong before a rank, a model or a file exists."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from integration.data import BatchPlan, Modality, require_source
from integration.errors import UsageError
from integration.metrics import METRICS_FILE, SUMMARY_FILE
from integration.models import ModelShape, model_shape
from integration.optimizers import ADAMW
from integration.paths import require_folder, require_outside
from integration.pipeline.setup import in_pipeline
from integration.systems import SYSTEM_NAMES, System, get_system
from integration.train import checkpoint
from integration.train.config import AUTO_RESUME, NEVER_RESUME, TrainConfig
from integration.train.feature_checks import supported_system
from integration.train.folder_lock import folder_lock
from integration.train.initial import InitialWeights
from integration.train.profiling import StepRange
from integration.train.world import World


@dataclass(frozen=True)
class Setup:
    """A configuration that was found to make sense on a number of ranks.

    Attributes:
        resume_from: the checkpoint to continue from, complete when it was looked at.
        notices: sentences for the user.
    """

    config: TrainConfig
    system: System
    shape: ModelShape
    batch_plan: BatchPlan
    resume_from: Path | None
    notices: tuple[str, ...]
    profile_steps: StepRange | None = None
    initial: InitialWeights | None = None


def prepare(config: TrainConfig, world_size: int) -> Setup:
    """Check ``config`` for ``world_size`` ranks, reading only; nothing is written.

    Raises:
        UsageError: the system, model, batch, data path, run folder or checkpoint does not do, or
            dist-rng is asked for and not installed.
    """
    system = supported_system(config)
    shape = model_shape(config.model)
    if system.families is not None and shape.family not in system.families:
        raise UsageError(
            f"system {system.name!r} has no plan for model {config.model!r}; choose another of them"
        )
    if system.missing is not None:
        raise UsageError(f"system {system.name!r} is {system.missing}; or use --system fsdp2")
    if not system.saves:
        _require_plain(config)
    system = in_pipeline(system, shape, config, world_size)
    system.check(world_size, shape)
    parts = system.microbatch_parts()
    if config.micro_batch % parts:
        raise UsageError(
            f"--micro-batch {config.micro_batch} is cut among {parts} data parallel ranks; give a"
            " multiple of them"
        )
    _check_context(config)
    text = shape.modality is Modality.TEXT
    if text and system.even_sequences and config.sequence_length % config.tp:
        raise UsageError(
            f"system {system.name!r} gives each rank of --tp {config.tp} an equal part of a"
            f" sequence, and --sequence-length is {config.sequence_length}; give a multiple of"
            f" {config.tp}"
        )
    if config.init == "sharded" and not system.takes_deferred:
        if not system.takes_meta:
            raise UsageError(
                f"system {system.name!r} wraps weights that are there already; use --init whole"
            )
        if system.draws_by_dist_rng and config.random != "dist-rng":
            raise UsageError(
                f"torch cannot draw weights on the shards of system {system.name!r}; use --random"
                " dist-rng, or --init whole"
            )
        if not shape.redraws:
            raise UsageError(
                f"model {config.model!r} cannot be drawn anew on its shards by system"
                f" {system.name!r}; use --init whole, or --system plan"
            )
    if config.optimizer != ADAMW:
        if not system.any_optimizer:
            fit = [name for name in SYSTEM_NAMES if get_system(name).any_optimizer]
            raise UsageError(
                f"system {system.name!r} trains with --optimizer adamw only, not"
                f" {config.optimizer}, which takes one of: {', '.join(fit)}"
            )
        if importlib.util.find_spec("fsdp") is None:
            raise UsageError(
                f"--optimizer {config.optimizer} needs the package fsdp, which is not installed;"
                " install it, or use --optimizer adamw"
            )
    if config.warmup_steps + config.decay_steps > config.steps:
        raise UsageError(
            f"{config.warmup_steps} steps of warm-up and {config.decay_steps} of decay are more"
            f" than the {config.steps} of the run; give --steps at least their sum"
        )
    if config.random == "dist-rng" and importlib.util.find_spec("dist_rng") is None:
        raise UsageError(
            "--random dist-rng needs the package dist-rng, which is not installed; install it, or"
            " use --random stock"
        )
    plan = BatchPlan(
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        degree=system.data_parallel_degree(world_size),
    )
    require_source(shape.modality, config.data)
    require_folder(config.out)
    require_outside(config.out, config.data)
    resume_from, notices = _find_checkpoint(config)
    if resume_from is not None and not system.saves:
        raise UsageError(f"system {system.name!r} resumes no checkpoint; give another --out")
    initial = InitialWeights.open(config, shape) if config.init_from else None
    steps = StepRange.parse(config.profile_steps) if config.profile_steps else None
    return Setup(config, system, shape, plan, resume_from, notices, steps, initial)


@contextmanager
def locked_setup(config: TrainConfig, world: World) -> Iterator[Setup]:
    """Keep the run folder of ``config`` to this job for the length of the context.

    All ranks enter it. A mistake is found before anything is written, and looked at is what there
    is once other jobs have ended.

    Raises:
        UsageError: as `prepare` and `folder_lock` do.
    """
    prepare(config, world.size)
    with folder_lock(config.out, world):
        yield prepare(config, world.size)


def _require_plain(config: TrainConfig) -> None:
    """Refuse what reads or writes the weights and gradients that a system keeps to itself."""
    asked = {
        "--pp-degree": config.pp_degree > 1,
        "--init-from": config.init_from is not None,
        "--fingerprint": config.fingerprint,
        "--clip-grad-norm": config.clip_grad_norm is not None,
        "--checkpoint-every": config.checkpoint_every > 0,
    }
    for option, given in asked.items():
        if given:
            raise UsageError(
                f"system {config.system!r} does not take {option}; leave it out, or use --system"
                " fsdp2"
            )


def _check_context(config: TrainConfig) -> None:
    if config.cp == 1:
        return
    if config.dropout:
        raise UsageError(
            f"attention of --cp {config.cp} has no --dropout {config.dropout}; leave either out"
        )
    if config.sequence_length % (2 * config.cp):
        raise UsageError(
            f"--cp {config.cp} gives each rank two parts of a sequence, and --sequence-length is"
            f" {config.sequence_length}; give a multiple of {2 * config.cp}"
        )


def _find_checkpoint(config: TrainConfig) -> tuple[Path | None, tuple[str, ...]]:
    out = config.out
    has_run = (out / METRICS_FILE).exists()
    if config.resume == NEVER_RESUME:
        if has_run:
            raise UsageError(
                f"{out} already holds a run; give another --out, or --resume auto to continue it"
            )
        return None, ()
    if config.resume != AUTO_RESUME:
        path = Path(config.resume)
        checkpoint.read_manifest(path)
        if has_run and path.resolve().parent != (out / checkpoint.FOLDER).resolve():
            raise UsageError(f"{out} already holds another run than {path}'s; give another --out")
        return path, ()
    found = checkpoint.newest_complete(out)
    if found.path is None and found.passed_over:
        raise UsageError(
            f"{out} holds no complete checkpoint to resume ({found.passed_over[0]});"
            " give another --out, or remove it to start over"
        )
    # A run that ended before its first checkpoint starts over; one that finished is kept.
    if found.path is None and (out / SUMMARY_FILE).exists():
        raise UsageError(
            f"{out} holds a finished run without a checkpoint; give another --out, or remove it"
        )
    notices = tuple(f"passed over: {reason}" for reason in found.passed_over)
    return found.path, notices
