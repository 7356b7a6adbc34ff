import pytest

from testkit.inspection.call_forms import call_forms


def function(a, /, b, c=3, *more, d=4, **options):
    return a, b, c, more, d, options


def test_a_call_is_written_with_defaults_by_position_and_by_keyword():
    forms = {each.name: (each.args, dict(each.kwargs)) for each in call_forms(function, 1, b=2)}
    assert forms == {
        "defaults": ((1, 2), {}),
        "position": ((1, 2, 3), {"d": 4}),
        "keyword": ((1,), {"b": 2, "c": 3, "d": 4}),
    }


def test_every_form_is_the_same_call():
    results = [each.call(function) for each in call_forms(function, 1, 2, e=5)]
    assert results == [(1, 2, 3, (), 4, {"e": 5})] * 3


def test_arguments_that_the_function_does_not_take_are_refused():
    with pytest.raises(TypeError, match="missing a required argument: 'b'"):
        call_forms(function, 1)
