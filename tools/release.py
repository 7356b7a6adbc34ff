"""Builds what a release of a package consists of, and checks it: ``python -m tools.release NAME``.

Into ``dist/release`` go the sdist, the wheel that is made from that sdist, and the release notes
out of the CHANGELOG. Nothing is uploaded. Metadata has to be what pyproject.toml says, and that
has to agree with itself; what would keep an index from taking or showing it well is remarked.
``nox -s release`` has twine look at it as well.
"""

from __future__ import annotations

import email
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from packaging.specifiers import SpecifierSet

from tools.build_wheel import build
from tools.changelog import notes
from tools.project_urls import repository, urls_of
from tools.workspace import ROOT, Project, packages

DIST = ROOT / "dist" / "release"
SINGLE = {  # headers of the metadata, by the names of pyproject.toml
    "version": "Version",
    "description": "Summary",
    "license": "License-Expression",
}
CODE = (".py", ".pyi", ".typed", ".css", ".js")  # compiled modules are made


@dataclass(frozen=True)
class Built:
    """A package's distributions.

    Attributes:
        sdist: a tar.gz.
        wheel: made from it.
    """

    sdist: Path
    wheel: Path

    @property
    def metadata(self) -> Message:
        """The wheel's METADATA; its payload is the README."""
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(archive.read(name))

    @property
    def sdist_metadata(self) -> Message:
        """The sdist's PKG-INFO."""
        with tarfile.open(self.sdist) as archive:
            (name,) = (n for n in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", n))
            file = archive.extractfile(name)
            assert file is not None
            return email.message_from_bytes(file.read())


def problems(project: Project, built: Built) -> Iterator[str]:
    """What must not be released like this, a sentence each."""
    metadata, wanted = built.metadata, project.metadata
    for key, header in SINGLE.items():
        if metadata[header] != wanted[key]:
            yield f"{header} is {metadata[header]!r}; pyproject.toml has {wanted[key]!r}"
    if SpecifierSet(metadata["Requires-Python"]) != SpecifierSet(wanted["requires-python"]):
        yield f"Requires-Python is {metadata['Requires-Python']!r}; pyproject.toml has another"
    if metadata["Name"] != project.name:
        yield f"Name is {metadata['Name']!r}; the package's is {project.name!r}"
    for header, found in (
        ("Classifier", wanted.get("classifiers", [])),
        ("License-File", wanted.get("license-files", [])),
    ):
        if sorted(metadata.get_all(header, [])) != sorted(found):
            yield f"{header} is {metadata.get_all(header)}; pyproject.toml has {found}"
    if built.sdist_metadata.items() != metadata.items():
        yield "the sdist's metadata are not the wheel's"
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    if urls != urls_of(project.name, repository()):
        yield f"Project-URL is {urls}; run python -m tools.project_urls"
    if metadata["Description-Content-Type"] != "text/markdown":
        yield f"Description-Content-Type is {metadata['Description-Content-Type']}, not Markdown"
    if readme_of(metadata) != (project.folder / "README.md").read_text().strip():
        yield "the description is not README.md"
    yield from _disagreements(project, metadata)
    yield from _of_files(project, built)


def _disagreements(project: Project, metadata: Message) -> Iterator[str]:
    version = metadata["Version"]
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"the version {version!r} is not x.y.z"
    if f'__version__ = "{version}"' not in (project.source / "__init__.py").read_text():
        yield f"__init__.py does not say __version__ = {version!r}"
    classified = "Programming Language :: Python :: 3."
    found = [each for each in metadata.get_all("Classifier", []) if each.startswith(classified)]
    range_ = SpecifierSet(metadata["Requires-Python"])
    supported = [f"{classified}{minor}" for minor in range(30) if f"3.{minor}.0" in range_]
    if sorted(found) != sorted(supported):
        yield f"Requires-Python {range_} is {supported}; classifiers say {found}"
    for requirement in metadata.get_all("Requires-Dist", []):
        if "==" in requirement.partition(";")[0] or "@" in requirement:
            yield f"it needs {requirement}; expected a range of versions (docs/adr/0001)"


def _of_files(project: Project, built: Built) -> Iterator[str]:
    base = project.source.parent
    source = {str(path.relative_to(base)) for path in base.rglob("*") if path.name.endswith(CODE)}
    source = {path for path in source if not path.endswith("_built_for.py")}  # made by the build
    missing = source - set(zipfile.ZipFile(built.wheel).namelist())
    if missing:
        yield f"the wheel lacks {sorted(missing)}"
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for file in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"):
        if file not in names:
            yield f"the sdist lacks {file}"
    compiled = sorted(name for name in names if name.endswith((".so", ".o", ".pyc")))
    if compiled:
        yield f"the sdist holds {compiled}"
    pure = built.wheel.name.endswith("-py3-none-any.whl")
    if pure == (project.folder / "CMakeLists.txt").exists():
        yield f"{built.wheel.name} is {'not ' * (not pure)}for all machines"


def remarks(built: Built) -> Iterator[str]:
    """What an index would not take, or not show well, a sentence each."""
    metadata = built.metadata
    if not metadata.get_all("Project-URL"):
        yield "no project urls: [tool.workspace] of the root pyproject.toml has no public address"
    links = re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", readme_of(metadata))
    if links:
        yield f"{len(links)} links of the README lead nowhere on an index, {links[0]} the first"
    if "-linux_" in built.wheel.name:
        yield "the wheel is for this machine: an index takes the sdist, or wheels of auditwheel"


def readme_of(metadata: Message) -> str:
    """The README within metadata."""
    payload = metadata.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode().strip()


def main(name: str) -> None:
    """Builds and checks a package; its problems end the process with 1."""
    by_name = {project.name: project for project in packages()}
    if name not in by_name:
        sys.exit(f"no package {name!r}; there are {sorted(by_name)}")
    project = by_name[name]
    version = project.metadata["version"]
    try:
        new = notes(project.folder / "CHANGELOG.md", version)
    except ValueError as error:
        sys.exit(str(error))
    for old in DIST.glob(f"{name.replace('-', '_')}-*"):
        old.unlink()
    built = Built(DIST / f"{name.replace('-', '_')}-{version}.tar.gz", build(project, DIST))
    if found := list(problems(project, built)):
        sys.exit("\n".join(f"{name}: {problem}" for problem in found))
    text = DIST / f"{name}-{version}.md"
    text.write_text(f"# {name} {version}\n\n{new.text}\n")
    print(f"{name} {version}: {built.sdist.name}, {built.wheel.name}, {text.name}")
    if new.date is None:
        print(f"  its notes are under Unreleased: head them [{version}] and the date")
    for remark in remarks(built):
        print(f"  {remark}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python -m tools.release NAME: the name of one package")
    main(sys.argv[1])
