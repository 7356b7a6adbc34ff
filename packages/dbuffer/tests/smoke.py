"""Run by `nox -s wheels` where only dbuffer and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources

import dbuffer

version = importlib.metadata.version("dbuffer")
assert dbuffer.__version__ == version, f"{dbuffer.__version__} imported, {version} installed"
assert importlib.resources.files(dbuffer).joinpath("py.typed").is_file(), "py.typed is missing"
print(f"dbuffer {version}: imported from {dbuffer.__file__}")
