"""What a model takes on a mesh of any size: planned as `fully_shard` does, without processes."""

from fsdp.simulate.constants import Compute, Constants, Link, Update
from fsdp.simulate.cost import Collective, StepTime
from fsdp.simulate.memory import InStep, Memory
from fsdp.simulate.mesh import MeshSize
from fsdp.simulate.probe import Fit, Probe, probe
from fsdp.simulate.search import Best, best_group_size, sweep
from fsdp.simulate.simulation import Simulation, simulate

__all__ = [
    "Best",
    "Collective",
    "Compute",
    "Constants",
    "Fit",
    "InStep",
    "Link",
    "Memory",
    "MeshSize",
    "Probe",
    "Simulation",
    "StepTime",
    "Update",
    "best_group_size",
    "probe",
    "simulate",
    "sweep",
]
