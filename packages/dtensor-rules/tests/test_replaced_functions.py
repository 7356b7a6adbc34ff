"""What enable() replaces takes the calls that torch's functions take, with the same results."""

import inspect

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

import dtensor_rules
from dtensor_rules import _compat
from testkit import assert_bitwise, fake_mesh
from testkit.inspection.call_forms import call_forms

NAME = "dtensor_rules_replaced::nothing"
torch.library.define(NAME, "(Tensor x) -> Tensor")


def plain_calls(mesh):
    """By name: how to get at the function, and arguments. Nothing is sent."""
    local = torch.arange(8.0).reshape(4, 2)
    x = distribute_tensor(local, mesh, [Replicate()], src_data_rank=None)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=x._spec.tensor_meta)
    return {
        "redistribute": (lambda: x.redistribute, (mesh, [Shard(0)]), {}),
        "redistribute, dtypes": (
            lambda: x.redistribute,
            (mesh, [Shard(0)]),
            {"forward_dtype": torch.bfloat16, "backward_dtype": torch.float64},
        ),
        "from_local": (lambda: DTensor.from_local, (local, mesh, [Shard(0)]), {}),
        "from_local, shape": (
            lambda: DTensor.from_local,
            (local, mesh, [Shard(0)]),
            {"shape": torch.Size((7, 2)), "stride": (2, 1)},
        ),
        "to_local": (lambda: x.to_local, (), {}),
        "wrap": (lambda: DTensor._op_dispatcher.wrap, (local, x._spec), {}),
        "__setattr__": (lambda: spec.__setattr__, ("tensor_meta", spec.tensor_meta), {}),
    }


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(found, DTensor):
        assert found._spec == expected._spec
        found, expected = found._local_tensor, expected._local_tensor
    if isinstance(found, torch.Tensor):
        assert_bitwise(found, expected, "result")


def test_every_form_of_a_call_gives_what_torch_gives():
    with fake_mesh((2,)) as mesh:
        for name, (of_torch, args, kwargs) in plain_calls(mesh).items():
            original = of_torch()
            signature = inspect.signature(original)
            forms = call_forms(original, *args, **kwargs)
            expected = [form.call(original) for form in forms]
            code = original.__code__
            with dtensor_rules.enabled():
                replaced = of_torch()
                assert replaced.__code__ is not code, f"{name}: not replaced"
                assert inspect.signature(replaced) == signature, name
                for _ in range(2):  # planned, and from the cache
                    for form, value in zip(forms, expected, strict=True):
                        assert_same(form.call(replaced), value)


@pytest.mark.parametrize(
    "name",
    ["register_op_strategy", "register_single_dim_op_strategy", "register_sharding_prop_rule"],
)
def test_registrations_are_written_as_ever(name):
    propagator = DTensor._op_dispatcher.sharding_propagator
    op = torch.ops.dtensor_rules_replaced.nothing.default
    tables = [one for one in vars(propagator).values() if type(one) is dict]
    original = getattr(propagator, name)
    forms = call_forms(original, op, lambda schema: schema, RuntimeSchemaInfo(1))
    for form in forms:
        registered = []
        for enabled in (False, True):
            if enabled:
                dtensor_rules.enable()
            try:
                form.call(getattr(propagator, name))
                registered.append([table.pop(op, None) for table in tables])
            finally:
                dtensor_rules.disable()
        assert registered[0] == registered[1] != [None] * len(tables)


@pytest.mark.parametrize(
    "owner_and_name",
    [
        (torch._C, _compat.CLEAR),
        *((distributed_c10d, name) for name in _compat.UNREGISTER),
    ],
    ids=lambda each: each[1],
)
def test_functions_in_cpp_keep_their_name_and_documentation(owner_and_name):
    owner, name = owner_and_name
    original = getattr(owner, name)
    with dtensor_rules.enabled():
        replaced = getattr(owner, name)
        assert replaced is not original
        assert (replaced.__name__, replaced.__doc__) == (original.__name__, original.__doc__)
