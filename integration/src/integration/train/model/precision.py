"""Matrix products of linear layers with operands in low precision, where no plan says so."""

from torch import nn

from integration.errors import UsageError
from integration.systems.base import LayerPolicies


def use_precision(model: nn.Module, policies: LayerPolicies, device: str) -> None:
    """Makes linear layers quantize the operands of their products.

    Args:
        model: on any device.
        policies: the recipe, and the layers without it.
        device: type of the device on which the model will run.

    Raises:
        UsageError: blocks of the recipe do not divide the sizes of a layer, or no layer is left.
    """
    if policies.precision == "none":
        return
    # Imported on use: most runs have no recipe.
    from plan_api import RECIPES, use_low_precision

    recipe = RECIPES[policies.precision]()
    try:
        use_low_precision(model, policies.low_precision_path, recipe, device=device)
    except ValueError as error:
        raise UsageError(f"--precision {policies.precision}: {error}") from error
