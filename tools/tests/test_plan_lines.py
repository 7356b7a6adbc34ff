"""Lines of plan code: what is counted, and that the zoo's plans are no longer than the paper's."""

import pytest

from tools.plan_lines import PAPER, ZOO, main, plan_lines, total_lines

SOURCE = '''
import x

def other(mesh):
    return 1

def one(mesh, tp=None):
    """A docstring
    of two lines."""
    from y import z
    check_options("one", tp)

    # a comment
    plan = Plan(
        mesh
    )
    if tp is not None:
        # another
        plan.shard("a", z, tp)
    return plan
'''


def test_what_builds_the_plan_is_counted_line_by_line():
    assert plan_lines(SOURCE, "one") == 6
    assert plan_lines(SOURCE, "other") == 1


def test_a_function_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="no function 'two'"):
        plan_lines(SOURCE, "two")


@pytest.mark.parametrize("name", PAPER)
def test_plans_are_no_longer_than_the_papers(name):
    assert total_lines(name) <= PAPER[name]


def test_a_plan_that_begins_with_another_has_its_lines_too():
    own = plan_lines((ZOO / "mixtral.py").read_text(), "mixtral")
    assert total_lines("mixtral") == own + total_lines("llama") > own > 0


def test_every_plan_of_the_zoo_is_printed(capsys):
    main()
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert {"dit", "gpt2", "llama", "vit"} <= set(printed)
    assert not {"needs", "__init__"} & set(printed)
