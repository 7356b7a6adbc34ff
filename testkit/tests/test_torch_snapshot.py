import pytest

from testkit.inspection.torch_snapshot import changes_by, importing

CHANGES = {
    "a function": (
        "import torch.nn.init as i; old = i.dirac_; i.dirac_ = lambda *a: old(*a)",
        "i.dirac_ = old",
        ["torch.nn.init.dirac_"],
    ),
    "the code of a function": (
        "from torch.nn.init import sparse_ as f; old = f.__code__\n"
        "f.__code__ = f.__code__.replace(co_name='other')",
        "f.__code__ = old",
        ["torch.nn.init.sparse_"],
    ),
    "a new function": (
        "import torch.nn.init as i; i.other_ = lambda: None",
        "del i.other_",
        ["torch.nn.init.other_"],
    ),
    "a method": (
        "from torch.distributed.tensor import DTensor as D; old = D.to_local; D.to_local = len",
        "D.to_local = old",
        ["torch.distributed.tensor.DTensor.to_local"],
    ),
    "a method of an object": (
        "from torch.distributed.tensor import DTensor\n"
        "p = DTensor._op_dispatcher.sharding_propagator; p.register_op_strategy = len",
        "del p.register_op_strategy",
        ["DTensor._op_dispatcher.sharding_propagator[register_op_strategy]"],
    ),
    "a handler": (
        "import torch; from torch.distributed.tensor import DTensor\n"
        "h = DTensor._op_dispatcher._custom_op_handlers; h[torch.ops.aten.relu.default] = len",
        "del h[torch.ops.aten.relu.default]",
        ["DTensor._op_dispatcher._custom_op_handlers[aten.relu.default]"],
    ),
    "a kernel": (
        "import torch; lib = torch.library.Library('_c10d_functional', 'IMPL')\n"
        "lib.impl('broadcast', lambda *a: a[0], 'CPU')",
        "lib._destroy()",
        ["kernels of _c10d_functional::broadcast"],
    ),
    "safe globals": (
        "import torch, decimal\n"
        "safe = torch.serialization.safe_globals([decimal.Decimal]); safe.__enter__()",
        "safe.__exit__(None, None, None)",
        ["torch.serialization safe globals[<class 'decimal.Decimal'>]"],
    ),
    "threads": (
        "import torch; n = torch.get_num_threads(); torch.set_num_threads(n + 1)",
        "torch.set_num_threads(n)",
        ["threads"],
    ),
    "saved tensors": (
        "from torch.autograd.graph import saved_tensors_hooks\n"
        "hooks = saved_tensors_hooks(lambda x: x, lambda x: x); hooks.__enter__()",
        "hooks.__exit__()",
        ["hooks of saved tensors"],
    ),
    "a hook of optimizers": (
        "from torch.optim.optimizer import register_optimizer_step_pre_hook as register\n"
        "hook = register(lambda *_: None)",
        "hook.remove()",
        ["torch.optim.optimizer._global_optimizer_pre_hooks[0]"],
    ),
    "a hook of modules": (
        "from torch.nn.modules.module import register_module_forward_hook as register\n"
        "hook = register(lambda *_: None)",
        "hook.remove()",
        ["torch.nn.modules.module._global_forward_hooks[0]"],
    ),
    "a mode": (
        "from torch.overrides import BaseTorchFunctionMode as M; mode = M(); mode.__enter__()",
        "mode.__exit__(None, None, None)",
        ["function modes"],
    ),
}


def test_every_kind_of_change_is_found_and_gone_when_it_is_undone():
    do, undo, paths = zip(*CHANGES.values(), strict=True)
    scopes = [f"scopes = [{{}} for _ in range({len(CHANGES)})]"]
    runs = [
        "\n".join(f"exec({one!r}, scopes[{at}])" for at, one in enumerate(each))
        for each in (do, undo)
    ]
    _, changed, restored = changes_by(*scopes, *runs)
    assert changed == sorted(path for each in paths for path in each)
    assert restored == []


def test_using_dtensors_and_importing_more_of_torch_or_another_package_changes_nothing():
    used = """
import torch, torch.distributed.pipelining, torch.sparse, torch.ao.quantization
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from testkit import fake_mesh
with fake_mesh((2,)) as mesh:
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
    (x @ x.redistribute(placements=[Replicate()])).sum().full_tensor()
"""
    imported = "import sys; assert 'xml.dom.minidom' in sys.modules"
    assert changes_by(used, importing("xml"), imported) == [[], [], []]


def test_a_statement_that_fails_raises():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        changes_by("1 / 0")
