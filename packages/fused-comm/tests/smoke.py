"""Run by `nox -s wheels` where only fused-comm and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources

import fused_comm

version = importlib.metadata.version("fused-comm")
assert fused_comm.__version__ == version, f"{fused_comm.__version__} imported, {version} installed"
assert importlib.resources.files(fused_comm).joinpath("py.typed").is_file(), "py.typed is missing"
print(f"fused_comm {version}: imported from {fused_comm.__file__}")
