"""Torch, accelerate and transformers find the private names that they read: private_names.py."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.fsdp import _fully_shard

import fsdp
from fsdp.private_names import ModuleNames, StateNames
from fsdp.state import FSDPContext, state_of
from testkit import fake_mesh

READERS = (
    "torch.distributed.pipelining.stage",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed._composable.replicate",
    "accelerate.accelerator",
    "accelerate.utils.fsdp_utils",
    "accelerate.utils.other",
    "transformers.core_model_loading",
    "transformers.distributed.fsdp",
    "transformers.distributed.mixin",
    "transformers.distributed.utils",
    "transformers.integrations.fsdp",
    "transformers.modeling_utils",
    "transformers.trainer",
)
# Private names of other objects there, which FSDP2 happens to have, too.
OF_OTHERS = {
    "torch.distributed._composable.replicate": {"_pre_forward", "_post_forward"},  # of its state
    "accelerate.accelerator": {"_device"},  # of the state of accelerate
    "accelerate.utils.other": {"_modules"},  # of nn.Module
}


def _private(source, *, of_self):
    """The private attributes that a source uses, either of ``self`` or of anything else."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and (isinstance(node.value, ast.Name) and node.value.id == "self") == of_self
    }


def _private_of_fsdp2():
    folder = Path(_fully_shard.__file__).parent
    return set().union(*(_private(p.read_text(), of_self=True) for p in folder.glob("*.py")))


@pytest.mark.parametrize("reader", READERS)
def test_readers_read_names_that_sharded_modules_have(reader):
    package = reader.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    spec = importlib.util.find_spec(reader)
    if spec is None:
        pytest.skip(f"the installed {package} has no {reader}")
    read = _private(Path(spec.origin).read_text(), of_self=False) & _private_of_fsdp2()
    names = {name for owner in (ModuleNames, StateNames) for name in vars(owner)}
    assert read - OF_OTHERS.get(reader, set()) <= names


def test_the_check_finds_a_name_that_is_read():
    source = "def read(self, state):\n    return state._lazy_init(), self._own\n"
    assert _private(source, of_self=False) == {"_lazy_init"}
    assert _private(source, of_self=True) == {"_own"}
    assert {"_lazy_init", "_comm_ctx"} <= _private_of_fsdp2()


def test_a_sharded_module_has_every_name():
    with fake_mesh((2,)):
        module = fsdp.fully_shard(nn.Linear(4, 4))
        state = module._get_fsdp_state()
        assert torch_fsdp.fully_shard.state(module) is state is state_of(module)
        assert isinstance(state._state_ctx, FSDPContext)
        assert state._state_ctx.all_states == []  # until it has run
        assert len(state._fsdp_param_groups) == len(state.groups) == 1
        for group in (state._fsdp_param_group, *state._fsdp_param_groups):
            group.post_backward()  # without gradients
        assert list(_get_registry(module)) == ["fully_shard"]
        with pytest.raises(AssertionError, match="No FSDP state found on"):
            ModuleNames._get_fsdp_state(nn.Linear(4, 4))


@pytest.mark.parametrize("package", [torch_fsdp, fsdp])
def test_stages_that_share_a_communication_context_are_recognized(package):
    with fake_mesh((2,)):
        stages = [package.fully_shard(nn.Linear(4, 4)) for _ in range(3)]
        package.share_comm_ctx(stages[:2])
        contexts = [id(stage._get_fsdp_state()._comm_ctx) for stage in stages]
        assert contexts[0] == contexts[1] != contexts[2]


def test_state_dicts_of_dcp_do_not_take_a_sharded_module_for_one_of_fsdp1():
    with fake_mesh((2,)):
        module = fsdp.fully_shard(nn.Linear(4, 4))
        assert dcp_state_dict._get_module_fsdp_state_if_fully_sharded_module(module) is None
