"""Run by `nox -s wheels` where only dtensor-rules and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources

import dtensor_rules

version = importlib.metadata.version("dtensor-rules")
assert dtensor_rules.__version__ == version, (
    f"{dtensor_rules.__version__} imported, {version} installed"
)
assert importlib.resources.files(dtensor_rules).joinpath("py.typed").is_file(), (
    "py.typed is missing"
)
print(f"dtensor_rules {version}: imported from {dtensor_rules.__file__}")
