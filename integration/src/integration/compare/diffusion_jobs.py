"""The jobs whose generated images are compared: a DiT on one device, and sharded by a plan."""

from typing import Any

from integration.compare.options import CompareOptions
from integration.compare.results_folder import RUNS
from integration.compare.training_job import TrainingJob, make_job, train_config
from integration.compare.variants import REFERENCE, Variant, get_variant
from integration.errors import UsageError
from integration.models import DiTShape, model_shape

FOLDER = "diffusion"
VARIANTS = (REFERENCE, "plan-tp-sp-static")
# A DiT learns digits within hundreds of steps with these, but not with the batch size and the
# learning rate of the language models.
_BATCH = 64
_LEARNING_RATE = 8e-3
_WEIGHT_DECAY = 0.01


def diffusion_jobs(options: CompareOptions) -> tuple[TrainingJob, ...]:
    """Returns the jobs that ``options`` select, the reference first; empty with ``--no-diffusion``.

    Each writes a checkpoint of its last step.

    Raises:
        UsageError: the model generates no images, or an option is invalid.
    """
    if not options.diffusion:
        return ()
    shape = model_shape(options.diffusion_model)
    if not isinstance(shape, DiTShape):
        raise UsageError(
            f"--diffusion-model: expected a DiT, got {options.diffusion_model}, which generates no"
            " images; give one such as dit-small, or leave the comparison out with --no-diffusion"
        )
    variants = [get_variant(name) for name in VARIANTS]
    for variant in variants:
        variant.make().check(variant.ranks, shape)
    return tuple(_job(options, variant, shape) for variant in variants)


def _job(options: CompareOptions, variant: Variant, shape: DiTShape) -> TrainingJob:
    steps = options.diffusion_steps
    choices: dict[str, Any] = variant.choices | {
        "out": options.out / RUNS / FOLDER / f"diffusion-{variant.name}",
        "model": options.diffusion_model,
        "steps": steps,
        "global_batch": _BATCH,
        "micro_batch": _BATCH // variant.data_parallel_degree,
        "learning_rate": _LEARNING_RATE,
        "weight_decay": _WEIGHT_DECAY,
        "warmup_steps": steps // 20,
        "decay_steps": steps // 2,
        "final_checkpoint": True,
    }
    config = train_config(options, choices, option_fields={"steps": "diffusion_steps"})
    return make_job(config, tolerance=shape.tolerance, name=variant.name)
