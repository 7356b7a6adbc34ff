"""Quantizes a model's linear layers to the float8 formats of files that transformers reads.

The format is that of DeepSeek-V3 (``quant_method: fp8`` in config.json; transformers'
integrations/finegrained_fp8.py): a weight's float8 elements have the weight's name, and
``weight_scale_inv`` are the factors of their blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from integration.errors import UsageError
from integration.systems.base import LayerPolicies, Precision
from integration.train.config import EXCLUDED_FROM_PRECISION, regular_expression
from plan_api import MXFP8, RECIPES, Float8Block, Float8Tensorwise, quantize_weights
from plan_api.ops.low_precision.recipes import Recipe

__all__ = ["Quantization", "quantize_model"]

_SCALES = "weight_scale_inv"


@dataclass(frozen=True)
class _Format:
    """How files have a recipe's weights.

    Attributes:
        block: rows and columns that share a scale; None: all.
        scales: turns scales, float32 (blocks of rows, blocks in a row), into those in files.
        scales_name: of the dtype of scales, in config.json.
    """

    block: tuple[int, int] | None
    scales: Callable[[torch.Tensor], torch.Tensor]
    scales_name: str = "float"


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    # As bytes: safetensors has no name for the dtype, and transformers reads such files.
    return scales.to(torch.float8_e8m0fnu).view(torch.uint8)


def _format_of(recipe: Recipe) -> _Format | None:
    """Returns None for a recipe whose blocks the format cannot express."""
    if isinstance(recipe, Float8Block):
        return _Format((recipe.block, recipe.block), torch.Tensor.contiguous)
    if isinstance(recipe, Float8Tensorwise):
        return _Format(None, lambda scales: scales.reshape(()))
    if isinstance(recipe, MXFP8):
        return _Format((1, 32), _exponents, "ue8m0")
    return None  # one block per row, of a size that differs between layers


@dataclass(frozen=True)
class Quantization:
    """A recipe for the weights of linear layers.

    Attributes:
        precision: the recipe's name, as of ``--precision``.
        exclude: pattern of the names of linear layers that stay as they are.
    """

    precision: Precision
    exclude: str = EXCLUDED_FROM_PRECISION

    @classmethod
    def of(cls, precision: Precision, exclude: str | None) -> "Quantization | None":
        """Checks options of a command line; None as ``exclude`` is the default.

        Returns:
            None for the recipe ``"none"``.

        Raises:
            UsageError: files cannot have the recipe, or the pattern has an error or no effect.
        """
        if precision == "none":
            if exclude is not None:
                raise UsageError(
                    "--precision-exclude: expected --precision with a recipe, got none; give one, "
                    "or leave --precision-exclude out"
                )
            return None
        if _format_of(RECIPES[precision]()) is None:
            fit = [name for name, made in RECIPES.items() if _format_of(made()) is not None]
            raise UsageError(
                f"--precision {precision}: expected a recipe with blocks that quant_method fp8 of "
                f"transformers has, one of {', '.join(fit)}; give one, or export the weights as "
                f"they are"
            )
        if exclude is None:
            return cls(precision)
        try:
            return cls(precision, regular_expression(exclude))
        except ValueError as error:
            raise UsageError(f"--precision-exclude: {error}") from error


def quantize_model(model: nn.Module, quantization: Quantization) -> None:
    """Replaces the weights of linear layers by float8 elements and scales, in place.

    ``config`` of the model gets a ``quantization_config``, with which ``from_pretrained`` reads the
    files that ``save_safetensors`` writes of the model.

    Args:
        model: of plain tensors.
        quantization: which layers, and how.

    Raises:
        UsageError: the model is not one of transformers, or the recipe does not fit a layer. The
            model is not changed.
    """
    what = f"--precision {quantization.precision}"
    config: Any = getattr(model, "config", None)
    if config is None:
        raise UsageError(
            f"{what}: expected a model of transformers, whose config.json describes the format, "
            f"got {type(model).__name__}; export the weights as they are"
        )
    recipe = RECIPES[quantization.precision]()
    form = _format_of(recipe)
    assert form is not None  # which Quantization.of has checked
    policies = LayerPolicies(
        precision=quantization.precision, precision_exclude=quantization.exclude
    )
    try:
        weights = quantize_weights(model, policies.low_precision_path, recipe)
    except ValueError as error:
        raise UsageError(f"{what}: {error}") from error
    for name, weight in weights.items():
        param = model.get_parameter(name)
        param.requires_grad = False
        param.data = weight.data
        module = model.get_submodule(name.rpartition(".")[0])
        module.register_buffer(_SCALES, form.scales(weight.scales))
    config.quantization_config = _quantization_config(model, form)


def _quantization_config(model: nn.Module, form: _Format) -> dict[str, Any]:
    """Returns what config.json says; transformers makes every other linear layer float8."""
    others = [
        path
        for path, module in model.named_modules()
        if path.endswith(".experts") or (type(module) is nn.Linear and not hasattr(module, _SCALES))
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": None if form.block is None else list(form.block),
        "scale_fmt": form.scales_name,
        "modules_to_not_convert": others,
    }
