"""Run by `nox -s wheels` where only dtensor-rules and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources
from pathlib import Path

import dtensor_rules

version = importlib.metadata.version("dtensor-rules")
assert dtensor_rules.__version__ == version, (
    f"{dtensor_rules.__version__} imported, {version} installed"
)
assert importlib.resources.files(dtensor_rules).joinpath("py.typed").is_file(), (
    "py.typed is missing"
)
assert Path(dtensor_rules.get_include(), "dtensor_rules", "rule.h").is_file(), "rule.h is missing"
dtensor_rules.enable()  # the extension module loads, and torch is as it expects
assert dtensor_rules.is_enabled()
dtensor_rules.disable()
print(f"dtensor_rules {version}: imported from {dtensor_rules.__file__}")
