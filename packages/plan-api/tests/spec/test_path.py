"""What paths mean."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_api.spec.path import PathKind, parse_path


@pytest.mark.parametrize(
    ("text", "kind", "index", "named", "others"),
    [
        (
            r"layers\.\d+\.fc\.weight",
            PathKind.STATE,
            0,
            ["layers.12.fc.weight"],
            ["layers.x.fc.weight"],
        ),
        ("fc.weight", PathKind.STATE, 0, ["fc.weight"], ["a.fc.weight", "fc.weight.x"]),
        (r"fc\.weight\.grad", PathKind.GRADIENT, 0, ["fc.weight"], ["fc.weight.grad"]),
        ("fc.weight.grad", PathKind.GRADIENT, 0, ["fc.weight"], ["fc"]),
        (r"layers\.\d.<in>", PathKind.INPUT, 0, ["layers.3"], ["layers.3.fc"]),
        (r"layers\.\d\.<in:2>", PathKind.INPUT, 2, ["layers.3"], ["layers.3."]),
        ("fc<in:hidden_states>", PathKind.INPUT, "hidden_states", ["fc"], ["fcs"]),
        (".*attn.<out:1>", PathKind.OUTPUT, 1, ["a.attn", "attn"], ["attention"]),
        ("<out:logits>", PathKind.OUTPUT, "logits", [""], ["a"]),
        ("<in>", PathKind.INPUT, 0, [""], ["a"]),
        (r"(?P<which>a|b)\.weight", PathKind.STATE, 0, ["a.weight"], ["c.weight"]),
    ],
)
def test_paths_name_tensors(text, kind, index, named, others):
    path = parse_path(text)
    assert (path.kind, path.index) == (kind, index)
    assert all(map(path.matches, named))
    assert not any(map(path.matches, others))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names nothing"),
        ("layers.(", "is no regular expression"),
        ("layers.(.<in>", "is no regular expression"),
        ("fc.<input>", "only <in>, <in:INDEX>"),
        ("fc.<in>.weight", "at the end"),
    ],
)
def test_invalid_paths_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_path(text)


NAMES = st.lists(st.sampled_from(["a", "b1", "layers", "0", "17", "fc"]), min_size=1, max_size=4)


@given(NAMES, NAMES, st.sampled_from(["weight", "<in>", "<out:1>"]))
def test_a_literal_path_names_itself_only(pieces, others, tensor):
    name, other = ".".join(pieces), ".".join(others)
    if tensor == "weight":
        name, other, text = name + ".weight", other + ".weight", re.escape(name) + r"\.weight"
    else:
        text = f"{re.escape(name)}.{tensor}"
    path = parse_path(text)
    assert path.matches(name)
    assert path.matches(other) == (name == other)


@given(NAMES, NAMES)
def test_under_a_prefix_it_names_the_same_tensors(prefix, pieces):
    name, inside = ".".join(pieces), ".".join(prefix)
    for text, outer in ((rf"{re.escape(name)}|other", f"{inside}.{name}"), ("<in>", inside)):
        moved = parse_path(text).under(inside)
        assert moved.matches(outer)
        assert not moved.matches(name if text != "<in>" else "") or name == outer
