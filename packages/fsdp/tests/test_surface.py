"""The interface is that of the installed torch's FSDP2; names that torch adds fail here."""

import inspect

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fully_shard

import fsdp
from fsdp.module import FSDPModule

# What torch exports there besides: FSDP1.
FSDP1 = {
    "BackwardPrefetch", "CPUOffload", "FullOptimStateDictConfig",
    "FullStateDictConfig", "FullyShardedDataParallel", "LocalOptimStateDictConfig",
    "LocalStateDictConfig", "MixedPrecision", "OptimStateDictConfig", "OptimStateKeyType",
    "ShardedOptimStateDictConfig", "ShardedStateDictConfig", "ShardingStrategy",
    "StateDictConfig", "StateDictSettings", "StateDictType",
}  # fmt: skip
FUNCTIONS = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


def _arguments(function):
    """The arguments of a function with their defaults, in order."""
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


def _differences(actual, torchs):
    """Arguments of torch's function that another lacks, or has with another default."""
    own = _arguments(actual)
    return {
        name: (default, own.get(name, "missing"))
        for name, default in _arguments(torchs).items()
        if name not in own or own[name] != default
    }


def test_every_name_of_fsdp2_is_exported():
    names = set(torch_fsdp.__all__) - FSDP1
    assert {"fully_shard", "FSDPModule", "MixedPrecisionPolicy"} <= names
    assert names - set(fsdp.__all__) == set()


def test_policies_and_handles_are_torchs_classes():
    """So that their fields and defaults are, and ``isinstance`` of scripts holds."""
    own = set(FUNCTIONS) | {"FSDPModule"}
    for name in set(torch_fsdp.__all__) - FSDP1 - own:
        assert getattr(fsdp, name) is getattr(torch_fsdp, name), name
    assert issubclass(fsdp.FSDPModule, torch_fsdp.FSDPModule)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_torchs_arguments(name):
    assert _differences(getattr(fsdp, name), getattr(torch_fsdp, name)) == {}


METHODS = [name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_torchs_arguments(name):
    assert name in vars(FSDPModule), "inherited: it would look for torch's own state"
    assert _differences(getattr(FSDPModule, name), getattr(torch_fsdp.FSDPModule, name)) == {}


def test_the_interfaces_of_collectives_are_torchs():
    for name in ("AllGather", "ReduceScatter"):
        assert getattr(fsdp.module, name) is getattr(_fsdp_api, name)


def test_the_check_finds_a_missing_argument_and_another_default():
    def torchs(module, *, mesh=None, added=1):
        pass

    def actual(module, *, mesh=0):
        pass

    assert _differences(actual, torchs) == {"mesh": (None, 0), "added": (1, "missing")}
    assert _differences(_fully_shard.fully_shard, torch_fsdp.fully_shard) == {}
