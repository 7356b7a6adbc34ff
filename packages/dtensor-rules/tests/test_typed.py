"""Typed kernels skip layers of torch: nothing that those layers do may be missing."""

import contextlib
import ctypes

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves

import dtensor_rules
from dtensor_rules import _core
from testkit import assert_bitwise, fake_mesh
from testkit.operators import operator_cases


@pytest.fixture(params=["native", "dtensor_rules"])
def mesh(request):
    """Every test here runs with torch alone too: what it expects is what torch does."""
    with fake_mesh((4,), rank=1) as mesh:
        if request.param == "native":
            yield mesh
            return
        with dtensor_rules.enabled():
            dtensor_rules.stats_clear()
            yield mesh
            assert any(op.cache or op.rule for op in dtensor_rules.stats().values())


def placed(mesh, placement=None, **options):
    local = torch.linspace(-1, 1, 32, **options).view(8, 4)
    return DTensor.from_local(local, mesh, [placement or Shard(0)], run_check=False)


def twice(function):
    """The second answer: the first call of a kind makes a plan, and typed kernels run plans."""
    function()
    return function()


def test_every_typed_kernel_runs():
    """One that never runs is silent: its calls only go the longer way."""
    with fake_mesh((4,), rank=1) as mesh, dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        cases = reversed(operator_cases((4,)))  # the first of each operator: replicas
        for case in {case.operator.name: case for case in cases}.values():
            for grad in (False, False, True, True):
                _run(case, case.inputs(mesh), grad)
        _optimize(mesh)
        x = placed(mesh)
        twice(lambda: x.cos().sub_(x.sin()))
        never = {name for name, count in _core.typed_counts().items() if count == 0}
    assert sorted(never) == []


def test_what_is_planned_on_the_long_way_is_found_on_the_short_one():
    """Arguments of every type, given and left out: both ways make one key of them."""
    aten = torch.ops.aten
    with fake_mesh((4,), rank=1) as mesh, dtensor_rules.enabled(), torch.no_grad():
        x = placed(mesh)
        whole = (x * 10).long()
        calls = [
            (aten.add.Tensor, (x, x), {"alpha": 2}),
            (aten.add.Tensor, (x, x), {"alpha": 0.5}),
            (aten.add.Tensor, (whole > 0, whole > 0), {"alpha": True}),
            (aten.mul.Tensor, (x, torch.tensor(2.0)), {}),
            (aten.clamp.default, (x, None, 1), {}),
            (aten.clamp.default, (x, 1, None), {}),
            (aten.masked_fill.Scalar, (whole > 0, whole > 0, True), {}),
            (aten.zeros_like.default, (x,), {"device": torch.device("cpu")}),
            (aten._to_copy.default, (x,), {"dtype": torch.int64, "non_blocking": True}),
            (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
            (aten.gelu.default, (x,), {"approximate": "tanh"}),
            (aten.sum.dim_IntList, (x, None), {}),
            (aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64}),
            (aten.native_layer_norm.default, (x, [4], None, None, 1e-5), {}),
            (aten.cat.default, ([x, x, x],), {}),
            (aten._foreach_div_.ScalarList, ([x, x], [2.0, 4]), {}),
        ]
        for op, args, kwargs in calls:
            op(*args, **kwargs)
            dtensor_rules.stats_clear()
            op(*args, **kwargs)
            assert _core.typed_counts()[str(op)] == 1, (op, args, kwargs)


def _run(case, inputs, grad):
    """A call and its backward; test_parity compares what raises, as split's backward in torch."""
    flags = case.differentiable() if grad else [False] * len(inputs)
    leaves = [x.requires_grad_(flag) for x, flag in zip(inputs, flags, strict=True)]
    operands = [
        x.clone() if grad and i < case.operator.mutates else x for i, x in enumerate(leaves)
    ]
    with torch.set_grad_enabled(grad), contextlib.suppress(RuntimeError, NotImplementedError):
        for output in tree_leaves(case.operator.run(*operands)):
            if isinstance(output, DTensor) and output.requires_grad:
                output.sum().backward()


def _optimize(mesh):
    for make, options in (
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"fused": True}),
    ):
        params = [torch.nn.Parameter(placed(mesh)) for _ in range(2)]
        optimizer = make(params, **options)
        for _ in range(3):
            for param in params:
                param.grad = placed(mesh)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()


def test_autocast_casts_without_gradients(mesh):
    x, w = placed(mesh), placed(mesh, Replicate())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert twice(lambda: torch.mm(x, w.t())).dtype == torch.bfloat16


@pytest.mark.parametrize("grad", [False, True])
def test_writes_count_versions(mesh, grad):
    x = placed(mesh)
    with torch.set_grad_enabled(grad):
        x.add_(x)
        before = x._version
        x.add_(x)
        assert x._version == before + 1


