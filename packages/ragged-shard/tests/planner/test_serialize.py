"""Layouts as JSON: what is written is read, the bytes are canonical, and bad text is named."""

import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_shard.planner import Layout, TensorSpec, plan_layout

LAYOUT = plan_layout([TensorSpec("é.weight", 12, 4, (3, 4)), TensorSpec("bias", 5)], 2)

BYTES = (
    '{"align_starts":false,"alignment":1,"exact":true,"order":[0,1],"proved_lower_bound":9,'
    '"shard_size":9,"specs":[{"block":4,"name":"\\u00e9.weight","numel":12,"shape":[3,4]},'
    '{"block":1,"name":"bias","numel":5,"shape":null}],"starts":[1,13],"version":1,"world_size":2}'
)


def test_the_bytes_are_these():
    assert LAYOUT.to_json() == BYTES


@given(
    st.lists(st.tuples(st.text(), st.integers(0, 50), st.integers(1, 9)), max_size=5),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_is_written_is_read(tensors, world_size, alignment, align_starts):
    specs = [TensorSpec(name, numel, min(block, numel) or 1) for name, numel, block in tensors]
    layout = plan_layout(specs, world_size, alignment=alignment, align_starts=align_starts)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.to_json() == layout.to_json()
    assert again.fingerprint() == layout.fingerprint()


def test_fingerprints_tell_layouts_apart():
    other = plan_layout(LAYOUT.specs, 3)
    assert len(LAYOUT.fingerprint()) == 64
    assert other.fingerprint() != LAYOUT.fingerprint()


PROGRAM = """
import random
from ragged_shard.planner import TensorSpec, plan_layout
draw = random.Random(0)
specs = []
for i in range(50):
    numel = draw.randint(1, 10**6)
    specs.append(TensorSpec(f"t{i}", numel, draw.choice([1, numel, draw.randint(1, numel)])))
for order in ("given", "block", "shape", "best"):
    layout = plan_layout(specs, 24, order=order, alignment=8, node_limit=100)
    print(layout.to_json())
    print(layout.explain())
"""


def printed_by(program, hash_seed):
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE
    )
    return run.stdout


def test_two_interpreters_with_other_hash_seeds_write_the_same_bytes():
    first, second = (printed_by(PROGRAM, seed) for seed in ("1", "2"))
    assert first == second
    assert len(first.splitlines()) > 12


def test_that_check_notices_the_order_of_a_set():
    program = "print({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})"
    assert printed_by(program, "1") != printed_by(program, "2")


def changed(**changes):
    return json.dumps(json.loads(BYTES) | changes)


def without(name):
    return json.dumps({key: value for key, value in json.loads(BYTES).items() if key != name})


BAD = [
    ("", "got no JSON"),
    ("[1]", "expected version 1, got None"),
    (without("version"), "expected version 1, got None"),
    (changed(version=2), "expected version 1, got 2; plan again"),
    (without("specs"), "a wrong field ('specs')"),
    (without("order"), "a wrong field ('order')"),
    (without("exact"), "missing 1 required positional argument: 'exact'"),
    (changed(colour=1), "unexpected keyword argument 'colour'"),
    (changed(starts=3), "a wrong field ("),
    (changed(specs=[{"name": "a"}]), "missing 1 required positional argument: 'numel'"),
    (changed(specs=[{"name": "a", "numel": -1}]), "TensorSpec 'a' numel: expected ...got -1"),
    (changed(starts=[0, 13]), "got one at 9 inside block 2"),
    (changed(world_size="2"), "Layout world_size: expected ...got '2'"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_text_is_named(text, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\.\.", ".*")):
        Layout.from_json(text)
