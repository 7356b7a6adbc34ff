import pytest

from tools import check_deps


def check(workspace, capsys, module: str, text: str) -> str:
    """What check_deps prints about the workspace with one module more."""
    path = workspace / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    status = check_deps.main(workspace)
    printed = capsys.readouterr().out
    assert status == (1 if printed else 0)
    return printed


FUSED_COMM = "packages/fused-comm/src/fused_comm/"
PLAN_API = "packages/plan-api/src/plan_api/"
PLANNER = "packages/ragged-shard/src/ragged_shard/planner/"
FSDP = "packages/fsdp/src/fsdp/"


@pytest.mark.parametrize(
    ("module", "text", "words"),
    [
        pytest.param(
            f"{FUSED_COMM}bucket.py", "import torch\nimport dbuffer.views\n",
            "bucket.py:2: fused_comm must not import dbuffer", id="fused_comm imports dbuffer",
        ),
        pytest.param(
            f"{FUSED_COMM}bucket.py", "def f():\n    from dbuffer import DBuffer\n",
            "bucket.py:2: fused_comm must not import dbuffer", id="and not lazily either",
        ),
        pytest.param(
            f"{PLAN_API}hooks.py", "def f():\n    import fsdp\n",
            "hooks.py:2: plan_api must not import fsdp", id="plan_api imports fsdp",
        ),
        pytest.param(
            f"{PLAN_API}hooks.py", "import importlib\nimportlib.import_module('fsdp.api')\n",
            "hooks.py:2: plan_api must not import fsdp", id="by import_module",
        ),
        pytest.param(
            f"{PLAN_API}hooks.py", "try:\n    import dist_rng\nexcept ImportError:\n    pass\n",
            "hooks.py:2: dist_rng is an extra of plan_api; import it where a function uses it",
            id="an extra at module level",
        ),
        pytest.param(
            f"{PLAN_API}hooks.py",
            "if TYPE_CHECKING:\n    pass\nelse:\n    import dist_rng\n",
            "hooks.py:4: dist_rng is an extra of plan_api", id="an extra where no type is checked",
        ),
        pytest.param(
            f"{PLAN_API}hooks.py", "if not TYPE_CHECKING:\n    import dist_rng\n",
            "hooks.py:2: dist_rng is an extra of plan_api", id="the same by not",
        ),
        pytest.param(
            f"{FSDP}api.py", "from testkit import run_ranks\n",
            "api.py:1: fsdp must not import testkit", id="a package imports testkit",
        ),
        pytest.param(
            f"{FSDP}api.py", "import integration\n",
            "api.py:1: fsdp must not import integration", id="a package imports integration",
        ),
        pytest.param(
            f"{PLANNER}solve.py", "import math\nimport torch\n",
            "solve.py:2: ragged_shard.planner imports torch", id="the planner imports torch",
        ),
        pytest.param(
            f"{PLANNER}plot.py", "import matplotlib\n",
            "plot.py:1: ragged_shard.planner imports matplotlib",
            id="the planner imports an extra at module level",
        ),
        pytest.param(
            f"{PLANNER}plot.py", "def f():\n    import torch\n",
            "plot.py:2: ragged_shard.planner imports torch", id="the planner imports torch lazily",
        ),
        pytest.param(
            f"{PLANNER}solve.py", "from ..ragged import RaggedShard\n",
            "solve.py:1: ragged_shard.planner imports ragged_shard.ragged.RaggedShard",
            id="the planner imports its parent",
        ),
    ],
)  # fmt: skip
def test_an_import_against_the_direction_is_named(workspace, capsys, module, text, words):
    printed = check(workspace, capsys, module, text)
    assert words in printed
    assert printed.startswith("packages/")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        pytest.param(f"{FSDP}api.py", "from dbuffer import DBuffer\n", id="a dependency"),
        pytest.param(f"{FSDP}api.py", "from . import group\nimport fsdp.group\n", id="itself"),
        pytest.param(f"{PLAN_API}a.py", "def f():\n    import dist_rng\n", id="an extra, lazily"),
        pytest.param(
            f"{PLAN_API}a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dist_rng\n",
            id="an extra, for its types",
        ),
        pytest.param(
            f"{PLANNER}solve.py",
            "import math\nfrom . import spec\nfrom ragged_shard.planner.spec import TensorSpec\n",
            id="the planner imports the standard library and itself",
        ),
        pytest.param(
            f"{PLANNER}plot.py",
            "def draw():\n    import matplotlib.figure\n",
            id="the planner imports an extra where a function uses it",
        ),
        pytest.param(
            "integration/src/integration/a.py", "import fsdp, testkit\n", id="integration, anything"
        ),
    ],
)
def test_an_import_along_the_direction_passes(workspace, capsys, module, text):
    assert check(workspace, capsys, module, text) == ""


@pytest.mark.parametrize(
    ("package", "old", "new", "words"),
    [
        pytest.param(
            "dbuffer", "'ragged-shard>=0.1,<0.2'", "'numpy'",
            "dependencies name []; declare ['ragged-shard']", id="one is missing",
        ),
        pytest.param(
            "dist-rng", "'torch>=2.11,<2.16'", "'torch>=2.11,<2.16', 'spmd-testkit>=0.1,<0.2'",
            "dependencies name ['spmd-testkit']; declare []", id="one is too many",
        ),
        pytest.param(
            "fsdp", "dbuffer>=0.1,<0.2", "dbuffer==0.1.0",
            "'dbuffer==0.1.0' is no range; write >=0.1,<0.2", id="a pin",
        ),
        pytest.param(
            "fsdp", ", 'dtensor-rules>=0.1,<0.2'", "",
            "extras name ['dist-rng']; declare ['dist-rng', 'dtensor-rules']", id="an extra",
        ),
        pytest.param(
            "dist-rng", "torch>=2.11,<2.16", "torch>=2.11", "torch is not declared", id="torch",
        ),
    ],
)  # fmt: skip
def test_a_wrong_requirement_is_named(workspace, capsys, package, old, new, words):
    path = workspace / "packages" / package / "pyproject.toml"
    text = path.read_text()
    assert old in text
    printed = check(workspace, capsys, path, text.replace(old, new))
    assert f"packages/{package}/pyproject.toml:4: " in printed
    assert words in printed


def test_a_package_without_a_rule_is_named(workspace, capsys):
    (workspace / "packages/new/src/new").mkdir(parents=True)
    (workspace / "packages/new/pyproject.toml").write_text('[project]\nname = "new"\n')
    printed = check(workspace, capsys, "packages/new/src/new/__init__.py", "")
    assert "packages/new/pyproject.toml:1: no rule for it" in printed


@pytest.mark.parametrize(
    "imported", ["from fused_comm.b import y", "def f():\n    from fused_comm import b"]
)
def test_modules_that_import_one_another_are_named(workspace, capsys, imported):
    (workspace / FUSED_COMM / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fused_comm.a import x\n"
    )
    printed = check(workspace, capsys, f"{FUSED_COMM}a.py", f"{imported}\n")
    assert "imports go in a circle: fused_comm." in printed
    assert {"fused_comm.a", "fused_comm.b"} <= set(printed.replace(";", " ").split())


def test_stubs_and_modules_of_the_build_are_no_cycle(workspace, capsys):
    (workspace / FUSED_COMM / "_core.pyi").write_text("import torch\n")
    text = "from fused_comm import _core\nfrom fused_comm._built_for import VERSION\n"
    assert check(workspace, capsys, f"{FUSED_COMM}a.py", text) == ""
