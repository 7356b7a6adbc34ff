"""The runs whose pictures are compared: a DiT on one device, and sharded by a plan."""

from typing import Any

from integration.compare.folder import RUNS
from integration.compare.job import Job, job_of, train_config
from integration.compare.options import CompareOptions
from integration.compare.variants import REFERENCE, Variant, get_variant
from integration.errors import UsageError
from integration.models import DiTShape, model_shape

FOLDER = "pictures"
WAYS = (REFERENCE, "plan-tp-sp-static")
# With these digits come out of hundreds of steps, where the batches and the learning rate of
# language models leave noise.
_BATCH = 64
_LEARNING_RATE = 8e-3
_WEIGHT_DECAY = 0.01


def picture_jobs(options: CompareOptions) -> tuple[Job, ...]:
    """Return the runs that ``options`` ask for, the reference first; none where left out.

    Each leaves a checkpoint of its last step.

    Raises:
        UsageError: the model draws no pictures, or a number does not do.
    """
    if not options.pictures:
        return ()
    shape = model_shape(options.picture_model)
    if not isinstance(shape, DiTShape):
        raise UsageError(
            f"--picture-model {options.picture_model} draws no pictures; give a DiT, as dit-small,"
            " or leave the comparison out with --no-pictures"
        )
    variants = [get_variant(name) for name in WAYS]
    for variant in variants:
        variant.make().check(variant.ranks, shape)
    return tuple(_job(options, variant, shape) for variant in variants)


def _job(options: CompareOptions, variant: Variant, shape: DiTShape) -> Job:
    steps = options.picture_steps
    choices: dict[str, Any] = variant.choices | {
        "out": options.out / RUNS / FOLDER / f"pictures-{variant.name}",
        "model": options.picture_model,
        "steps": steps,
        "global_batch": _BATCH,
        "micro_batch": _BATCH // variant.data_parallel_degree,
        "learning_rate": _LEARNING_RATE,
        "weight_decay": _WEIGHT_DECAY,
        "warmup_steps": steps // 20,
        "decay_steps": steps // 2,
        "final_checkpoint": True,
    }
    config = train_config(options, choices, spelled={"steps": "picture_steps"})
    return job_of(config, tolerance=shape.tolerance, name=variant.name)
