"""The place of a pipeline stage in its model, for what parallelizes the stage."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from integration.models import ModelShape
from integration.pipeline.families import ModelFamily
from integration.pipeline.split import Chain
from integration.systems.base import LayerPolicies
from integration.systems.degrees import Degrees


@dataclass(frozen=True)
class StageContext:
    """The place of a stage in the model, and its mesh.

    Attributes:
        mesh: mesh of the ranks that share the stage: one-dimensional, but of a plan's axes for
            plans.
        model: the full model, for its names.
        family: the full model's.
        chain: units of the full model.
        units: names of the stage's units.
        tied: names of units, of this stage or another, that share a parameter with another stage.
        shape: shape of the full model.
        degrees: degrees of the system.
        layer_policies: of the system, for plans.
    """

    mesh: DeviceMesh
    model: nn.Module
    family: ModelFamily
    chain: Chain
    units: Sequence[str]
    tied: Sequence[str]
    shape: ModelShape
    degrees: Degrees
    layer_policies: LayerPolicies

    @property
    def layers(self) -> list[str]:
        """Names of the stage's layers."""
        return [unit for unit in self.units if unit in self.chain.layers]

    @property
    def sharded_apart(self) -> list[str]:
        """Names of the stage's units that are sharded each by itself, as on another stage."""
        return [unit for unit in self.units if unit in self.chain.layers or unit in self.tied]
