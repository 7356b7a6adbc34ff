"""Torch, accelerate and transformers find the private names that they read: private_names.py."""

import importlib.util
import re
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

READERS = ("torch.distributed", "accelerate", "transformers")
OF_FSDP = ("torch/distributed/fsdp", "torch/distributed/_tools")  # private_names.py says why
# Of which the readers that private_names.py lists are here, and in every supported version.
LISTED = {
    "torch/distributed/pipelining/stage.py",
    "torch/distributed/pipelining/schedules.py",
    "torch/distributed/_composable/replicate.py",
    "torch/distributed/checkpoint/state_dict.py",
    "accelerate/utils/fsdp_utils.py",
    "transformers/distributed/fsdp.py",
}
# Private names of other objects there, which FSDP2 happens to have, too.
OF_OTHERS = {
    "torch/distributed/_composable/replicate.py": {"_pre_forward", "_post_forward"},  # of its state
    "accelerate/accelerator.py": {"_device"},  # of the state of accelerate
    "accelerate/utils/other.py": {"_modules"},  # of nn.Module
}


def _private(source, *, of_self):
    """The private attributes that a source uses, either of ``self`` or of anything else."""
    owner = r"\bself" if of_self else r"(?<!\bself)"
    return set(re.findall(owner + r"\.(_[a-zA-Z]\w*)", source))


def _private_of_fsdp2():
    folder = Path(_fully_shard.__file__).parent
    return set().union(*(_private(p.read_text(), of_self=True) for p in folder.glob("*.py")))


def _sources(package):
    """The files of a package that may read a sharded module, by their path."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    above = folder.parents[package.count(".")]
    sources = {str(p.relative_to(above)): p.read_text() for p in folder.rglob("*.py")}
    mention = re.compile("fsdp|fully_shard", re.IGNORECASE)
    return {
        path: source
        for path, source in sources.items()
        if mention.search(source) and not path.startswith(OF_FSDP)
    }


@pytest.mark.parametrize("package", READERS)
def test_readers_read_names_that_sharded_modules_have(package):
    sources, of_fsdp2 = _sources(package), _private_of_fsdp2()
    names = {name for owner in (ModuleNames, StateNames) for name in vars(owner)}
    read = {path: _private(source, of_self=False) for path, source in sources.items()}
    unknown = {
        path: (found & of_fsdp2) - names - OF_OTHERS.get(path, set())
        for path, found in read.items()
    }
    assert {path: found for path, found in unknown.items() if found} == {}
    assert {path for path in LISTED if path.startswith(package.replace(".", "/"))} <= set(sources)


def test_the_check_finds_a_name_that_is_read():
    source = "def read(self, state):\n    return state._lazy_init(), self._own, self.it._of_it\n"
    assert _private(source, of_self=False) == {"_lazy_init", "_of_it"}
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
