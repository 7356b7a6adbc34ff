"""``param.grad_dtype``: dtypes and bits of gradients are those of FSDP2 of torch 2.15."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fsdp
from fsdp._compat import GradDtype, default_reduce_dtype
from fsdp.collectives.grad_dtype import promoted, reduce_dtype_of, set_unsharded_grad_dtypes
from fsdp.param import FSDPParam
from testkit import assert_bitwise, fake_mesh, run_ranks
from testkit.models.residual_stack import batch

BOTH = (torch_fsdp, fsdp)
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
UNSET = "unset"

in_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.Tensor, "_has_grad_dtype_override"),
    reason="FSDP2 reads param.grad_dtype since torch 2.15",
)


class WiderGradient(torch.autograd.Function):
    """A linear layer whose weight has a gradient of another dtype, as of fused kernels."""

    @staticmethod
    def forward(ctx, x, weight, dtype):
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.to(ctx.dtype).T @ x.to(ctx.dtype), None


class Layer(nn.Module):
    """Two matrices and a bias; ``dtype`` is that of the gradients of matrices, if it is set."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 4, bias=False)
        self.dtype = None

    def forward(self, x):
        if self.dtype is None:
            return self.down(torch.relu(self.up(x)))
        hidden = WiderGradient.apply(x, self.up.weight, self.dtype) + self.up.bias
        return WiderGradient.apply(torch.relu(hidden), self.down.weight, self.dtype)


def set_grad_dtypes(model, grad_dtypes):
    for param, dtype in zip(model.parameters(), grad_dtypes, strict=True):
        if dtype != UNSET:
            param.grad_dtype = dtype


def sharded(package, dtype, grad_dtypes, **options):
    model = Layer().to(dtype)
    set_grad_dtypes(model, grad_dtypes)
    return package.fully_shard(model, **options)


def grads(model):
    found = [param.grad for param in model.parameters()]
    return [one if one is None else one.full_tensor() for one in found]


def assert_same(native, actual):
    assert [one is None for one in native] == [one is None for one in actual]
    for expected, found in zip(native, actual, strict=True):
        if expected is not None:
            assert_bitwise(found, expected)


# By name: dtype of the parameters, grad_dtype of up.weight, up.bias and down.weight, dtypes of the
# policy, dtype of the gradients of matrices in each backward, dtypes of the sharded gradients.
CASES = {
    "unset": (FP32, (UNSET, UNSET, UNSET), (BF16, None), (None, None), (FP32, FP32, FP32)),
    "kept in float32": (FP32, (UNSET, UNSET, UNSET), (BF16, None), (FP32, FP32), (FP32,) * 3),
    "narrower": (FP32, (BF16, BF16, BF16), (BF16, None), (None, None), (BF16, BF16, BF16)),
    "narrower than compute": (FP32, (BF16, BF16, BF16), (None, None), (None, None), (BF16,) * 3),
    "wider": (BF16, (FP32, FP32, FP32), (None, None), (None, None), (FP32, FP32, FP32)),
    "wider, from the kernel": (BF16, (FP32, UNSET, FP32), (None, None), (FP32, FP32),
                               (FP32, BF16, FP32)),
    "mixed": (BF16, (FP32, UNSET, BF16), (None, None), (None, None), (FP32, BF16, BF16)),
    "mixed with float64": (FP32, (FP64, BF16, UNSET), (BF16, None), (None, None),
                           (FP64, BF16, FP32)),
    "reduced in bfloat16": (FP32, (FP32, UNSET, BF16), (BF16, BF16), (None, None),
                            (FP32, FP32, BF16)),
    "reduced in float32": (BF16, (UNSET, None, BF16), (None, FP32), (None, None),
                           (BF16, FP32, BF16)),
    "any": (FP32, (None, None, None), (BF16, None), (None, None), (BF16, BF16, BF16)),
    "any, from the kernel": (BF16, (None, None, None), (None, None), (FP32, FP32), (FP32,) * 3),
    "any, wider at last": (BF16, (None, UNSET, UNSET), (None, None), (BF16, FP32),
                           (BF16, BF16, BF16)),
    "any, wider at first": (BF16, (UNSET, UNSET, None), (None, None), (FP32, BF16),
                            (BF16, BF16, FP32)),
}  # fmt: skip

# Whose gradients have several dtypes before they are reduced.
SEVERAL_DTYPES = (
    "mixed", "mixed with float64", "any, from the kernel", "any, wider at last",
    "any, wider at first",
)  # fmt: skip


def _train(package, case, *, accumulates, mesh=None):
    dtype, grad_dtypes, (param_dtype, reduce_dtype), kernel_dtypes, _ = CASES[case]
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype, reduce_dtype)
    model = sharded(package, dtype, grad_dtypes, mp_policy=policy, mesh=mesh)
    for step, kernel_dtype in enumerate(kernel_dtypes):
        last = step == len(kernel_dtypes) - 1
        if mesh is None:
            model.set_requires_gradient_sync(last or not accumulates)
        else:
            model.set_requires_all_reduce(last or not accumulates)
        model.dtype = kernel_dtype
        model(batch(step).to(dtype)).square().mean().backward()
        if not accumulates and not last:
            model.zero_grad()
    return grads(model)


