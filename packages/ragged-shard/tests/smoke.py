"""Run by `nox -s wheels` where only ragged-shard and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources

import ragged_shard

version = importlib.metadata.version("ragged-shard")
assert ragged_shard.__version__ == version, (
    f"{ragged_shard.__version__} imported, {version} installed"
)
assert importlib.resources.files(ragged_shard).joinpath("py.typed").is_file(), "py.typed is missing"
print(f"ragged_shard {version}: imported from {ragged_shard.__file__}")
