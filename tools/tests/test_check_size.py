import pytest

from tools import check_size


@pytest.mark.parametrize("name", ["a.py", "a.cpp", "a.h", "a.cu"])
def test_a_module_of_401_lines_is_named_with_its_remedy(workspace, capsys, name):
    (workspace / "testkit/src/testkit" / name).write_text("x = 1\n" * 401)
    assert check_size.main(workspace) == 1
    assert capsys.readouterr().out == (
        f"testkit/src/testkit/{name}:401: the module has 401 lines, and 400 are the most; "
        "split it into modules with one job each\n"
    )


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        pytest.param("testkit/src/testkit/a.py", 400, id="400 lines"),
        pytest.param("testkit/data.txt", 401, id="a text file"),
        pytest.param("packages/fsdp/build/generated.cpp", 401, id="a build folder"),
    ],
)
def test_what_is_no_long_module_passes(workspace, capsys, path, lines):
    (workspace / path).parent.mkdir(parents=True, exist_ok=True)
    (workspace / path).write_text("x = 1\n" * lines)
    assert check_size.main(workspace) == 0
    assert capsys.readouterr().out == ""
