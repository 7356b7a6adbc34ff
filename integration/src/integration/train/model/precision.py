"""Matrix products with operands in low precision, where no plan says so."""

import re

from torch import nn

from integration.errors import UsageError
from integration.systems.base import LayerPolicies


def use_precision(model: nn.Module, policies: LayerPolicies, device: str) -> None:
    """Makes linear layers and experts quantize the operands of their products.

    Args:
        model: on any device.
        policies: the recipe, and the layers without it.
        device: type of the device on which the model will run.

    Raises:
        UsageError: blocks of the recipe do not divide the sizes of a layer, no layer is left, or
            experts with the recipe are compiled.
    """
    if policies.precision == "none":
        return
    named = re.compile(policies.low_precision_path)
    for name, module in model.named_modules():
        # As plan-api knows experts: a mark that transformers gives them.
        is_expert = hasattr(module, "_is_expert_parallel") and named.fullmatch(name)
        if is_expert and policies.compile != "none":
            raise UsageError(
                f"--precision {policies.precision}: expected experts that are not compiled, got "
                f"{name} with --compile {policies.compile}; leave either out, or name the experts "
                f"in --precision-exclude"
            )
    # Imported on use: most runs have no recipe.
    from plan_api import RECIPES, use_low_precision

    recipe = RECIPES[policies.precision]()
    try:
        use_low_precision(model, policies.low_precision_path, recipe, device=device)
    except ValueError as error:
        raise UsageError(f"--precision {policies.precision}: {error}") from error
