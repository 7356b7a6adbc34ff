"""Run by `nox -s wheels` where only plan-api and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources

import plan_api

version = importlib.metadata.version("plan-api")
assert plan_api.__version__ == version, f"{plan_api.__version__} imported, {version} installed"
for name in ("py.typed", "inspect/view/page.css", "inspect/view/page.js"):
    assert importlib.resources.files(plan_api).joinpath(name).is_file(), f"{name} is missing"
print(f"plan_api {version}: imported from {plan_api.__file__}")
