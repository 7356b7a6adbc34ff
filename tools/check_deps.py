"""Checks which way imports and declared dependencies point: ``python -m tools.check_deps``.

``RULES`` is the direction of dependencies that docs/concepts/architecture.md draws. An import is
lazy inside a function or under ``if TYPE_CHECKING``; what an extra brings is imported lazily only.
Within a package no imports go in a circle, lazy ones included.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.imports import imports
from tools.workspace import ROOT, Project, normalised, projects


@dataclass(frozen=True)
class Allowed:
    """The others that a project may import: its dependencies, and those of its extras."""

    always: set[str] = field(default_factory=set)
    lazily: set[str] = field(default_factory=set)


RULES = {
    "dist_rng": Allowed(),
    "dtensor_rules": Allowed(),
    "fused_comm": Allowed(),
    "ragged_shard": Allowed(),
    "dbuffer": Allowed({"ragged_shard"}),
    "plan_api": Allowed(lazily={"dist_rng", "dtensor_rules", "fused_comm", "ragged_shard"}),
    "fsdp": Allowed(
        {"dbuffer", "fused_comm", "ragged_shard"}, lazily={"dist_rng", "dtensor_rules"}
    ),
    "testkit": Allowed(),
}
RULES["integration"] = Allowed(set(RULES))
STDLIB_ONLY = "ragged_shard.planner"
STDLIB_ONLY_EXTRAS = {"huggingface_hub", "matplotlib", "rich"}  # lazily
# Builds a configured model on meta, lazily: of these two the rest knows nothing.
ON_META, ON_META_EXTRAS = "hugging_face.py", {"torch", "transformers"}
TORCH = "torch>=2.11,<2.16"
TABLE = "or change RULES in tools/check_deps.py and docs/concepts/architecture.md"


def check_module(path: Path, source: Path) -> Iterator[str]:
    """What is wrong with one module's imports."""
    package = ".".join(path.relative_to(source.parent).parent.parts)
    rule = RULES[source.name]
    for found in imports(ast.parse(path.read_text()), package):
        top, where = found.name.partition(".")[0], f"{path}:{found.line}"
        within = f"{found.name}.".startswith(f"{STDLIB_ONLY}.") or top in sys.stdlib_module_names
        extras = STDLIB_ONLY_EXTRAS | (ON_META_EXTRAS if path.name == ON_META else set())
        extra = found.lazy and top in extras
        if f"{package}.".startswith(f"{STDLIB_ONLY}.") and not (within or extra):
            yield f"{where}: {STDLIB_ONLY} imports {found.name}; keep it to the standard library"
        elif top in RULES.keys() - {source.name} - rule.always - rule.lazily:
            yield f"{where}: {source.name} must not import {top}; turn the dependency, {TABLE}"
        elif top in rule.lazily and not found.lazy:
            yield f"{where}: {top} is an extra of {source.name}; import it where a function uses it"


def check_cycles(source: Path) -> Iterator[str]:
    """A cycle among the modules of a package, if there is one."""
    modules = {}
    for path in sorted(source.rglob("*.py*")):
        if path.suffix in {".py", ".pyi"}:
            parts = path.relative_to(source.parent).with_suffix("").parts
            modules[".".join(parts).removesuffix(".__init__")] = path
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        package = ".".join(path.relative_to(source.parent).parent.parts)
        graph[module] = set()
        for found in imports(ast.parse(path.read_text()), package):
            # A module, or what is defined in one; modules made by the build are not here.
            name = found.name if found.name in modules else found.name.rpartition(".")[0]
            if name in modules and name != module:
                graph[module].add(name)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        yield f"{source}: imports go in a circle: {cycle}; move what both use to a third module"


def check_declared(project: Project, workspace: set[str]) -> Iterator[str]:
    """What is wrong with a package's requirements: others than its rule says, pins, torch."""
    path, rule = project.folder / "pyproject.toml", RULES[project.source.name]
    lines = path.read_text().splitlines()
    where = (
        f"{path}:{next((n for n, text in enumerate(lines, 1) if text[:12] == 'dependencies'), 1)}"
    )
    for what, requirements, allowed in (
        ("dependencies", project.dependencies, rule.always),
        ("extras", project.extras, rule.lazily),
    ):
        local = {normalised(text) for text in requirements} & workspace
        if local != (wanted := {name.replace("_", "-") for name in allowed}):
            yield f"{where}: {what} name {sorted(local)}; declare {sorted(wanted)}, {TABLE}"
        for text in requirements:
            if normalised(text) in workspace and (">=" not in text or ",<" not in text):
                yield f"{where}: {text!r} is no range; write >=0.1,<0.2 (docs/adr/0001)"
    if TORCH not in project.dependencies:
        yield f"{where}: torch is not declared as all packages do; write {TORCH!r}"


def main(root: Path = ROOT) -> int:
    """Prints every error of the workspace; the exit status."""
    errors, all_projects = [], projects(root)
    for project in all_projects:
        if project.source.name not in RULES:
            errors.append(f"{project.folder}/pyproject.toml:1: no rule for it; add one to {TABLE}")
            continue
        for path in sorted(project.source.rglob("*.py")):
            errors += check_module(path, project.source)
        errors += check_cycles(project.source)
        if project.folder.parent.name == "packages":
            errors += check_declared(project, {other.name for other in all_projects})
    for error in errors:
        print(error.removeprefix(f"{root}/"))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
