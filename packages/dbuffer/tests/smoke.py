"""Run by `nox -s wheels` where only dbuffer and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard

import dbuffer
from ragged_shard.planner import TensorSpec, plan_layout

version = importlib.metadata.version("dbuffer")
assert dbuffer.__version__ == version, f"{dbuffer.__version__} imported, {version} installed"
assert importlib.resources.files(dbuffer).joinpath("py.typed").is_file(), "py.typed is missing"

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
layout = plan_layout([TensorSpec("w", 12, 3, (4, 3)), TensorSpec("b", 4)], 1, alignment=4)
given = {"w": torch.randn(4, 3), "b": torch.randn(4)}
small = dbuffer.DBuffer(layout, mesh, [Shard(0)], torch.float32)
small.copy_from(given)
full = dbuffer.DBuffer(layout, mesh, [Shard(0)], torch.float32, full=True)
view = full.view("w")
full.release()
assert view.untyped_storage().nbytes() == 0
full.acquire()
full.copy_(small)
full.all_gather_(async_op=True).wait()
assert torch.equal(view, given["w"])
grad = dbuffer.DBuffer(layout, mesh, [Partial()], torch.float32)
grad.copy_from(given)
grad.reduce_scatter_()
assert torch.equal(grad.dtensor("b").full_tensor(), given["b"])
assert "<svg" in full.report().svg()
dist.destroy_process_group()
print(f"dbuffer {version}: a buffer was gathered and reduced, from {dbuffer.__file__}")
