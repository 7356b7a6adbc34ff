"""A small package is built for real; then what was built, or its metadata, is spoilt."""

import io
import shutil
import tarfile
import zipfile

import pytest

from tools import release
from tools.build_wheel import build
from tools.release import Built, main, problems, remarks
from tools.workspace import Project

PYPROJECT = """
[build-system]
requires = ["scikit-build-core>=0.11"]
build-backend = "scikit_build_core.build"

[project]
name = "tiny-one"
version = "0.1.0"
description = "Small"
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.11,<3.13"
classifiers = ["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"]
dependencies = ["torch>=2.11,<2.16"]

[tool.scikit-build]
wheel.cmake = false
"""
CHANGELOG = "# Changelog of tiny-one\n\n## [Unreleased]\n\n### Added\n\n- All of it.\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "packages" / "tiny-one"
    source = folder / "src" / "tiny_one"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (source / "py.typed").write_text("")
    (folder / "LICENSE").write_text("Take it.\n")
    (folder / "README.md").write_text("# tiny-one\n\nSee [this](../x.md), [that](#tiny-one).\n")
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    dist = tmp_path_factory.mktemp("dist")
    wheel = build(Project(folder), dist)
    return folder, Built(dist / "tiny_one-0.1.0.tar.gz", wheel)


@pytest.fixture
def copied(made, tmp_path):
    """The project and what was built of it, both free to be spoilt."""
    folder, built = made
    shutil.copytree(folder, tmp_path / "tiny-one")
    for path in (built.sdist, built.wheel):
        shutil.copy(path, tmp_path)
    return Project(tmp_path / "tiny-one"), Built(
        tmp_path / built.sdist.name, tmp_path / built.wheel.name
    )


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def edit_wheel(built, old, new):
    """Replaces text in the METADATA of the wheel and in that of the sdist."""
    with zipfile.ZipFile(built.wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(built.wheel, "w") as archive:
        for name, content in files.items():
            changed = name.endswith("METADATA")
            assert not changed or old in content.decode()
            archive.writestr(name, content.decode().replace(old, new) if changed else content)


def edit_sdist(built, change):
    """Has a function change the sdist's files, by name without the folder above."""
    with tarfile.open(built.sdist) as archive:
        files = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
    top = next(iter(files)).partition("/")[0]
    files = {name.partition("/")[2]: content for name, content in files.items()}
    change(files)
    with tarfile.open(built.sdist, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_what_was_built_is_fine_and_what_an_index_would_not_show_is_remarked(made):
    folder, built = made
    assert list(problems(Project(folder), built)) == []
    found = list(remarks(built))
    assert [remark.split(";")[0].split(":")[0] for remark in found] == [
        "no project urls",
        "1 links of the README lead nowhere on an index, ../x.md the first",
    ]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "tiny-one"', 'name = "tiny-two"', "Name is 'tiny-one'; the package's is"),
        ('version = "0.1.0"', 'version = "0.2.0"', "Version is '0.1.0'; pyproject.toml has '0.2.0"),
        ('"Small"', '"Large"', "Summary is 'Small'; pyproject.toml has 'Large'"),
        ('"Apache-2.0"', '"MIT"', "License-Expression is 'Apache-2.0'"),
        ("<3.13", "<3.14", "Requires-Python is '<3.13,>=3.11'; pyproject.toml has another"),
        ('["LICENSE"]', '["COPYING"]', "License-File is ['LICENSE']"),
        (' 3.12"', ' 3.13"', "Classifier is ["),
    ],
)
def test_metadata_that_pyproject_does_not_say(copied, old, new, sentence):
    project, built = copied
    edit(project.folder / "pyproject.toml", old, new)
    assert any(found.startswith(sentence) for found in problems(Project(project.folder), built))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (">=3.11", ">=3.12", "Requires-Python <3.13,>=3.12 is ['Programming"),
        ("torch<2.16,>=2.11", "torch==2.13.0", "it needs torch==2.13.0; expected a range"),
        ("torch<2.16,>=2.11", "torch @ file:///t", "it needs torch @ file:///t; expected a range"),
        ("Version: 0.1.0", "Version: 0.1.dev0", "the version '0.1.dev0' is not x.y.z"),
        ("text/markdown", "text/x-rst", "Description-Content-Type is text/x-rst, not Markdown"),
        ("See [this]", "Look at [this]", "the description is not README.md"),
        ("Summary: Small", "Summary: Other", "the sdist's metadata are not the wheel's"),
    ],
)
def test_metadata_that_do_not_agree(copied, old, new, sentence):
    project, built = copied
    edit_wheel(built, old, new)
    assert any(found.startswith(sentence) for found in problems(project, built))


