"""Lines of plan code: what is counted, and that the zoo's plans are no longer than the paper's."""

import pytest

from tools.plan_lines import PAPER, ZOO, count, lines_run, main, plan_lines

SOURCE = '''
import x

def helper(plan):
    plan.shard("b")

def one(plan, tp=None, ep=None):
    """A docstring
    of two lines."""
    check_options("one", tp)

    # a comment
    plan.start(
        tp
    )
    if tp is not None:
        # another
        plan.shard("a", tp)
        plan.annotate("a.grad",
                      tp)
    if ep is not None:
        plan.shard("e", ep)
        helper(plan)
    return plan
'''


class Recorder:
    def __getattr__(self, name):
        return lambda *_: self


@pytest.fixture
def module(tmp_path):
    (tmp_path / "own.py").write_text(SOURCE.replace("import x", "check_options = print"))
    scope = {}
    exec(compile((tmp_path / "own.py").read_text(), tmp_path / "own.py", "exec"), scope)
    return tmp_path, scope["one"]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, (6, 0)),  # start over three lines, two conditions, return
        ({"tp": "tp"}, (7, 2)),
        ({"tp": "tp", "ep": "ep"}, (10, 2)),  # with the line of the helper
    ],
)
def test_what_builds_the_plan_is_counted_where_it_runs(module, options, lines):
    folder, function = module
    (run,) = lines_run(lambda: function(Recorder(), **options), folder).values()
    assert plan_lines((folder / "own.py").read_text(), run) == lines


@pytest.mark.parametrize("name", PAPER)
def test_plans_are_no_longer_than_the_papers(name):
    plan, static = count(name)
    assert 10 < plan <= PAPER[name]
    assert static > 0


def test_every_plan_of_the_zoo_is_printed(capsys):
    main()
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert {"dit", "gpt2", "llama", "vit"} <= set(printed)
    assert not {"needs", "__init__"} & set(printed)
    assert (ZOO / "needs.py").exists()
