"""Run by `nox -s wheels` where only dist-rng and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources

import torch

import dist_rng

version = importlib.metadata.version("dist-rng")
assert dist_rng.__version__ == version, f"{dist_rng.__version__} imported, {version} installed"
assert importlib.resources.files(dist_rng).joinpath("py.typed").is_file(), "py.typed is missing"
torch.manual_seed(0)
expected = torch.rand(100)
torch.manual_seed(0)
part = dist_rng.uniform_(torch.empty(30), dist_rng.Region.flat((100,), 50, 80))
assert torch.equal(part, expected[50:80]), "a part is not the part of the whole"
print(f"dist_rng {version}: imported from {dist_rng.__file__}")
