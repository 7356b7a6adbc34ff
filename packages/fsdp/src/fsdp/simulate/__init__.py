"""Predicts memory, communication and time of training, without processes.

`recorder` records a step of any parallelized model on fake tensors: compute, collectives and memory
by kind (`events`). `simulated_model` runs the code of `fully_shard` on a copy of a model in a world
of any size (`fake_world`), and `memory`, `optimizer_state` and `cost` count from what was recorded.
`result` has the numbers, tables and pictures, `search` compares meshes, and `probe` measures the
constants of a machine (`machine`).
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
