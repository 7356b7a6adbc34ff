"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import dbuffer
from testkit.inspection.imports import PACKAGES, loaded_by
from testkit.inspection.torch_snapshot import changes_by, importing

NOT_LOADED = PACKAGES - {"dbuffer", "ragged_shard"} | {"matplotlib"}


def test_version_is_that_of_the_installed_distribution():
    assert dbuffer.__version__ == importlib.metadata.version("dbuffer")


def test_importing_it_loads_none_of_our_packages_but_ragged_shard():
    assert not loaded_by("import dbuffer") & NOT_LOADED


def test_every_public_name_is_there():
    assert all(hasattr(dbuffer, name) for name in dbuffer.__all__)


BUFFER = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard
from ragged_shard.planner import TensorSpec, plan_layout
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
layout = plan_layout([TensorSpec("w", 12, 3, (4, 3)), TensorSpec("b", 4)], 1, alignment=4)
buffer = dbuffer.DBuffer(layout, mesh, [Shard(0)], torch.float32, full=True)
buffer.copy_from({"w": torch.ones(4, 3), "b": torch.ones(4)})
buffer.all_gather_(async_op=True).wait()
grad = dbuffer.DBuffer(layout, mesh, [Partial()], torch.float32)
grad.copy_from({"w": torch.ones(4, 3), "b": torch.ones(4)})
grad.reduce_scatter_()
buffer.release()
"""


def test_import_changes_nothing_in_torch_and_use_what_ragged_shard_installs():
    imported, installed, used, removed = changes_by(
        importing("dbuffer"),
        "import ragged_shard; ragged_shard.install()",
        BUFFER,
        "del grad, buffer; ragged_shard.uninstall()",
    )
    assert imported == removed == []
    assert used == installed
