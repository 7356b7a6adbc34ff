"""Writes the urls of the packages' pyproject.toml: ``python -m tools.project_urls``.

The one place of the repository's public address is ``repository`` under ``[tool.workspace]`` in the
root pyproject.toml; without an address packages have no urls. ``tools.release`` compares.
"""

from __future__ import annotations

import re
import tomllib

from tools.workspace import ROOT, Project, packages

_TABLE = re.compile(r"\n\[project\.urls\]\n(?:[^\[\n].*\n|\n(?!\[))*")


def repository() -> str:
    """The public address of the repository, or an empty string."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return str(table["tool"]["workspace"]["repository"]).rstrip("/")


def urls_of(name: str, address: str) -> dict[str, str]:
    """The urls of a package, by the labels that an index shows; none without an address."""
    if not address:
        return {}
    folder = f"{address}/tree/main/packages/{name}"
    return {
        "Repository": folder,
        "Changelog": f"{address}/blob/main/packages/{name}/CHANGELOG.md",
        "Documentation": f"{address}/tree/main/docs/packages/{name}",
        "Issues": f"{address}/issues",
    }


def with_urls(text: str, urls: dict[str, str]) -> str:
    """Returns a pyproject.toml with these urls, before its build settings, and no others."""
    text = _TABLE.sub("", text)
    if not urls:
        return text
    table = "[project.urls]\n" + "".join(f'{label} = "{url}"\n' for label, url in urls.items())
    head, marker, tail = text.partition("\n[tool.")
    return f"{head.rstrip()}\n\n{table}{marker}{tail}"


def write(project: Project, address: str) -> bool:
    """Writes the urls of a package; whether its file has changed."""
    path = project.folder / "pyproject.toml"
    before = path.read_text()
    after = with_urls(before, urls_of(project.name, address))
    path.write_text(after)
    return after != before


def main() -> None:
    """Writes the urls of all packages."""
    address = repository()
    changed = [project.name for project in packages() if write(project, address)]
    print(f"{address or 'no address'}: changed {', '.join(changed) or 'nothing'}")


if __name__ == "__main__":
    main()
