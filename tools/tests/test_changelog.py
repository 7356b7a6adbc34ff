import datetime

import pytest

from tools.changelog import notes
from tools.workspace import packages

HEAD = "# Changelog of a\n\nThe format is Keep a Changelog's.\n\n"
OLD = "## [0.1.0] - 2026-01-02\n\n### Added\n\n- Everything.\n"


@pytest.fixture
def says(tmp_path):
    def read(text, version="0.2.0"):
        path = tmp_path / "CHANGELOG.md"
        path.write_text(HEAD + text)
        return notes(path, version)

    return read


def test_what_is_not_released_is_of_the_next_version(says):
    found = says(f"## [Unreleased]\n\n### Fixed\n\n- It works.\n\n### Added\n\n- More.\n\n{OLD}")
    assert found.text == "### Fixed\n\n- It works.\n\n### Added\n\n- More."
    assert found.date is None


@pytest.mark.parametrize("unreleased", ["", "## [Unreleased]\n\n"])
def test_a_dated_version_has_its_own(says, unreleased):
    found = says(unreleased + OLD, "0.1.0")
    assert (found.text, found.date) == ("### Added\n\n- Everything.", datetime.date(2026, 1, 2))


NEW = "## [Unreleased]\n\n### Added\n\n- More.\n\n"


@pytest.mark.parametrize(
    ("text", "version", "sentence"),
    [
        (NEW + OLD, "0.1.0", "0.1.0 is released, and more is under Unreleased; raise the version"),
        (OLD, "0.2.0", "says nothing of 0.2.0, nor under Unreleased"),
        ("## [Unreleased]\n" + OLD, "0.2.0", "says nothing of 0.2.0"),
        ("## [0.2.0]\n\n### Added\n\n- A.\n", "0.2.0", "the heading '.0.2.0.'; expected"),
        ("## [Unreleased] - 2026-01-02\n", "0.2.0", "the heading"),
        ("## 0.2.0 - 2026-01-02\n\n### Added\n\n- A.\n", "0.2.0", "the heading"),
        ("## [0.2.0] - 2026-13-02\n\n### Added\n\n- A.\n", "0.2.0", "month must be in 1..12"),
        ("## [Unreleased]\n\n### News\n\n- A.\n", "0.2.0", "has 'News' with 2 words; expected"),
        ("## [Unreleased]\n\n### Added\n\n### Fixed\n\n- A.\n", "0.2.0", "'Added' with 0 words"),
        ("## [Unreleased]\n\n- A.\n", "0.2.0", "text above its first kind of change: '- A.'"),
    ],
)
def test_a_changelog_that_does_not_fit_is_an_error(says, text, version, sentence):
    with pytest.raises(ValueError, match=sentence):
        says(text, version)


@pytest.mark.parametrize("project", packages(), ids=lambda project: project.name)
def test_each_package_has_something_to_release(project):
    assert notes(project.folder / "CHANGELOG.md", project.metadata["version"]).text
