"""Rules of pairs of options, of which one decides whether the other has an effect."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields

from integration.data import Modality
from integration.errors import UsageError
from integration.models import model_shape
from integration.train.config import BLOCK_CAUSAL, TrainConfig, degrees_of
from integration.train.measurement.profiling import StepRange

DEFAULTS = {each.name: each.default for each in fields(TrainConfig)}
assert MISSING not in DEFAULTS.values()


@dataclass(frozen=True)
class OptionRule:
    """A condition under which an option has an effect.

    Attributes:
        option: field of `TrainConfig` to which the rule applies, unless it has its default.
        other: field that determines whether the option has an effect.
        met: whether the option has an effect.
        expected: the expected value of the other option, as a clause.
        remedy: what to do if the rule is not met.
    """

    option: str
    other: str
    met: Callable[[TrainConfig], bool]
    expected: str
    remedy: str

    def check(self, config: TrainConfig) -> None:
        """Refuses an option that would have no effect.

        Raises:
            UsageError: names both options with their values, and the remedy.
        """
        if getattr(config, self.option) == DEFAULTS[self.option] or self.met(config):
            return
        raise UsageError(
            f"{spelled(config, self.option)}: expected {self.expected}, got"
            f" {spelled(config, self.other)}; {self.remedy}"
        )


def _needs_pipeline(option: str) -> OptionRule:
    return OptionRule(
        option,
        "pp_degree",
        lambda config: config.pp_degree > 1,
        "--pp-degree of at least 2",
        f"give --pp-degree as well, or leave {_option(option)} out",
    )


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def spelled(config: TrainConfig, field: str) -> str:
    """Returns the option of a field with its value, as on the command line."""
    value = getattr(config, field)
    if isinstance(value, bool):
        return _option(field) if value else f"--no-{field.replace('_', '-')}"
    return f"no {_option(field)}" if value is None else f"{_option(field)} {value}"


RULES: tuple[OptionRule, ...] = (
    *map(_needs_pipeline, ("pp_split_points", "pp_schedule", "pp_microbatches")),
    OptionRule(
        "placements",
        "pp_degree",
        lambda config: config.pp_degree == 1,
        "--pp-degree 1, as stages keep parameters gathered over their microbatches",
        "leave either out",
    ),
    OptionRule(
        "data",
        "model",
        lambda config: _trains_on_text(config),
        "a language model, as others have fixed data",
        "leave --data out, or choose another --model",
    ),
    OptionRule(
        "sequence_length",
        "model",
        lambda config: _trains_on_text(config),
        "a language model, as others have samples of one size",
        "leave --sequence-length out, or choose another --model",
    ),
    OptionRule(
        "tokenizer",
        "model",
        lambda config: _trains_on_text(config),
        "a language model, as others have no text",
        "leave --tokenizer out, or choose another --model",
    ),
    OptionRule(
        "plan",
        "system",
        lambda config: config.system == "plan",
        "--system plan",
        "use that, or leave --plan out",
    ),
    OptionRule(
        "plan",
        "pp_degree",
        lambda config: config.pp_degree == 1,
        "--pp-degree 1, as stages have plans of the zoo",
        "leave either out",
    ),
    OptionRule(
        "attn_mask_type",
        "model",
        lambda config: model_shape(config.model).limits_attention,
        "a decoder of transformers, which has a mask of documents",
        "leave --attn-mask-type out, or choose another --model",
    ),
    OptionRule(
        "attn_mask_type",
        "plan",
        lambda config: config.plan is None,
        "a plan of the zoo, in which attention takes the mask",
        "leave either out",
    ),
    OptionRule(
        "decay_steps",
        "schedule",
        lambda config: config.schedule == "linear",
        "--schedule linear, as a cosine falls over all steps after --warmup-steps",
        "leave --decay-steps out, or use --schedule linear",
    ),
    OptionRule(
        "min_learning_rate",
        "schedule",
        lambda config: config.schedule == "cosine",
        "--schedule cosine, as a linear decay ends near 0",
        "give that, or leave --min-learning-rate out",
    ),
    OptionRule(
        "min_learning_rate",
        "learning_rate",
        lambda config: config.min_learning_rate <= config.learning_rate,
        "at most --learning-rate",
        "give a smaller one, or a larger --learning-rate",
    ),
    OptionRule(
        "eval_every",
        "eval_samples",
        lambda config: config.eval_samples > 0,
        "--eval-samples of at least --global-batch, which are held out",
        "give --eval-samples as well, or leave --eval-every out",
    ),
    OptionRule(
        "eval_samples",
        "global_batch",
        lambda config: config.eval_samples % config.global_batch == 0,
        "a multiple of --global-batch, as steps of the same size evaluate them",
        "give such a number, or leave --eval-samples out",
    ),
    OptionRule(
        "init",
        "init_from",
        lambda config: config.init_from is None,
        "no --init-from, which reads all weights, so that none are drawn",
        "leave --init out",
    ),
    OptionRule(
        "activation_checkpointing_every",
        "activation_checkpointing",
        lambda config: config.activation_checkpointing == "selective-layer",
        "--activation-checkpointing selective-layer",
        "give that, or leave --activation-checkpointing-every out",
    ),
    OptionRule(
        "activation_checkpointing",
        "zero3",
        lambda config: not (config.zero3 and config.activation_checkpointing == "selective-op"),
        "no --zero3, whose all-gathers in backward selective-op cannot match with forward",
        "use --activation-checkpointing full, or leave --zero3 out",
    ),
    OptionRule(
        "activation_checkpointing",
        "system",
        lambda config: config.system == "plan" or not _keeps_dispatch(config),
        "--system plan, whose ranks send tokens to experts",
        "use --activation-checkpointing full",
    ),
    OptionRule(
        "activation_checkpointing",
        "ep",
        lambda config: (
            not _keeps_dispatch(config)
            or config.plan is not None
            or degrees_of(config).dispatches_tokens
        ),
        "--ep of at least 2 along --dp-shard, --dp-replicate, --cp, or --tp with --sp, whose ranks"
        " send each other tokens",
        "give one of them as well, or use --activation-checkpointing full",
    ),
    OptionRule(
        "precision_exclude",
        "precision",
        lambda config: config.precision != "none",
        "--precision with a recipe",
        "give one, or leave --precision-exclude out",
    ),
    OptionRule(
        "overlap",
        "pp_degree",
        lambda config: config.pp_degree == 1,
        "--pp-degree 1, as the plans of stages wait for communication at once",
        "leave either out",
    ),
    OptionRule(
        "overlap",
        "compile",
        lambda config: config.compile == "none",
        "--compile none, as a graph has no sends and receives",
        "leave either out",
    ),
    OptionRule(
        "overlap",
        "precision",
        lambda config: config.precision == "none",
        "--precision none, as products in low precision are not split",
        "leave either out",
    ),
    OptionRule(
        "checkpoint_async",
        "checkpoint_every",
        lambda config: config.checkpoint_every > 0,
        "--checkpoint-every of at least 1",
        "give --checkpoint-every as well, or leave --checkpoint-async out",
    ),
    OptionRule(
        "keep_checkpoints",
        "final_checkpoint",
        lambda config: config.checkpoint_every > 0 or config.final_checkpoint,
        "--checkpoint-every of at least 1 or --final-checkpoint",
        "give one of them as well, or leave --keep-checkpoints out",
    ),
    OptionRule(
        "compile",
        "cp",
        lambda config: config.cp == 1,
        "--cp 1, as attention over context parallel ranks is not in one graph",
        "leave either out",
    ),
    OptionRule(
        "compile",
        "attn_mask_type",
        lambda config: not plans_documents(config),
        "--attn-mask-type causal under plan, as attention within documents is not in one graph",
        "leave either out",
    ),
    OptionRule(
        "compile",
        "zero3",
        lambda config: not config.zero3,
        "no --zero3, which gathers parameters inside of layers",
        "use --dp-shard without --zero3, or leave --compile out",
    ),
    OptionRule(
        "compile",
        "ep",
        lambda config: not degrees_of(config).dispatches_tokens,
        "--ep 1, or the value of --tp without --sp, as what ranks send to experts is not in one"
        " graph",
        "leave either out",
    ),
    OptionRule(
        "compile",
        "dropout",
        lambda config: config.system != "plan" or config.dropout == 0,
        "--dropout 0 under plan, as dist-rng draws its masks outside of graphs",
        "leave either out",
    ),
    OptionRule(
        "fingerprint",
        "compile",
        lambda config: config.compile == "none" or config.dropout == 0,
        "--compile none with --dropout, as masks of compiled layers cannot be recorded",
        "leave one of the three out",
    ),
    OptionRule(
        "fingerprint",
        "cp",
        lambda config: config.cp == 1 or config.dropout == 0 or not _trains_on_text(config),
        "--cp 1 with --dropout, as attention over sharded sequences draws its masks in parts",
        "leave one of the three out",
    ),
    OptionRule(
        "fingerprint",
        "attn_mask_type",
        lambda config: config.dropout == 0 or not plans_documents(config),
        "--attn-mask-type causal with --dropout under plan, as attention within documents draws its"
        " masks in parts",
        "leave one of the three out",
    ),
    OptionRule(
        "profile_steps",
        "steps",
        lambda config: StepRange.parse(config.profile_steps or "").last <= config.steps,
        "steps of the run",
        "give others, or more --steps",
    ),
    OptionRule(
        "count_collectives",
        "steps",
        lambda config: (config.count_collectives or 0) <= config.steps,
        "a step of the run",
        "give another, or more --steps",
    ),
)


def plans_documents(config: TrainConfig) -> bool:
    """Returns whether attention is within documents by a plan."""
    return config.system == "plan" and config.attn_mask_type == BLOCK_CAUSAL


def _keeps_dispatch(config: TrainConfig) -> bool:
    return config.activation_checkpointing == "keep-dispatch"


def _trains_on_text(config: TrainConfig) -> bool:
    return model_shape(config.model).modality is Modality.TEXT