def test_a_version_that_the_code_does_not_say(copied):
    project, built = copied
    edit(project.source / "__init__.py", "0.1.0", "0.0.9")
    assert list(problems(project, built)) == ["__init__.py does not say __version__ = '0.1.0'"]


def test_files_that_a_wheel_lacks(copied):
    project, built = copied
    (project.source / "more.py").write_text("")
    assert list(problems(project, built)) == ["the wheel lacks ['tiny_one/more.py']"]


def test_a_wheel_for_all_machines_of_a_package_that_is_compiled(copied):
    project, built = copied
    (project.folder / "CMakeLists.txt").write_text("")
    (found,) = problems(project, built)
    assert found == "tiny_one-0.1.0-py3-none-any.whl is for all machines"


def test_a_wheel_of_one_machine_of_a_package_that_is_not_compiled(copied):
    project, built = copied
    other = built.wheel.with_name("tiny_one-0.1.0-cp311-cp311-linux_x86_64.whl")
    one = Built(built.sdist, built.wheel.rename(other))
    assert list(problems(project, one)) == [f"{other.name} is not for all machines"]
    assert any("auditwheel" in remark for remark in remarks(one))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda files: files.pop("LICENSE"), "the sdist lacks LICENSE"),
        (lambda files: files.pop("CHANGELOG.md"), "the sdist lacks CHANGELOG.md"),
        (lambda files: files.update({"src/a/_core.so": b""}), "the sdist holds ['src/a/_core.so']"),
    ],
    ids=["no licence", "no changelog", "a compiled module"],
)
def test_an_sdist_that_is_not_the_source(copied, change, problem):
    project, built = copied
    edit_sdist(built, change)
    assert list(problems(project, built)) == [problem]


@pytest.fixture
def releasing(made, tmp_path, monkeypatch):
    """`main` on the small package, which is not built again, into a folder."""
    folder, built = made
    dist = tmp_path / "dist"
    dist.mkdir()

    def copies(project, to):
        shutil.copy(built.sdist, to)
        return to / shutil.copy(built.wheel, to)

    shutil.copytree(folder, tmp_path / "tiny-one")
    monkeypatch.setattr(release, "DIST", dist)
    monkeypatch.setattr(release, "build", copies)
    monkeypatch.setattr(release, "packages", lambda: [Project(tmp_path / "tiny-one")])
    return tmp_path


def test_a_release_has_notes_and_says_what_is_left_to_do(releasing, capsys):
    (releasing / "dist" / "tiny_one-0.0.9.tar.gz").write_text("")
    main("tiny-one")
    dist = releasing / "dist"
    assert {path.name for path in dist.iterdir()} == {
        *("tiny_one-0.1.0.tar.gz", "tiny_one-0.1.0-py3-none-any.whl", "tiny-one-0.1.0.md")
    }
    notes = (dist / "tiny-one-0.1.0.md").read_text()
    assert notes == "# tiny-one 0.1.0\n\n### Added\n\n- All of it.\n"
    assert "head them [0.1.0] and the date" in capsys.readouterr().out


def test_of_a_dated_version_nothing_is_left_to_do(releasing, capsys):
    edit(releasing / "tiny-one" / "CHANGELOG.md", "[Unreleased]", "[0.1.0] - 2026-11-23")
    main("tiny-one")
    assert "head them" not in capsys.readouterr().out


def test_what_must_not_be_released_ends_with_its_problems(releasing):
    (releasing / "tiny-one" / "src" / "tiny_one" / "more.py").write_text("")
    with pytest.raises(SystemExit, match=r"tiny-one: the wheel lacks \['tiny_one/more.py'\]"):
        main("tiny-one")
    assert not list((releasing / "dist").glob("*.md"))


def test_a_changelog_without_news_ends_before_anything_is_built(releasing):
    edit(releasing / "tiny-one" / "CHANGELOG.md", "- All of it.", "")
    with pytest.raises(SystemExit, match="'Added' with 0 words"):
        main("tiny-one")
    assert not list((releasing / "dist").iterdir())


def test_an_unknown_package_is_an_error(releasing):
    with pytest.raises(SystemExit, match=r"no package 'nope'; there are \['tiny-one'\]"):
        main("nope")
