"""Lines of code: what is one, and which of them count in a call."""

import sys

import pytest

from testkit.inspection.code_lines import Built, body_lines, built_by, code_lines, lines_run

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
    ("source", "lines"),
    [
        ("a = 1\n\n# c\nb = 2  # d\n", {1, 4}),
        ('"""Doc\nmore."""\nx = """a\n# b\n\n"""\n', {3, 4, 5, 6}),  # a string that is a value
        ('def f():\n    """Doc."""\n    return (\n        # c\n        1\n    )\n', {1, 3, 5, 6}),
        ("", set()),
    ],
    ids=["comments", "strings", "parentheses", "nothing"],
)
def test_comments_docstrings_and_blank_lines_are_no_code(source, lines):
    assert code_lines(source) == lines


def test_bodies_are_without_heads_docstrings_and_what_is_outside_functions():
    source = '''LIMIT = 3

class Style:
    """Doc."""

    kind = "a"

    def apply(
        self, module
    ):
        """Doc."""
        if module:  # always

            return module

def helper(): return 1
'''
    assert body_lines(source) == {12, 14, 16}


@pytest.mark.parametrize(
    ("options", "built"),
    [
        ({}, Built(6, 0)),  # start over three lines, two conditions, return
        ({"tp": "tp"}, Built(7, 2)),
        ({"tp": "tp", "ep": "ep"}, Built(10, 2)),  # with the line of the helper
    ],
    ids=["nothing", "tp", "tp and ep"],
)
def test_what_builds_is_counted_where_it_runs(module, options, built):
    folder, function = module
    count = built_by(lambda: function(Recorder(), **options), folder, without={"check_options"})
    assert count == built


def test_some_functions_are_counted_alone(module):
    folder, function = module

    def call():
        function(Recorder(), ep="ep")

    assert built_by(call, folder, functions={"helper"}) == Built(1, 0)
    # Whoever calls one of those that build nothing does not count that line, nor its own.
    assert built_by(call, folder, without={"helper"}) == Built(8, 0)
    assert built_by(lambda: None, folder) == Built(0, 0)


def test_tracing_ends_with_the_call(module):
    folder, function = module
    before = sys.gettrace()
    (run,) = lines_run(lambda: function(Recorder()), folder).values()
    assert sys.gettrace() is before
    assert 10 in run
    with pytest.raises(ZeroDivisionError):
        lines_run(lambda: 1 // 0, folder)
    assert sys.gettrace() is before
