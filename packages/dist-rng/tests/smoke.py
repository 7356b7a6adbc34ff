"""Run by `nox -s wheels` where only dist-rng and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources

import dist_rng

version = importlib.metadata.version("dist-rng")
assert dist_rng.__version__ == version, f"{dist_rng.__version__} imported, {version} installed"
assert importlib.resources.files(dist_rng).joinpath("py.typed").is_file(), "py.typed is missing"
print(f"dist_rng {version}: imported from {dist_rng.__file__}")
