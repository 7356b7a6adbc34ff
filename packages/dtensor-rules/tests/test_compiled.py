"""Rules in C++: they are in the same table as Python's, and their errors say as much."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dtensor_rules
from dtensor_rules.registry import compiled
from testkit import fake_mesh

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs/packages/dtensor-rules/details.md").read_text()
COMPILER = os.environ.get("CXX", "c++")
BUILTIN = ["equal", "partial + replicate", "replicate + partial", "out-given", "out-partial"]
NEG = "aten.neg.default"

pytestmark = pytest.mark.usefixtures("same_rules_after")


def run_compiler(*arguments):
    includes = [sysconfig.get_path("include"), pybind11.get_include(), dtensor_rules.get_include()]
    strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
    command = [COMPILER, *strict, *(f"-I{folder}" for folder in includes), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def some_rules(tmp_path_factory):
    """The extension module of tests/cpp, compiled and linked against nothing of this package."""
    library = tmp_path_factory.mktemp("extension") / "some_rules.so"
    flags = ["-O0", "-shared", "-fPIC", "-fvisibility=hidden"]
    done = run_compiler(*flags, HERE / "cpp" / "some_rules.cpp", "-o", library)
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location("some_rules", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names():
    return [listed.rule.name for listed in dtensor_rules.rules()]


def test_it_decides_is_counted_and_can_be_removed(some_rules, x):
    assert torch.neg(x).placements == (Shard(0),)
    some_rules.add("declines")
    some_rules.add("mine", what="replicated")
    for _ in range(3):
        assert torch.neg(x).placements == (Replicate(),)
    hits = {listed.rule.name: listed.hits for listed in dtensor_rules.rules()}
    assert hits["mine"] == 3
    assert hits["declines"] == 0
    dtensor_rules.remove_rule("mine")
    assert torch.neg(x).placements == (Shard(0),)


def test_it_goes_to_the_end_or_beside_another(some_rules):
    some_rules.add("last")
    some_rules.add("first", before="equal")
    some_rules.add("second", after="first")
    assert names() == ["first", "second", *BUILTIN, "last"]


def test_all_four_fields_have_to_fit(some_rules, x):
    some_rules.add("kind", "aten.n?g.default", "replicated", kind="in-place")
    some_rules.add("placements", what="replicated", placements=["replicate"])
    some_rules.add("meta", what="replicated", rows=5)
    assert torch.neg(x).placements == (Shard(0),)
    some_rules.add("all", "aten.n?g.default", "replicated", kind="functional",
                   placements=["shard(0)"], rows=4)  # fmt: skip
    assert torch.neg(x).placements == (Replicate(),)


@pytest.mark.parametrize("numbers", [True, False])
def test_it_says_whether_it_reads_numbers(some_rules, x, numbers):
    some_rules.add("mine", "aten.add.Tensor", numbers=numbers)
    for alpha in (1, 2):
        torch.add(x, x, alpha=alpha)
    assert dtensor_rules.stats()["aten.add.Tensor"].miss == (2 if numbers else 1)


def test_it_sees_what_the_call_is_made_of(some_rules):
    with fake_mesh((2, 2)) as mesh, dtensor_rules.enabled():
        some_rules.watch("aten.*")
        strided = _StridedShard(1, split_factor=2)
        partial, first, second = (
            DTensor.from_local(torch.ones(3, 4), mesh, placements, run_check=False)
            for placements in (
                [Partial("max"), Shard(0)],
                [Shard(1), Replicate()],
                [strided, Shard(1)],  # a shard order, which every torch can read
            )
        )
        partial.t()
        assert some_rules.seen() == "aten.t.default float32,6,4/4/1@2@2 Pmax S0 of 1"
        torch.cat([first, second], 1)
    expected = "float32,3,8/8/1@2@2 S1 R float32,3,16/16/1@2@2 _StridedShard S1 of 2"
    assert some_rules.seen() == f"aten.cat.default {expected}"


def test_it_redistributes_first(some_rules, mesh):
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    some_rules.add("mine", what="replicated")
    result = torch.neg(partial)
    assert result.placements == (Replicate(),)
    (move,) = compiled._plan(dtensor_rules.Call(torch.ops.aten.neg.default, (partial,), {}),
                             [], {0: [("replicate", 0, "", None)]}, {}).moves  # fmt: skip
    assert type(move.transform).__name__ == "Redistribution"  # by C++, not by torch


def test_it_transforms_a_tensor_of_a_list(some_rules, x):
    some_rules.add("mine", "aten.stack.default", "doubled")
    result = torch.stack([x, x])
    local = x.to_local()
    assert torch.equal(result.to_local(), torch.stack([local, local * 2]))


def test_it_says_shape_strides_and_dtype(some_rules, x):
    some_rules.add("mine", "aten.sum.dim_IntList", "summed")
    result = torch.sum(x, 1, dtype=torch.float64)
    described = result.shape, result.stride(), result._spec.tensor_meta.dtype
    assert described == ((4,), (3,), torch.float64)


def test_a_placement_of_another_class_passes_through(some_rules, mesh):
    strided = _StridedShard(0, split_factor=2)
    x, y = (
        DTensor.from_local(torch.ones(4), mesh, [placement], run_check=False)
        for placement in (Shard(0), strided)
    )
    some_rules.add("mine", "aten.add.Tensor", "passed on")
    (placement,) = torch.add(x, y).placements
    assert placement is y.placements[0]


def test_an_operator_in_place_has_no_outputs(some_rules, x):
    some_rules.add("mine", "aten.neg_.default", "in place")
    expected = -x.to_local()
    assert torch.neg_(x) is x
    assert torch.equal(x.to_local(), expected)
    assert dtensor_rules.stats()["aten.neg_.default"].miss == 1


REFUSED = {
    "too few axes": r"output: \(\) must be one per axis of \(2,\)",
    "no such dim": r"output 0: S\(5\) names no dim of a tensor of \(4, 4\)",
    "no such tensor": "like=7: expected the number of one of the call's 1 DTensors",
    "no such dtype": "dtype='float33' is none of torch's",
    "moved twice": "argument 0 is both redistributed and transformed",
    "too many results": "2 outputs; the operator has 1 results",
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_plan_that_does_not_fit_is_refused(some_rules, x, what):
    some_rules.add("mine", what=what)
    with pytest.raises(ValueError, match=REFUSED[what]) as refused:
        torch.neg(x)
    text = "\n".join([str(refused.value), *getattr(refused.value, "__notes__", [])])
    assert "ule 'mine'" in text
    assert NEG in text


def test_what_it_throws_arrives(some_rules, x):
    some_rules.add("mine", what="throws")
    with pytest.raises(ValueError, match=f"nothing for {NEG}"):
        torch.neg(x)


def test_a_rule_that_cannot_be_registered_is_refused_in_cpp(some_rules):
    for arguments, message in (
        ({"name": "x", "op": "aten.negg.default"}, "op='aten.negg.default' is no operator"),
        ({"name": "x", "kind": "outplace"}, "kind='outplace' is none of"),
        ({"name": "x", "placements": ["replicated"]}, "'replicated' is none of"),
        ({"name": "x", "before": "nobody"}, "no rule is named 'nobody'"),
        ({"name": "x", "before": "equal", "after": "equal"}, "give one of them"),
        ({"name": "equal"}, "a rule named 'equal' is there already"),
        ({"name": ""}, "needs a name"),
    ):
        with pytest.raises(ValueError, match=message):
            some_rules.add(**arguments)
    with pytest.raises(ValueError, match="action is empty"):
        some_rules.add_empty()
    assert names() == BUILTIN


def test_a_header_of_another_version_is_refused():
    def declines(op, specs, call):
        return None

    with pytest.raises(ImportError, match=r"it speaks 0, .* 2\): compile it again"):
        compiled.register(0, "x", NEG, declines, "*", (), None, True, None, None)


@pytest.mark.slow  # compiles once more
def test_actions_of_the_wrong_type_do_not_compile(tmp_path):
    source = tmp_path / "wrong.cpp"
    actions = {
        "two_arguments": "[](const Call&, int) { return std::optional<Plan>(); }",
        "no_plan": "[](const Call&) { return 3; }",
    }
    lines = [f'Rule {name}{{"x", "{NEG}", {action}}};' for name, action in actions.items()]
    begin = ["#include <dtensor_rules/rule.h>", "using namespace dtensor_rules;"]
    source.write_text("\n".join([*begin, *lines, ""]))
    failed = run_compiler("-fsyntax-only", source)
    assert failed.returncode != 0
    assert failed.stderr.count("dtensor_rules: a rule's action takes one const Call&") == 2


@pytest.mark.slow  # compiles once more
def test_the_example_in_cpp_compiles_by_its_command_and_runs(tmp_path):
    section = PAGE.partition("### From C++")[2].partition("\n## ")[0]
    (source,) = re.findall(r"^```cpp\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (use,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "shard_rules.cpp").write_text(source)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    subprocess.run(["sh", "-ec", command], check=True, cwd=tmp_path, env=environment)
    printed = subprocess.run(
        [sys.executable, "-c", use], check=True, cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    assert printed == "(Shard(dim=0),) 1\n"
