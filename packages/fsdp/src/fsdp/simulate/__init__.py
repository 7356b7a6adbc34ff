"""Predicts memory, communication and time of training, without processes.

`units` plans the groups of each `fully_shard` call, `tracing` records what modules compute between
its hooks, and `schedule` makes the list of a step's events from both. `memory`, `optimizer_state`
and `cost` count from that list, `result` has the numbers, tables and pictures, `search` compares
meshes, and `probe` measures the constants of a machine (`machine`).
"""

from fsdp.simulate.cost import Collective, StepTime
from fsdp.simulate.machine import Compute, Constants, Link, MeshSize, Update
from fsdp.simulate.memory import InStep, Memory
from fsdp.simulate.probe import Fit, Probe, probe
from fsdp.simulate.result import Simulation
from fsdp.simulate.search import Best, best_group_size, sweep
from fsdp.simulate.simulation import simulate

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