@in_fsdp2
@pytest.mark.ranks
def test_gradients_have_the_dtypes_and_bits_of_fsdp2():
    def check():
        for case in CASES:
            assert_same(*[_train(one, case, accumulates=False) for one in BOTH])

    run_ranks(check, 2)


@in_fsdp2
@pytest.mark.ranks
def test_accumulated_gradients_have_the_dtypes_of_fsdp2():
    """They are added up in the dtype of the group's reduction, under FSDP2 in their own."""

    def check():
        for case in CASES:
            native, actual = (_train(one, case, accumulates=True) for one in BOTH)
            assert [grad.dtype for grad in actual] == list(CASES[case][-1]), case
            if case not in SEVERAL_DTYPES:
                assert_same(native, actual)
            for expected, found in zip(native, actual, strict=True):
                torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-9)

    run_ranks(check, 2)


@in_fsdp2
@pytest.mark.ranks
def test_gradients_that_await_their_all_reduce_keep_their_bits():
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for case in ("mixed", "any, wider at last", "any, wider at first"):
            assert_same(*[_train(one, case, accumulates=True, mesh=mesh) for one in BOTH])

    run_ranks(check, 2)


@in_fsdp2
@pytest.mark.ranks
def test_it_may_be_set_on_the_sharded_parameters_before_the_first_forward():
    def check():
        found = []
        for package in BOTH:
            model = sharded(package, FP32, (UNSET, UNSET, UNSET))
            set_grad_dtypes(model, (BF16, None, UNSET))
            model(batch(0)).square().mean().backward()
            found.append(grads(model))
        assert [one.dtype for one in found[1]] == [BF16, FP32, FP32]
        assert_same(*found)

    run_ranks(check, 2)


@in_fsdp2
@pytest.mark.ranks
def test_casts_and_loaded_parameters_keep_it_and_the_gradients_that_have_it():
    def check():
        found = []
        for package in BOTH:
            model = sharded(package, FP32, (FP32, UNSET, None))
            model(batch(0)).square().mean().backward()
            model.to(BF16)
            dtypes = [param.grad.dtype for param in model.parameters()]
            assert dtypes == [FP32, BF16, FP32]
            seen = grads(model)
            model.zero_grad()
            model = sharded(package, FP32, (BF16, UNSET, UNSET)).to(BF16)  # before it ran
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            model.up.weight.grad_dtype = FP32
            model(batch(0).to(BF16)).square().mean().backward()
            found.append(seen + grads(model))
        assert [one.dtype for one in found[1][3:]] == [FP32, BF16, BF16]
        assert_same(*found)

    run_ranks(check, 2)


@in_fsdp2
@pytest.mark.ranks
def test_zeros_of_unused_parameters_need_a_dtype():
    def check():
        for package in BOTH:
            model = sharded(package, FP32, (None, UNSET, UNSET))
            model.set_reduce_scatter_unused_params(True)
            loss = model(batch(0)).square().mean()
            with pytest.raises(ValueError, match="Reducing unused parameters with grad_dtype=None"):
                loss.backward()
        found = []
        for package in BOTH:
            policy = torch_fsdp.MixedPrecisionPolicy(reduce_dtype=FP32)
            model = sharded(package, BF16, (None, FP32, UNSET), mp_policy=policy)
            model.set_reduce_scatter_unused_params(True)
            model(batch(0).to(BF16)).square().mean().backward()
            found.append(grads(model))
        assert_same(*found)

    run_ranks(check, 2)


