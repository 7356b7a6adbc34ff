"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import fused_comm
from testkit.inspection.imports import PACKAGES, loaded_by
from testkit.inspection.torch_snapshot import changes_by, importing

NOT_LOADED = PACKAGES - {"fused_comm"}


def test_version_is_that_of_the_installed_distribution():
    assert fused_comm.__version__ == importlib.metadata.version("fused-comm")


def test_importing_it_loads_no_other_of_our_packages():
    assert not loaded_by("import fused_comm") & NOT_LOADED


STEP = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
reducer = fused_comm.GradReducer([param])
"""


def test_neither_import_nor_use_changes_torch():
    used = """
(param + partial).sum().backward()
reducer.finish()
fused_comm.redistribute_many([partial], [Replicate()])
"""
    found = changes_by(importing("fused_comm"), STEP, used, "del reducer")
    assert found == [[], [], [], []]
