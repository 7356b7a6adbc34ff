"""Run by `nox -s wheels` where only fsdp and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources

import fsdp

version = importlib.metadata.version("fsdp")
assert fsdp.__version__ == version, f"{fsdp.__version__} imported, {version} installed"
assert importlib.resources.files(fsdp).joinpath("py.typed").is_file(), "py.typed is missing"
print(f"fsdp {version}: imported from {fsdp.__file__}")
