"""The inputs, outputs and forwards of pipeline stages, by family of models.

The model's class is not changed. Where layers pass one tensor on, a stage runs the class's own
forward (`DecoderFamily`); where they pass on a second one, the stage runs its lines of that forward
(`DiffusionFamily`). The last stage computes the loss as the model does, in its forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from integration.data import POSITIONS
from integration.errors import UsageError
from integration.pipeline.split import Chain, has_unit

# A transformers model's `_pp_plan` has the names of what its modules take and return, by module.
_LLAMA_PLAN = {
    "model.embed_tokens": (["input_ids"], ["inputs_embeds"]),
    "model.layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
    "model.norm": (["hidden_states"], ["hidden_states"]),
    "lm_head": (["hidden_states"], ["logits"]),
}
_EMBEDDED = {"input_ids", "inputs_embeds"}  # what modules before the layers take
_HEAD = "lm_head"
_EMBEDDERS = ("x_embedder", "t_embedder", "y_embedder")


@dataclass(frozen=True)
class PassedTensor:
    """A tensor that stages pass on, with the batch as first dim.

    Attributes:
        name: of the argument that takes it in the next stage's forward.
        is_sequence: whether its second dim is the sequence.
    """

    name: str
    is_sequence: bool


class ModelFamily(ABC):
    """Models that are split into stages in the same way.

    Attributes:
        passed: what a stage passes on to the next one, in order.
        sequence_length_matters: whether the model computes with the length of the sequence of what
            it passes on, outside of its units.
    """

    passed: tuple[PassedTensor, ...]
    sequence_length_matters: bool

    @abstractmethod
    def chain(self, model: nn.Module) -> Chain:
        """Returns the names of a model's units.

        Raises:
            UsageError: its loss needs more than the output of the last stage.
        """

    @abstractmethod
    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Returns the inputs of the first stage, each with the batch as first dim."""

    @abstractmethod
    def keywords(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what all stages take by name, with the batch as first dim, such as labels."""

    @abstractmethod
    def set_forward(self, part: nn.Module, *, first: bool) -> None:
        """Gives a stage's part of a model the forward of the stage.

        The first stage takes `inputs`, the others what the previous stage has passed on; all take
        `keywords`. The last stage returns what the model returns, the others what they pass on.
        """


class DecoderFamily(ModelFamily):
    """Hugging Face's decoders, such as LLaMA and Mixtral, by the modules that `_pp_plan` names."""

    passed = (PassedTensor("hidden_states", is_sequence=True),)
    sequence_length_matters = True  # positions and masks

    def chain(self, model: nn.Module) -> Chain:
        """Returns embedding, layers, norm and head, and what else the model's `_pp_plan` names.

        Raises:
            UsageError: its loss needs more than the output of the last stage, or it has parameters
                in modules that are no units.
        """
        config: Any = model.config
        if getattr(config, "output_router_logits", False):
            raise UsageError(
                "output_router_logits = True adds a loss of all layers' routers, which the last"
                " stage of a pipeline does not have; set it to False, or use --pp-degree 1"
            )
        chain = _decoder_chain(model)
        assert chain is not None  # `family_of` has found it
        units = tuple(f"{unit}." for unit in chain.units)
        for name, _ in model.named_parameters():
            if not name.startswith(units):
                raise UsageError(
                    f"pipeline: expected parameters in {', '.join(chain.inputs)}, the layers,"
                    f" {' and '.join(chain.outputs)}, got {name} of {type(model).__name__}, which"
                    " no stage would have; use --pp-degree 1"
                )
        return chain

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Returns the tokens, (batch, sequence) int64."""
        return (batch["input_ids"],)

    def keywords(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the labels, and positions in documents if there are: (batch, sequence) int64."""
        names = ("labels", POSITIONS)
        return {name: batch[name] for name in names if name in batch}

    def set_forward(self, part: nn.Module, *, first: bool) -> None:
        """Uses the class's forward, from tokens or hidden states."""
        part.forward = MethodType(_decode_tokens if first else _decode_hidden_states, part)
        _select_layer_types(_base(part))


def _decoder_chain(model: nn.Module) -> Chain | None:
    """Returns the units of a decoder: by its `_pp_plan`, or by LLaMA's names without one."""
    plan: Mapping[str, Any] = getattr(model, "_pp_plan", None) or _LLAMA_PLAN
    modules = dict(model.named_modules())
    if not plan.keys() <= modules.keys():
        return None
    lists = [name for name in plan if isinstance(modules[name], nn.ModuleList)]
    if len(lists) != 1 or _HEAD not in plan:
        return None
    layers = tuple(f"{lists[0]}.{name}" for name, _ in modules[lists[0]].named_children())
    first = tuple(name for name, (taken, _) in plan.items() if _EMBEDDED & {*taken})
    rest = tuple(name for name in plan if name not in (*first, *lists, _HEAD))
    return Chain(first, layers, (*rest, _HEAD))


def _base(model: Any) -> Any:
    """Returns the part of a decoder without its head."""
    return getattr(model, model.base_model_prefix)


def _select_layer_types(model: Any) -> None:
    """Selects the kinds of attention of a stage's layers, which its forward counts from 0."""
    kinds = getattr(model.config, "layer_types", None)
    if kinds is not None:
        model.config = copy(model.config)
        model.config.layer_types = [kinds[int(name)] for name, _ in model.layers.named_children()]


# Arguments are named as in the classes' forwards, as plans refer to them, and bound as methods, so
# that a copy of a stage does not call the original.
def _decode_tokens(
    model: Any,
    input_ids: Tensor,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Any:
    return _decode(model, input_ids, labels, shift_labels, position_ids)


def _decode_hidden_states(
    model: Any,
    hidden_states: Tensor,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Any:
    return _decode(model, hidden_states, labels, shift_labels, position_ids)


def _decode(
    model: Any,
    first: Tensor,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    position_ids: Tensor | None,
) -> Any:
    positions = {} if position_ids is None else {POSITIONS: position_ids}
    if not has_unit(model, _HEAD):
        return _base(model)(input_ids=first, **positions).last_hidden_state
    shifted = {} if shift_labels is None else {"shift_labels": shift_labels}
    return type(model).forward(model, input_ids=first, labels=labels, **shifted, **positions)


class DiffusionFamily(ModelFamily):
    """DiTs with the loss of predicted noise; stages also pass on the condition of the blocks."""

    passed = (
        PassedTensor("tokens", is_sequence=True),
        PassedTensor("condition", is_sequence=False),
    )
    sequence_length_matters = False

    def chain(self, model: nn.Module) -> Chain:
        """Returns the embedders, the blocks, the final layer and the loss."""
        blocks = model.get_submodule("model.blocks")
        names = tuple(f"model.blocks.{name}" for name, _ in blocks.named_children())
        embedders = tuple(f"model.{name}" for name in _EMBEDDERS)
        return Chain(embedders, names, ("model.final_layer",), ("criterion",))

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Returns images (batch, channels, size, size), times and classes (batch,)."""
        return batch["x"], batch["t"], batch["y"]

    def keywords(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the noise, (batch, channels, size, size)."""
        return {"noise": batch["noise"]}

    def set_forward(self, part: nn.Module, *, first: bool) -> None:
        """Uses the lines of the class's forwards before, within and after the blocks."""
        model: Any = part.model
        part.forward = MethodType(_diffuse_images if first else _diffuse_tokens, part)
        model.forward = MethodType(_embed_and_run if first else _run_blocks, model)


# Without the final layer there is no criterion either, which then passes on what it gets first.
def _diffuse_images(part: Any, x: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> Any:
    return type(part).forward(part, x, t, y, noise)


def _diffuse_tokens(part: Any, tokens: Tensor, condition: Tensor, noise: Tensor) -> Any:
    return part.criterion(part.model(tokens, condition), noise)


def _embed_and_run(model: Any, x: Tensor, t: Tensor, y: Tensor) -> Any:
    tokens = model.x_embedder(x) + model.pos_embed
    return _run_blocks(model, tokens, model.t_embedder(t) + model.y_embedder(y, model.training))


def _run_blocks(model: Any, tokens: Tensor, condition: Tensor) -> Any:
    for block in model.blocks:
        tokens = block(tokens, condition)
    if has_unit(model, "final_layer"):
        return model._unpatchify(model.final_layer(tokens, condition))
    # What is passed on must be a result of this stage, for a backward of inputs only.
    return tokens.contiguous(), condition.clone()


def family_of(model: nn.Module) -> ModelFamily:
    """Returns the family of a model.

    Raises:
        UsageError: the model belongs to none.
    """
    if _decoder_chain(model) is not None:
        return DecoderFamily()
    names = {name for name, _ in model.named_modules()}
    if {f"model.{name}" for name in (*_EMBEDDERS, "blocks", "final_layer")} <= names:
        return DiffusionFamily()
    raise UsageError(
        "pipeline: expected a Hugging Face decoder (with a _pp_plan of embeddings, layers and an"
        f" lm_head) or a DiT, got {type(model).__name__}; use --pp-degree 1"
    )
