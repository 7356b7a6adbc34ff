"""Examples of a README are found, and fail where they fail."""

import subprocess

import pytest

from testkit.inspection.readme import blocks, examples, page_examples, run_examples


def _test_file(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "tests").mkdir()
    return str(tmp_path / "tests" / "test_readme.py")


def test_python_blocks_are_examples(tmp_path):
    text = "```python\na = 1\n```\n```\nno = 1\n```\n```python\nb = 2\n```\n"
    assert examples(_test_file(tmp_path, text)) == ["a = 1\n", "b = 2\n"]


def test_blocks_of_a_packages_pages_are_examples_but_for_those_of_example_md(tmp_path):
    test_file, pages = str(tmp_path / "packages/name/tests/test_x.py"), tmp_path / "docs/packages"
    (pages / "name").mkdir(parents=True)
    for name in ("details", "example", "first-change"):
        (pages / "name" / f"{name}.md").write_text(f"```python\n{name[0]} = 1\n```\n")
    (pages / "name" / "api.md").write_text("no block\n")
    assert page_examples(test_file) == ["d = 1\n", "f = 1\n"]
    with pytest.raises(ValueError, match=r"other: expected at least one ```python block"):
        page_examples(str(tmp_path / "packages/other/tests/test_x.py"))


def test_blocks_of_any_language_also_within_lists():
    text = "```\nplain\n```\n\n- item\n\n  ```sh\n  ls\n    -l\n  ```\n\n```python\na\n```\n"
    assert blocks(text, "") == ["plain\n"]
    assert blocks(text, "sh") == ["ls\n  -l\n"]
    assert blocks(text, "python") == ["a\n"]
    assert blocks(text, "cpp") == []


def test_a_readme_without_any(tmp_path):
    with pytest.raises(ValueError, match=r"README.md: expected at least one ```python block"):
        examples(_test_file(tmp_path, "nothing"))


def test_an_example_that_fails_is_named_and_sees_nothing_of_those_before(tmp_path, capfd):
    run_examples(["here = 'here'", "open('here', 'w')"], tmp_path)
    assert (tmp_path / "here").exists()
    run_examples(
        ["import torch; torch.left = 1", "import torch; assert not hasattr(torch, 'left')"],
        tmp_path,
    )
    with pytest.raises(subprocess.CalledProcessError):
        run_examples(["here = 1", "\nprint(here)", "print('not run')"], tmp_path)
    output, error = capfd.readouterr()
    assert output == ""
    assert 'example2.py", line 2' in error
    assert "print(here)" in error
