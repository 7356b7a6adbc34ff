"""Private interfaces of torch, and differences between its versions, are as _compat.py expects."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as TorchFSDPParam

import fsdp
from fsdp import _compat
from fsdp.checkpoint.folder import dtypes
from fsdp.private_names import ModuleNames
from testkit import run_python, run_ranks
from testkit.models.residual_stack import batch, shard, stack

BOTH = (fsdp, torch_fsdp)


@pytest.mark.ranks
def test_reduce_dtype_none_is_the_default_of_this_torch():
    """The parameters' dtype in 2.15, before it the compute dtype."""

    def check():
        grads = []
        for package in BOTH:
            model = shard(package, stack(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            model(batch(0)).square().mean().backward()
            grads.append([param.grad.full_tensor() for param in model.parameters()])
            if package is fsdp:
                dtype = model._get_fsdp_state().groups[0].dtypes.reduce
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
        return dtype

    newer = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)
    assert run_ranks(check, 2) == [torch.float32 if newer else torch.bfloat16] * 2


@pytest.mark.ranks
@pytest.mark.skipif(
    not hasattr(MixedPrecisionPolicy, "_resolve_for_param"),
    reason="torch < 2.15 has one dtype for all parameters",
)
def test_param_dtype_override_applies_to_each_parameter():
    def check():
        def override(param):
            return torch.float32 if param.ndim == 1 else None

        policy = MixedPrecisionPolicy(
            torch.bfloat16,
            torch.float32,
            cast_forward_inputs=False,
            param_dtype_override_fn=override,
        )
        model = shard(fsdp, stack(), mp_policy=policy)
        model.unshard()
        return {param.ndim: param.dtype for param in model[-1].parameters()}

    assert run_ranks(check, 1) == [{2: torch.bfloat16, 1: torch.float32}]


def test_grad_dtype_is_read_where_fsdp2_reads_it():
    newer = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)
    param = torch.nn.Parameter(torch.zeros(2))
    assert _compat.grad_dtype_of(param) is None
    param.grad_dtype = torch.float64
    expected = _compat.GradDtype(torch.float64) if newer else None
    assert _compat.grad_dtype_of(param) == expected
    assert ("sharded_grad_dtype" in TorchFSDPParam.__annotations__) == newer
    _compat.set_grad_dtype(param, None)
    assert _compat.grad_dtype_of(param) == (_compat.GradDtype(None) if newer else None)


def test_fsdp2_knows_annotated_parameters_since_2_14():
    """mesh/annotations.py accepts them with every torch."""
    newer = torch.torch_version.TorchVersion(torch.__version__) >= (2, 14)
    assert hasattr(TorchFSDPParam, "_resolve_spmd_types_for_storage") == newer


def test_private_collectives_of_torch_have_the_public_interface():
    assert issubclass(_compat.torch_collectives.ProcessGroupAllocAllGather, _compat.AllGather)
    assert issubclass(
        _compat.torch_collectives.ProcessGroupAllocReduceScatter, _compat.ReduceScatter
    )


MESH_DIMS = """
import torch.distributed.fsdp as torch_fsdp
torchs = vars(torch_fsdp).pop("DataParallelMeshDims", None)
import fsdp
assert fsdp.DataParallelMeshDims is not torchs
dims = fsdp.DataParallelMeshDims(shard=("dp", "cp"), replicate="replicate")
assert (dims.shard_names, dims.replicate_names) == (("dp", "cp"), ("replicate",))
assert fsdp.DataParallelMeshDims(shard="dp").replicate_names == ()
try:
    fsdp.DataParallelMeshDims()
except ValueError as error:
    assert "At least one of shard or replicate must be set" in str(error)
else:
    raise AssertionError("no axis was accepted")
"""


def test_data_parallel_mesh_dims_is_torchs_class_where_torch_has_it():
    newer = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)
    assert hasattr(torch_fsdp, "DataParallelMeshDims") == newer
    if newer:
        assert fsdp.DataParallelMeshDims is torch_fsdp.DataParallelMeshDims


def test_data_parallel_mesh_dims_without_torchs_class():
    done = run_python("-c", MESH_DIMS, preloaded=False)  # where fsdp is not imported yet
    assert not done.returncode, done.stderr


def test_every_method_of_torchs_fsdp_module_is_overridden():
    """An inherited method would look for torch's own state."""
    methods = {name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("__")}
    own = {name for one in (fsdp.FSDPModule, ModuleNames) for name in vars(one)}
    inherited = methods - own
    assert inherited <= {"_orig_cls_mro_index", "_set_unshard_async_op", "_abc_impl"}


def test_the_handle_of_a_gradient_reduction_is_torchs_where_it_has_one():
    newer = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)
    assert hasattr(torch_fsdp, "GradientReductionHandle") == newer
    assert hasattr(torch_fsdp.FSDPModule, "finalize_backward") == newer
    handle = getattr(torch_fsdp, "GradientReductionHandle", None)
    assert handle in (None, fsdp.GradientReductionHandle)


def test_process_groups_keep_the_order_of_ranks_since_2_13():
    """HFSDP's: torch 2.11 sorts them, and the strategy is refused there."""
    version = torch.torch_version.TorchVersion(torch.__version__)
    if version >= (2, 13):
        _compat.check_ordered_groups()
    elif version < (2, 12):
        with pytest.raises(ValueError, match="update torch, or pass placements='hsdp'"):
            _compat.check_ordered_groups()


def test_names_in_state_dicts_have_no_wrappers():
    model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(2, 2)))
    [name, _] = (name for name, _ in model.named_parameters())
    assert name == "0._checkpoint_wrapped_module.weight"
    assert _compat.canonical_names(model, name) == ["0.weight"]


def test_dtypes_of_safetensors_are_those_of_torch():
    assert dtypes()["BF16"] is torch.bfloat16
    assert dtypes()["F8_E4M3"] is torch.float8_e4m3fn
    assert dtypes()["I64"] is torch.int64