class Scale(nn.Module):
    """A weight that tensor parallelism replicates; its gradients are Partial along tp."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        weight = distribute_tensor(torch.randn(8, dtype=BF16), mesh, [Replicate()])
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x * self.weight


@in_fsdp2
@pytest.mark.ranks
def test_other_axes_reduce_in_the_dtype_of_the_gradient():
    """A sum over tp in bfloat16 would round."""

    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        found = []
        for package in BOTH:
            model = Scale(mesh["tp"])
            model.weight.grad_dtype = FP32
            package.fully_shard(model, mesh=mesh["dp"])
            x = DTensor.from_local(batch(0).to(BF16), mesh["tp"], [Shard(0)])
            model(x).square().sum().backward()
            found.append(grads(model))
        assert found[1][0].dtype == FP32
        assert_same(*found)

    run_ranks(check, 2)


@in_fsdp2
def test_unsharded_gradients_are_not_cast_before_the_buffer():
    """Where the reduction is wider than compute, the copy into the buffer casts."""
    with fake_mesh((2,)):
        policy = torch_fsdp.MixedPrecisionPolicy(BF16, FP32)
        model = sharded(fsdp, FP32, (UNSET, UNSET, BF16), mp_policy=policy)
        model.unshard()
        assert [param.grad_dtype for param in model.parameters()] == [None, None, None]
        model.reshard()
        policy = torch_fsdp.MixedPrecisionPolicy(FP32, BF16)
        model = sharded(fsdp, FP32, (UNSET, UNSET, FP32), mp_policy=policy)
        model.unshard()
        assert [param.grad_dtype for param in model.parameters()] == [BF16, BF16, BF16]


# The rules, with parameters whose grad_dtype a torch before 2.15 could not tell.


def params_with(*grad_dtypes):
    return [
        FSDPParam("w", None, (), 1, None, grad_dtype=None if one == UNSET else GradDtype(one))
        for one in grad_dtypes
    ]


@pytest.mark.parametrize(
    ("grad_dtypes", "sharded", "compute", "reduce_dtype", "expected"),
    [
        ((UNSET, UNSET), FP32, FP32, None, FP32),
        ((UNSET, UNSET), FP32, BF16, None, default_reduce_dtype(FP32, BF16)),
        ((FP32, FP32), BF16, BF16, None, FP32),
        ((BF16, BF16), FP32, FP32, None, BF16),
        ((BF16, UNSET), FP32, FP32, None, FP32),
        ((FP32, UNSET), BF16, BF16, None, FP32),
        ((FP16, BF16), FP32, FP32, None, FP32),  # neither holds the other
        ((None, None), FP32, BF16, None, BF16),
        ((None, FP64), FP32, BF16, None, FP64),
        ((FP64, None, UNSET), FP32, BF16, BF16, BF16),
    ],
)
def test_a_group_is_reduced_in_the_dtype_that_all_its_gradients_promote_to(
    grad_dtypes, sharded, compute, reduce_dtype, expected
):
    policy = torch_fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    assert reduce_dtype_of(params_with(*grad_dtypes), sharded, compute, policy) == expected


def test_float8_promotes_with_itself_alone():
    float8 = torch.float8_e4m3fn
    assert promoted([float8, float8]) == float8
    with pytest.raises(RuntimeError, match="Promotion for Float8"):
        promoted([float8, FP32])


@pytest.mark.parametrize(
    ("grad_dtype", "sharded", "compute", "reduce_dtype", "cast_to", "follows_grad"),
    [
        (UNSET, BF16, BF16, None, BF16, False),
        (UNSET, FP32, BF16, None, None, False),  # the copy into the buffer casts
        (UNSET, FP32, BF16, FP32, None, False),
        (UNSET, FP32, FP32, BF16, BF16, False),
        (BF16, FP32, FP32, None, BF16, False),
        (FP32, BF16, BF16, None, None, False),
        (FP16, FP32, BF16, None, FP16, False),  # as wide, and another
        (None, FP32, BF16, None, None, True),
        (None, FP32, BF16, BF16, BF16, False),
        (UNSET, torch.int64, torch.int64, None, torch.int64, False),
        (UNSET, torch.int64, torch.int32, None, torch.int64, False),  # only floats are cast later
    ],
)
def test_autograd_casts_gradients_where_the_buffer_would_not_widen_them(
    grad_dtype, sharded, compute, reduce_dtype, cast_to, follows_grad
):
    [param] = params_with(grad_dtype)
    policy = torch_fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    set_unsharded_grad_dtypes([param], sharded, compute, policy)
    assert (param.unsharded_grad_dtype, param.follows_grad) == (cast_to, follows_grad)


@pytest.mark.parametrize(
    ("placement", "grad_placement", "cast_to"),
    [
        (Replicate(), None, FP32),  # its gradient may be Partial
        (Shard(0), None, None),
        (Replicate(), Partial(), FP32),
        (Replicate(), Replicate(), None),
    ],
)
def test_gradients_that_other_axes_reduce_are_widened_before(placement, grad_placement, cast_to):
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = nn.Linear(8, 8, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh["tp"], [placement]))
        fsdp.fully_shard(
            model,
            mesh=mesh["dp"],
            mp_policy=torch_fsdp.MixedPrecisionPolicy(BF16, FP32),
            grad_placements_fn=None if grad_placement is None else lambda param: [grad_placement],
        )
        [group] = model._get_fsdp_state().groups
        assert [param.unsharded_grad_dtype for param in group.params] == [cast_to]


def test_gradients_that_fully_shard_reduces_are_widened_in_its_buffer():
    with fake_mesh((2,), ("dp",)) as mesh:
        model = nn.Linear(8, 8, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Replicate()]))
        fsdp.fully_shard(model, mesh=mesh, mp_policy=torch_fsdp.MixedPrecisionPolicy(BF16, FP32))
        [group] = model._get_fsdp_state().groups
        assert [param.unsharded_grad_dtype for param in group.params] == [None]
