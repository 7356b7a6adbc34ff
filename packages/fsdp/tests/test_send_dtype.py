"""Gradients whose terms are sent in bfloat16 or float8: bits, bytes, axes, and what is refused."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp
from testkit import CommLog, fake_mesh, run_ranks
from testkit.models.residual_stack import batch, losses, shard, stack

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def backward(model, step=0):
    model(batch(step, dist.get_rank())).square().mean().backward()


def grads_of(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def expected_grads(ranks):
    """The mean of the ranks' gradients, each rounded to bfloat16, in the order of the ranks."""
    sums = {}
    for rank in range(ranks):
        model = stack()
        model(batch(0, rank)).square().mean().backward()
        for name, param in model.named_parameters():
            term = param.grad.bfloat16().float()
            sums[name] = sums[name] + term if name in sums else term
    return {name: total / ranks for name, total in sums.items()}


LAYOUTS = {
    "elements": {},
    "rows": {"shard_placement_fn": lambda param: fsdp.Rows(4) if param.ndim == 2 else None},
    "zero2": {"placements": "zero2"},
    "ddp": {"placements": "ddp"},
    "native": {"strategy": "native"},
}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_sums_of_rounded_terms_in_every_layout(layout):
    def check():
        model = shard(fsdp, stack(), send_dtype=BF16, **LAYOUTS[layout])
        backward(model)
        expected = expected_grads(2)
        found = grads_of(model)
        return found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in expected
        )

    assert run_ranks(check, 2) == [True, True]


@pytest.mark.ranks
def test_a_mesh_may_have_its_ranks_in_another_order_than_the_process_group():
    def check():
        meshes = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])
        models = [shard(fsdp, stack(), mesh=mesh, send_dtype=BF16) for mesh in meshes]
        return [losses(model).tolist() for model in models]

    for ascending, other in run_ranks(check, 2):
        assert ascending == other


@pytest.mark.ranks
@pytest.mark.parametrize(("dtype", "within"), [(BF16, 2e-3), (E4M3, 2e-2)])
def test_training_is_near_that_of_wide_terms(dtype, within):
    def check():
        wide = losses(shard(fsdp, stack()))
        narrow = losses(shard(fsdp, stack(), send_dtype=dtype))
        separate = shard(fsdp, stack(), send_dtype=dtype)
        separate.set_separate_reduce_scatter_group()
        return wide.tolist(), narrow.tolist(), losses(separate).tolist()

    for wide, narrow, separate in run_ranks(check, 2):
        assert narrow == pytest.approx(wide, rel=within)
        assert narrow != wide
        assert separate == narrow


@pytest.mark.parametrize(("dtype", "per_element"), [(BF16, 2), (E4M3, 129 / 128)])
def test_bytes_are_those_of_narrow_numbers_and_scales(dtype, per_element):
    with fake_mesh((4,)) as mesh:
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(2)])
        for layer in model:
            fsdp.fully_shard(layer, mesh=mesh, send_dtype=dtype)
        fsdp.fully_shard(model, mesh=mesh, send_dtype=dtype)
        with CommLog() as log:
            model(torch.randn(3, 256)).sum().backward()
    sent = log.wire_bytes("all_to_all")
    assert sent == 2 * 256 * 256 * 3 / 4 * per_element
    assert log.counts()["all_to_all"] == 2
    assert "reduce_scatter" not in log.counts()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("placements", [None, "hfsdp"])
@pytest.mark.parametrize("axis", ["replicate", 0])
def test_replicas_are_reduced_in_a_dtype_of_their_own(placements, axis):
    """Within a replica terms are sent as they are, between replicas they are rounded."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        exact, rounded = (
            shard(fsdp, stack(), mesh=mesh, placements=placements, **options)
            for options in ({}, {"send_dtype": {axis: BF16}})
        )
        with CommLog() as of_exact:
            backward(exact)
        with CommLog() as of_rounded:
            backward(rounded)
        found = zip(grads_of(exact).values(), grads_of(rounded).values(), strict=True)
        near = [torch.allclose(a, b, rtol=2e-2, atol=2e-2 * a.abs().max()) for a, b in found]
        found = zip(grads_of(exact).values(), grads_of(rounded).values(), strict=True)
        same = [torch.equal(a, b) for a, b in found]
        return all(near), any(same), of_exact.counts(), of_rounded.counts()

    for near, same, of_exact, of_rounded in run_ranks(check, 4):
        assert near
        assert not same
        assert "all_to_all" not in of_exact
        assert of_rounded["all_to_all"] == 4  # one of each group


@pytest.mark.ranks
def test_gradients_are_accumulated_before_they_are_rounded():
    def check():
        model = shard(fsdp, stack(), send_dtype=BF16)
        model.set_requires_gradient_sync(False)
        backward(model, 0)
        model.set_requires_gradient_sync(True)
        backward(model, 1)
        sums = {}
        for rank in range(2):
            plain = stack()
            for step in range(2):
                plain(batch(step, rank)).square().mean().backward()
            for name, param in plain.named_parameters():
                sums[name] = sums.get(name, 0) + (param.grad).bfloat16().float()
        found = grads_of(model)
        return all(torch.equal(found[name], sums[name] / 2) for name in sums)

    assert run_ranks(check, 2) == [True, True]


BAD = {
    "a wide dtype": ({"send_dtype": torch.float32}, r"expected one of torch\.bfloat16"),
    "an axis": ({"send_dtype": {"hosts": BF16}}, r"expected axes of the mesh .* got 'hosts'"),
    "a number": ({"send_dtype": {1: BF16}}, r"expected axes of the mesh .* got 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_dtypes_and_axes_are_refused_before_anything_changes(name):
    options, message = BAD[name]
    with fake_mesh((2,), ("shard",)) as mesh:
        model = stack()
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=f"fully_shard: send_dtype: {message}"):
            fsdp.fully_shard(model, mesh=mesh, **options)
        assert all(param is before[name] for name, param in model.named_parameters())


@pytest.mark.parametrize(
    "method",
    [
        functools.partial(fsdp.FSDPModule.set_custom_reduce_scatter, comm=object()),
        functools.partial(
            fsdp.FSDPModule.set_allocate_memory_from_process_group_for_comm, enable=True
        ),
    ],
    ids=["custom", "memory of the process group"],
)
def test_other_reduce_scatters_are_refused_beside_it(method):
    with fake_mesh((2,)) as mesh:
        model = fsdp.fully_shard(stack(), mesh=mesh, send_dtype=BF16)
        with pytest.raises(ValueError, match="expected no send_dtype beside"):
            method(model)
