"""Validates the options, paths and checkpoints of a run before anything is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from integration.data import (
    BYTES,
    BatchPlan,
    Modality,
    open_corpus,
    require_source,
    require_tokens,
)
from integration.errors import UsageError
from integration.models import ModelShape
from integration.systems import System
from integration.train.checkpoint import checkpoint
from integration.train.checkpoint.folder_lock import folder_lock
from integration.train.config import AUTO_RESUME, NEVER_RESUME, TrainConfig
from integration.train.folders import require_folder, require_outside
from integration.train.launch.world import World
from integration.train.measurement.profiling import StepRange
from integration.train.metrics import METRICS_FILE, SUMMARY_FILE
from integration.train.model.initial_weights import InitialWeights
from integration.train.validation import validate


@dataclass(frozen=True)
class Setup:
    """A configuration that was validated for a number of ranks.

    Attributes:
        resume_from: checkpoint to resume from, which was found complete.
        notices: sentences to print.
        resume_verified: whether the checksums of that checkpoint were verified too.
    """

    config: TrainConfig
    system: System
    shape: ModelShape
    batch_plan: BatchPlan
    resume_from: Path | None
    notices: tuple[str, ...]
    profile_steps: StepRange | None = None
    initial: InitialWeights | None = None
    resume_verified: bool = False


def prepare(
    config: TrainConfig,
    world_size: int,
    verification: checkpoint.Verification = checkpoint.unverified,
) -> Setup:
    """Validates ``config`` for ``world_size`` ranks; nothing is written.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        verification: verification of the contents of a checkpoint to resume.

    Raises:
        UsageError: as `validate`; or the data, run folder or checkpoint is invalid.
    """
    run = validate(config, world_size)
    config, system, shape = run.config, run.system, run.shape
    if system.missing is not None:
        raise UsageError(f"system {system.name!r} is {system.missing}; or use --system fsdp2")
    require_source(shape.modality, config.data)
    require_folder(config.out)
    require_outside(config.out, config.data)
    if shape.modality is Modality.TEXT and config.tokenizer == BYTES:
        size = open_corpus(config.data).size
        require_tokens(size, config.global_batch, config.sequence_length)
    resume_from, notices = _find_checkpoint(config, verification)
    if resume_from is not None and not system.supports_checkpoints:
        raise UsageError(
            f"system {system.name!r}: expected a new --out, as it does not resume checkpoints, got"
            f" one with {resume_from}; give another --out"
        )
    initial = InitialWeights.open(config, shape) if config.init_from else None
    return Setup(
        config,
        system,
        shape,
        run.batch_plan,
        resume_from,
        notices,
        run.profile_steps,
        initial,
        resume_verified=verification is not checkpoint.unverified,
    )


@contextmanager
def locked_setup(config: TrainConfig, world: World) -> Iterator[Setup]:
    """Locks the run folder of ``config`` within the context, and validates the run.

    All ranks enter it. The run is validated once before anything is written, and again when no
    other job writes the folder.

    Raises:
        UsageError: as `prepare` and `folder_lock` do.
    """
    prepare(config, world.size)
    with folder_lock(config.out, world):
        yield prepare(config, world.size, checkpoint.verify_together(world))


def _find_checkpoint(
    config: TrainConfig, verification: checkpoint.Verification
) -> tuple[Path | None, tuple[str, ...]]:
    out = config.out
    has_run = (out / METRICS_FILE).exists()
    if config.resume == NEVER_RESUME:
        if has_run:
            raise UsageError(
                f"{out} already contains a run; give another --out, or --resume auto to continue it"
            )
        return None, ()
    if config.resume != AUTO_RESUME:
        path = Path(config.resume)
        manifest = checkpoint.read_manifest(path, verification)
        if has_run and path.resolve().parent != (out / checkpoint.FOLDER).resolve():
            raise UsageError(f"{out} already contains another run than {path}; give another --out")
        return path, _unchecked(path, manifest)
    found = checkpoint.newest_complete(out, verification)
    if found.path is None and found.skipped:
        raise UsageError(
            f"{out} contains no complete checkpoint to resume ({found.skipped[0]});"
            " give another --out, or remove it to start over"
        )
    # A run that ended before its first checkpoint starts over; a finished one is not overwritten.
    if found.path is None and (out / SUMMARY_FILE).exists():
        raise UsageError(
            f"{out} contains a finished run without a checkpoint; give another --out, or remove it"
        )
    notices = tuple(f"skipped: {reason}" for reason in found.skipped)
    if found.path is not None:
        notices += _unchecked(found.path, checkpoint.read_manifest(found.path))
    return found.path, notices


def _unchecked(path: Path, manifest: checkpoint.Manifest) -> tuple[str, ...]:
    if manifest.checksums:
        return ()
    return (f"{path} has no checksums; its contents are not verified",)
