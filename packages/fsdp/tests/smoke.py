"""`nox -s wheels` runs it where only fsdp and its dependencies are installed, without pytest."""

import importlib.metadata
import importlib.resources

import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp.optim import Adam8bit

version = importlib.metadata.version("fsdp")
assert fsdp.__version__ == version, f"{fsdp.__version__} imported, {version} installed"
assert importlib.resources.files(fsdp).joinpath("py.typed").is_file(), "py.typed is missing"

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
whole = [param.detach().clone() for param in model.parameters()]
fsdp.fully_shard(model[0], shard_placement_fn=lambda param: fsdp.Rows(2))
fsdp.fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
assert torch.equal(model[1].bias.full_tensor(), whole[3] - 0.1)
Adam8bit(model.named_parameters(), block_size=2, min_8bit_size=0).step()
assert model[1].bias.full_tensor().isfinite().all()
dist.destroy_process_group()
print(f"fsdp {version}: a model was sharded and took a step, from {fsdp.__file__}")
