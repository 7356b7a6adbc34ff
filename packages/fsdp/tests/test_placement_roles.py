"""Placements of parameters, gradients and optimizer state, each for itself: bits, bytes, memory."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp
from fsdp import STRATEGIES, MixedPrecisionPolicy, Roles, Tiles, fully_shard
from testkit import KEEPS_ORDER_OF_RANKS, NO_ORDER_OF_RANKS, CommLog, fake_mesh, run_ranks
from testkit.models import residual_stack
from testkit.models.residual_stack import batch, losses, stack
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks

HFSDP = ("hfsdp",) if KEEPS_ORDER_OF_RANKS else ()
ONE_AXIS, TWO_AXES = ("ddp", "zero1", "zero2", "zero3"), ("hsdp", *HFSDP)
needs_ordered_ranks = pytest.mark.skipif(not KEEPS_ORDER_OF_RANKS, reason=NO_ORDER_OF_RANKS)


def mesh_of(name, device="cpu"):
    """All ranks, or pairs of replicas of pairs."""
    if name in TWO_AXES:
        return init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device, (torch.distributed.get_world_size(),))


def shard(name=None, like=None, device="cpu", **options):
    """Shards a stack by the strategy of a name, or without one on the mesh of another."""
    model, mesh = stack().to(device), mesh_of(name or like, device)
    return residual_stack.shard(fsdp, model, mesh=mesh, placements=name, **options)


def groups_of(model):
    return [group for state in model._states(recurse=True) for group in state.groups]


def accumulates(model, last):
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


def accumulates_shards(model, last):
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)


# Bits.


@pytest.mark.parametrize(
    ("names", "param_dtype"),
    [
        (TWO_AXES, torch.bfloat16),
        pytest.param(ONE_AXIS, None, marks=pytest.mark.slow),
        pytest.param(ONE_AXIS, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(TWO_AXES, None, marks=pytest.mark.slow),
    ],
)
def test_losses_have_the_bits_of_fsdp(names, param_dtype):
    def check():
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for how in ({"steps": 3}, {"steps": 2, "micro": 2}):
            wanted = losses(shard(like=names[0], mp_policy=policy), **how)
            for name in names:
                assert torch.equal(losses(shard(name, mp_policy=policy), **how), wanted), name

    run_ranks(check, 4 if names is TWO_AXES else 2, timeout=120)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        pytest.param("ddp", accumulates, marks=pytest.mark.slow),
        ("zero1", accumulates),
        ("zero2", lambda model, last: None),
        pytest.param("zero3", lambda model, last: None, marks=pytest.mark.slow),
        pytest.param("hsdp", accumulates_shards, marks=pytest.mark.slow),
        pytest.param("hfsdp", accumulates_shards, marks=needs_ordered_ranks),
    ],
)
def test_gradients_of_microbatches_have_the_bits_of_fsdp_that_keeps_them_so(name, same):
    """Unsharded and reduced in the last backward, or reduced over the shard axis in each."""

    def check():
        wanted = losses(shard(like=name), steps=2, micro=3, prepare=same)
        assert torch.equal(losses(shard(name), steps=2, micro=3, prepare=accumulates), wanted)

    run_ranks(check, 4 if name in TWO_AXES else 2, timeout=120)


# Bytes.


@pytest.mark.parametrize("micro", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_sends_the_bytes_of_the_formulas(micro):
    """Counted on 2 x 2 ranks; the root's parameters stay between forward and backward."""
    names = (*ONE_AXIS, *TWO_AXES)

    def check():
        return [sent_by_a_step(name) for name in names]

    def sent_by_a_step(name):
        model = shard(name, strategy="native")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # the first one compares plans, too
            with CommLog() as log:
                for number in range(micro):
                    accumulates(model, number == micro - 1)
                    model(batch(number)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        sizes = [4 * group.shard.layout.buffer_size for group in groups_of(model)]
        root, total = sizes[0], sum(sizes)
        # An all-reduce over two ranks sends its input once.
        sent = sum(one.input_bytes if one.op == "all_reduce" else one.wire_bytes
                   for one in log.calls)  # fmt: skip
        return sent, root, total, log.counts()

    ranks = run_ranks(check, 4, timeout=120)
    for name, (sent, root, total, counts) in [
        pair for found in ranks for pair in zip(names, found, strict=True)
    ]:
        four, two = total * 3 // 4, total // 2  # of a collective over 4 ranks, and over 2
        of_shards = total // 2 // 2  # over 2 replicas
        gathers, reductions, expected = {
            "ddp": (4, 4, four + four),
            "zero1": (4, 4, four + four),
            "zero2": (4, 4 * micro, four + micro * four),
            "zero3": (7 * micro, 4 * micro, micro * (3 * four - root * 3 // 4)),
            "hsdp": (7 * micro, 4 * micro, micro * (3 * two - root // 2) + 2 * of_shards),
            "hfsdp": (
                7 * micro + 4, 4 * micro + 4, micro * (3 * two - root // 2) + 2 * of_shards,
            ),
        }[name]  # fmt: skip
        assert sent == expected, name
        wanted = {"all_gather": gathers, "reduce_scatter": reductions}
        if name == "hsdp":
            wanted["all_reduce"] = 4
        assert counts == wanted, name


def test_microbatches_need_no_more_than_set_requires_gradient_sync():
    """As scripts for FSDP2 call it."""
    # HFSDP gathers over the shards for each microbatch, and once over the replicas.
    expected = {"zero1": 4, "zero2": 4} | dict.fromkeys(HFSDP, 3 * 4 + 4)

    def check():
        found = {}
        for name in expected:
            model = shard(name, strategy="native", reshard_after_forward=False)
            with CommLog() as log:
                for number in range(3):
                    model.set_requires_gradient_sync(number == 2)
                    model(batch(number)).sum().backward()
            found[name] = log.counts()["all_gather"]
        return found

    assert run_ranks(check, 4) == [expected] * 4


# Memory.


@pytest.mark.parametrize(
    ("names", "param_dtype"),
    [
        pytest.param(("ddp", "zero2", *HFSDP), torch.bfloat16, id="fast"),
        pytest.param((*ONE_AXIS, *TWO_AXES), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((*ONE_AXIS, *TWO_AXES), torch.float32, marks=pytest.mark.slow),
    ],
)
def test_memory_between_steps_is_that_of_the_formulas(names, param_dtype):
    """To the byte, on 2 x 2 simulated devices, with the padding of the layouts."""

    def check():
        found = []
        for name in names:
            found.append(memory_of_steps(name))
            gc.collect()
        return found

    def memory_of_steps(name):
        memory = torch.accelerator.memory_allocated
        policy = MixedPrecisionPolicy(param_dtype, torch.float32)
        # What earlier models have left is released here, and not while this one is measured.
        torch.ones(1, device="sim", requires_grad=True).sum().backward()
        gc.collect()
        before = memory()
        model = shard(name, device="sim", strategy="native", mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        found = []
        for step in range(2):
            loss = model(batch(step).to("sim")).float().square().mean()
            loss.backward()
            del loss
            gc.collect()  # what hooks refer to
            found.append(memory() - before)  # with gradients
            optimizer.step()
            optimizer.zero_grad()
            found.append(memory() - before)  # between steps
        states = sum(s.to_local().nbytes for one in optimizer.state.values()
                     for s in one.values() if s.ndim)  # fmt: skip
        padded = sum(group.shard.layout.buffer_size for group in groups_of(model))
        elements = sum(param.numel() for param in model.parameters())
        return found[-2] - found[-1], found[-1] - states, states, padded, elements

    ranks = run_sim_ranks(check, 4, timeout=120)
    for name, of_ranks in zip(names, zip(*ranks, strict=True), strict=True):
        assert_formulas(name, param_dtype, of_ranks)


def assert_formulas(name, param_dtype, ranks):
    for gradients, params, _, padded, _ in ranks:
        wanted_params, wanted_gradients = {
            "ddp": (padded, padded),
            "zero1": (padded, padded / 4),
            "zero2": (padded, padded / 4),
            "zero3": (padded / 4, padded / 4),
            "hsdp": (padded / 2, padded / 2),
            "hfsdp": (padded / 2, padded / 4),
        }[name]
        master = {"ddp": 1, "hsdp": 0, "zero3": 0}.get(name, 1 / 4) * padded
        if param_dtype == torch.float32:
            assert params == 4 * wanted_params, name  # of which the optimizer's are views
        elif name in ("zero3", "hsdp"):
            assert params == 4 * wanted_params, name
        else:  # what forward uses, in its dtype, beside what the optimizer updates
            assert params == 2 * wanted_params + 4 * master, name
        assert gradients == 4 * wanted_gradients, name
    copies = {"ddp": 4, "hsdp": 2}.get(name, 1)
    assert sum(states for _, _, states, _, _ in ranks) == 2 * 4 * copies * ranks[0][-1], name


# Errors.


def linear(**options):
    """Returns the message by which a Linear is refused, and left as it was."""
    module = nn.Linear(4, 8)
    before = dict(module.named_parameters())
    with CommLog() as log, pytest.raises(ValueError, match="placements: ") as caught:
        fully_shard(module, **options)
    log.assert_counts({})
    assert all(before[name] is param for name, param in module.named_parameters())
    assert not isinstance(module, fsdp.FSDPModule)
    return str(caught.value)


def tiles_of_matrices(param):
    return Tiles() if param.ndim == 2 else None


REPLICATED, SHARDED = Replicate(), Shard(0)


@pytest.mark.parametrize(
    ("placements", "got"),
    [
        ("zero4", "'zero4'"),
        ("hfsdp", "'hfsdp' (parameter=R S, gradient=R S, optimizer=S S)"),
        (
            Roles(SHARDED, REPLICATED, SHARDED),
            "Roles(parameter=S, gradient=R, optimizer=S)",
        ),
        (Roles(REPLICATED, SHARDED, REPLICATED), "Roles(parameter=R, gradient=S, optimizer=R)"),
        (Roles(REPLICATED, REPLICATED, Shard(1)), "optimizer=Shard(dim=1))"),
        (Roles([REPLICATED] * 2, [REPLICATED] * 2, [REPLICATED] * 2), "parameter=R R"),
        (3, "got 3"),
    ],
)
def test_other_placements_are_refused_with_those_that_there_are(placements, got):
    with fake_mesh((4,)) as mesh:
        message = linear(mesh=mesh, placements=placements)
    assert got in message
    for name in ONE_AXIS:
        assert f"{name!r} ({STRATEGIES[name]})" in message
    assert "'hsdp'" not in message


def test_strategies_are_roles_on_their_mesh():
    with fake_mesh((2, 2), ("replicate", "shard")) as mesh:
        message = linear(mesh=mesh, placements="zero2")
        assert "'hsdp' (parameter=R S, gradient=R S, optimizer=R S)" in message
        roles = Roles([REPLICATED, SHARDED], [REPLICATED, SHARDED], [REPLICATED, SHARDED])
        assert roles == STRATEGIES["hsdp"]
        fully_shard(nn.Linear(4, 8), mesh=mesh, placements=roles)


def test_options_of_parameters_that_are_freed_are_refused_where_they_stay():
    with fake_mesh((4,)) as mesh:
        for name in ("ddp", "zero1", "zero2"):
            for reshard in (True, 2):
                message = linear(mesh=mesh, placements=name, reshard_after_forward=reshard)
                assert f"got reshard_after_forward={reshard}" in message
            message = linear(mesh=mesh, placements=name, quantize_fn=tiles_of_matrices)
            assert "got quantize_fn, which quantizes them for each all-gather: 'weight'" in message
            module = nn.Linear(4, 8)
            fully_shard(module, mesh=mesh, placements=name, reshard_after_forward=False)
            with pytest.raises(ValueError, match=r"expected False for 'weight', 'bias', which"):
                module.set_reshard_after_forward(True)
            module.set_reshard_after_forward(False)


@needs_ordered_ranks
def test_hfsdp_refuses_dtensors_of_other_axes():
    with fake_mesh((2, 2, 2), ("replicate", "shard", "tp")) as mesh:
        module = nn.Linear(4, 8)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["tp"]))
        with pytest.raises(ValueError, match="got 'weight', a DTensor of other axes; pass"):
            fully_shard(module, mesh=mesh["replicate", "shard"], placements="hfsdp")


def test_ranks_that_differ_in_placements_are_an_error_on_all_ranks():
    def check():
        name = ("zero1", "zero2")[torch.distributed.get_rank()]
        model = fully_shard(nn.Linear(4, 8), placements=name)
        with pytest.raises(ValueError, match="ranks differ") as caught:
            model(torch.ones(1, 4))
        return str(caught.value)

    for message in run_ranks(check, 2):
        assert "parameter=R, gradient=R, optimizer=S on rank 0" in message
        assert "parameter=R, gradient=S, optimizer=S on rank 1" in message