def test_writes_to_inference_tensors_are_errors(mesh):
    with torch.inference_mode():
        x = placed(mesh)
    with torch.no_grad():
        y = placed(mesh)
        twice(lambda: y.add_(1.0))
        with pytest.raises(RuntimeError, match="inference tensor"):
            x.add_(1.0)


def test_what_backward_needs_must_not_be_written_to(mesh):
    x = placed(mesh).requires_grad_()
    twice(lambda: x.softmax(-1).sum().backward())
    y = x.softmax(-1)
    with torch.no_grad():
        y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("saved", [torch.exp, torch.tanh, torch.rsqrt, lambda x: x.softmax(-1)])
def test_results_saved_for_backward_give_the_gradient(mesh, saved):
    x = (placed(mesh) + 2.0).detach().requires_grad_()
    twice(lambda: torch.autograd.grad(saved(x).pow(2).sum(), x))
    (grad,) = torch.autograd.grad(saved(x).pow(2).sum(), x)
    local = x._local_tensor.detach().requires_grad_()
    (expected,) = torch.autograd.grad(saved(local).pow(2).sum(), local)
    assert_bitwise(grad._local_tensor, expected, "gradient")


def test_what_is_saved_is_detached_without_torch():
    with fake_mesh((4,)) as mesh, dtensor_rules.enabled():
        x = placed(mesh).requires_grad_()
        twice(lambda: x.softmax(-1))
        dtensor_rules.stats_clear()
        y = x.softmax(-1)
        detach = dtensor_rules.stats()["aten.detach.default"]
        assert (detach.cache, detach.fallthrough) == (1, {})
    y.sum().backward()  # what was saved outlives the library
    assert x.grad is not None


def test_views_made_without_gradients_are_views(mesh):
    base = placed(mesh).requires_grad_() * 1.0
    with torch.no_grad():
        view = twice(lambda: base.view(32, 4))
    assert view._is_view()
    assert view._base is base
    with pytest.raises(RuntimeError, match="no_grad"):
        view.add_(1.0)


def test_conjugates_are_resolved(mesh):
    x = placed(mesh, dtype=torch.complex64) * 1j
    with torch.no_grad():
        product = twice(lambda: torch.mul(x.conj(), x))
    local = x._local_tensor
    assert_bitwise(product._local_tensor.resolve_conj(), local.conj() * local, "product")


def test_no_dtensor_beside_plain_scalars_in_lists(mesh):
    steps = [torch.zeros(()), torch.zeros(())]
    with torch.no_grad():
        params = [placed(mesh), placed(mesh) + 1]
        for _ in range(2):
            torch._foreach_add_(params, [p.clone() for p in params])
            torch._foreach_add_(steps, 1)
    assert [float(step) for step in steps] == [2.0, 2.0]
    assert_bitwise(params[0]._local_tensor, 4 * placed(mesh)._local_tensor, "doubled twice")


def test_a_class_that_begins_to_define_torch_function_is_asked(mesh, monkeypatch):
    """The answer for DTensor is remembered, and forgotten when the class changes."""
    x = placed(mesh)
    twice(lambda: torch.add(x, x))
    seen = []

    def torch_function(cls, function, types, args=(), kwargs=None):
        seen.append(function)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})

    with monkeypatch.context() as change:
        change.setattr(DTensor, "__torch_function__", classmethod(torch_function))
        torch.add(x, x)
        assert seen == [torch.add]
    torch.add(x, x)
    assert seen == [torch.add]


def attribute(tensor, name):
    """As C asks by name, which in CPython 3.11 is through `tp_getattr` where there is one."""
    ask = ctypes.pythonapi.PyObject_GetAttrString
    ask.restype, ask.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.c_char_p]
    return ask(tensor, name.encode())


def test_only_torch_function_is_answered_by_the_library(mesh):
    x = placed(mesh)
    for _ in range(2):
        assert attribute(x, "__torch_function__") == DTensor.__torch_function__
        assert attribute(x, "_spec") is x._spec
        assert attribute(x, "add") == x.add
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            attribute(x, "nothing")
    twice(lambda: placed(mesh) + 1)


def test_subclasses_made_meanwhile_are_asked_themselves(mesh):
    seen = []

    class Watching(DTensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    like = placed(mesh)
    watching = Watching(like._local_tensor, like._spec, requires_grad=False)
    twice(lambda: attribute(like, "__torch_function__"))
    assert attribute(watching, "__torch_function__") == Watching.__torch_function__
    assert torch.overrides.has_torch_function((watching,))
    assert not torch.overrides.has_torch_function((placed(mesh),))
    twice(lambda: placed(mesh) + 1)
