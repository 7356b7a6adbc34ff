"""Whether functions of torch are torch's again: ``torch_after_a_run.py MODEL OUT SYSTEM...``.

Trains a step with each system on one rank, takes back what that has changed as a session does
before its next run, and writes to OUT/SYSTEM.json how many functions of torch were others in
between, and which are others still.
"""

import json
import sys
import types
from pathlib import Path

import torch._dynamo

import dist_rng
import dtensor_rules
import fsdp
import plan_api
import ragged_shard
from integration.train import session
from integration.train.config import parse_config
from integration.train.launch.world import process_group
from integration.train.loop import Trainer
from integration.train.setup import locked_setup

# Nothing of them is in effect yet; what they import of torch is, as is Dynamo, whose import wraps
# functions of torch, and which transformers imports with the first model.
assert all(
    (
        torch._dynamo,
        dist_rng.install,
        dtensor_rules.enable,
        fsdp.fully_shard,
        plan_api.Plan,
        ragged_shard,
    )
)
KINDS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, staticmethod, classmethod, property,
)  # fmt: skip
MODULES = [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]


def functions():
    """Every function of torch's modules and of their classes, with its code."""
    found = {}
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if type(value) in KINDS:
                found[module.__name__, name] = (value, getattr(value, "__code__", None))
            elif issubclass(type(value), type) and str(value.__module__).startswith("torch"):
                for each, member in list(vars(value).items()):
                    if type(member) in KINDS:
                        key = (value.__module__, value.__qualname__, each)
                        found[key] = (member, getattr(member, "__code__", None))
    return found


def train(arguments):
    config = parse_config(arguments)
    with process_group(config.timeout) as world, locked_setup(config, world) as setup:
        Trainer(setup, world).train_step()


def changed(before, after):
    return [".".join(key) for key, value in before.items() if after.get(key) != value]


model, out, *systems = sys.argv[1:]
torchs = functions()
for system in systems:
    train(["--model", model, "--system", system, "--out", f"{out}/{system}"])
    between = functions()
    session.restore_torch()
    found = (len(changed(torchs, between)), changed(torchs, functions()))
    Path(out, f"{system}.json").write_text(json.dumps(found))
