"""Operators whose result depends on the whole: of local tensors, what DTensors make of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from plan_api import Plan, parallelize
from plan_api.patches import install_patches
from testkit import fake_mesh, run_ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


class Calls(nn.Module):
    """Its forward is a function that a test gives."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def _static(mesh, function, **said):
    """A module that calls a function, with operators annotated along the first axis."""
    plan = Plan(mesh)
    for name, placement in said.items():
        plan.annotate(f"<op:{name.replace('__', ':')}>", placement, mesh.mesh_dim_names[0])
    return parallelize(Calls(function), plan, mode="static", guard_steps=0)


@pytest.fixture
def mesh():
    with fake_mesh((2,), ("tp",)) as mesh:
        yield mesh


@pytest.mark.ranks
def test_dropout_draws_the_numbers_of_one_device():
    """On each part of a tensor, in place or not; what is whole is dropped alike on all ranks."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for placement in (R, S0, S1):
            for inplace in (False, True):
                torch.manual_seed(0)
                whole = torch.randn(4, 6)
                theirs = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                ours = theirs.to_local().clone()
                model = _static(
                    mesh, lambda x, inplace=inplace: F.dropout(x, 0.5, True, inplace),
                    dropout=placement,
                )  # fmt: skip
                ends = []
                for call in (
                    lambda given=theirs: F.dropout(given, 0.5, True).to_local(),
                    lambda given=ours, model=model: model(given),
                    lambda given=whole: F.dropout(given, 0.5, True),
                ):
                    torch.manual_seed(7)
                    result = call()
                    ends.append((result, torch.rand(2)))  # what is drawn next, too
                (dtensors, next_theirs), (locals_, next_ours), (alone, next_alone) = ends
                cut = distribute_tensor(alone, mesh, [placement], src_data_rank=None).to_local()
                found[placement, inplace] = (
                    torch.equal(locals_, dtensors),
                    torch.equal(locals_, cut),
                    torch.equal(next_ours, next_theirs) and torch.equal(next_ours, next_alone),
                    (locals_ is ours) == inplace,
                    0 < int((locals_ == 0).sum()) < locals_.numel(),
                )
        return found

    for found in run_ranks(check, 2, timeout=120):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


def test_dropout_that_is_off_returns_its_input(mesh):
    given = torch.ones(4, 4)
    assert _static(mesh, lambda x: F.dropout(x, 0.5, False), dropout=S0)(given) is given
    assert _static(mesh, lambda x: F.dropout(x, 0.0, True), dropout=S0)(given) is given


CUTS = {
    "whole": (R, R),
    "rows": (S0, R),
    "classes": (R, S1),
    "both": (S0, S1),
    "rows twice": (S0, S0),
}


@pytest.mark.ranks
@pytest.mark.parametrize("classes", [8, 7], ids=["even", "uneven"])
def test_cross_entropy_has_dtensors_bits_and_one_devices_values(classes):
    """With ignored rows on one rank only, weights of classes, and all reductions."""

    def check():
        install_patches(())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = {}
        for name, placements in CUTS.items():
            for reduction in ("mean", "sum", "none"):
                for weighted in (False, True):
                    case = (name, reduction, weighted)
                    found[case] = _same(mesh, placements, reduction, weighted)
        return found

    def _same(mesh, placements, reduction, weighted):
        torch.manual_seed(0)
        logits, labels = torch.randn(8, classes), torch.randint(0, classes, (8,))
        labels[:3] = -100
        weight = torch.rand(classes) if weighted else None
        options = {"reduction": reduction}
        plain = logits.clone().requires_grad_()
        expected = F.cross_entropy(plain, labels, weight, **options)
        expected.square().sum().backward()
        theirs = distribute_tensor(logits, mesh, placements).requires_grad_()
        rows = [one if one == S0 else R for one in placements]
        targets = distribute_tensor(labels, mesh, rows)
        weights = None if weight is None else distribute_tensor(weight, mesh, [R, R])
        loss = F.cross_entropy(theirs, targets, weights, **options)
        loss.redistribute(placements=rows if reduction == "none" else [R, R]).square().sum(
        ).backward()  # fmt: skip
        plan = Plan(mesh)
        plan.annotate("<op:cross_entropy>", placements)
        model = parallelize(
            Calls(lambda x, y: F.cross_entropy(x, y, weight, **options)),
            plan,
            mode="static",
            guard_steps=0,
        )
        ours = theirs.detach().to_local().clone().requires_grad_()
        found = model(ours, targets.to_local())
        if reduction == "none":
            same = torch.equal(found, loss.to_local())
            found.square().sum().backward()
        else:
            # Terms of a sum over the ranks that have other rows.
            value = found.detach().clone()
            for axis, one in enumerate(rows):
                if one == S0:
                    torch.distributed.all_reduce(value, group=mesh.get_group(axis))
            whole = loss.full_tensor()
            same = torch.equal(value, whole)
            found.backward(2 * value)
        alike = torch.allclose(theirs.grad.full_tensor(), plain.grad, atol=1e-6)
        return same, alike, torch.equal(ours.grad, theirs.grad.to_local())

    for found in run_ranks(check, 4, timeout=240):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


@pytest.mark.ranks
def test_means_are_this_ranks_term_of_the_mean():
    losses = {
        "mse_loss": F.mse_loss,
        "l1_loss": F.l1_loss,
        "smooth_l1_loss": F.smooth_l1_loss,
        "huber_loss": F.huber_loss,
        "binary_cross_entropy": F.binary_cross_entropy,
        "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    }

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for name, function in losses.items():
            for reduction in ("mean", "sum"):
                torch.manual_seed(0)
                x, y = torch.rand(4, 6), torch.rand(4, 6)
                plain = x.clone().requires_grad_()
                expected = function(plain, y, reduction=reduction)
                expected.backward()
                part = slice(2 * mesh.get_rank(), 2 * mesh.get_rank() + 2)
                ours = x[part].clone().requires_grad_()

                def call(x, y, function=function, reduction=reduction):
                    return function(x, y, reduction=reduction)

                loss = _static(mesh, call, **{name: S0})(ours, y[part])
                loss.backward()
                value = loss.detach().clone()
                torch.distributed.all_reduce(value)
                found[name, reduction] = (
                    torch.allclose(value, expected), torch.allclose(ours.grad, plain.grad[part])
                )  # fmt: skip
        return found

    for found in run_ranks(check, 2):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


SPELLED = {
    "by place": (lambda x, y: F.huber_loss(x, y, "sum"), 1.0),
    "by place, among older options": (lambda x, y: F.mse_loss(x, y, None, None, "sum"), 1.0),
    "of torch": (lambda x, y: torch.binary_cross_entropy_with_logits(x, y), 0.5),
    "of torch, a sum": (
        lambda x, y: torch.binary_cross_entropy_with_logits(x, y, reduction=2),
        1.0,
    ),
    "as it was once": (lambda x, y: F.mse_loss(x, y, size_average=False), 1.0),
    "as it was once, a mean": (lambda x, y: F.mse_loss(x, y, True), 0.5),
}


LOSSES = ("huber_loss", "mse_loss", "binary_cross_entropy_with_logits")


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("name", SPELLED)
def test_a_reduction_may_be_spelled_otherwise(mesh, name):
    call, share = SPELLED[name]
    x, y = torch.rand(2, 6), torch.rand(2, 6)
    found = _static(mesh, call, **dict.fromkeys(LOSSES, S0))(x, y)
    assert torch.equal(found, call(x, y) * share)


SIZES = {
    "reshape": lambda x: x.reshape(2, 4, 6),
    "reshape of torch": lambda x: torch.reshape(x, (2, 4, 6)),
    "view": lambda x: x.view(2, -1, 6),
    "view of a tuple": lambda x: x.view((2, 4, 6)),
    "by name": lambda x: x.reshape(shape=(2, 4, 6)),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_in_the_code_are_the_wholes(mesh, name):
    operator = "view" if "view" in name else "reshape"
    result = _static(mesh, SIZES[name], **{operator: S2})(torch.arange(24.0).view(8, 3))
    assert result.shape == (2, 4, 3)
    assert result.flatten().equal(torch.arange(24.0))


def test_pieces_in_the_code_are_the_wholes(mesh):
    part = torch.arange(24.0).view(4, 6)
    for split in (
        lambda x: x.split(4, 1), lambda x: x.split(4, -1), lambda x: torch.split(x, [4, 8], 1)
    ):  # fmt: skip
        assert [one.shape[1] for one in _static(mesh, split, split=S1)(part)] in ([2] * 3, [2, 4])
    rows = _static(mesh, lambda x: x.split(2), split=S1)(part)  # which are not cut
    assert [one.shape for one in rows] == [(2, 6), (2, 6)]


def test_a_size_that_cannot_be_cut_is_refused(mesh):
    model = _static(mesh, lambda x: x.view(4, 3), view=S1)
    with pytest.raises(ValueError, match="view in static mode: a size of 3 cannot be cut into 2"):
        model(torch.ones(4, 3))


def test_calls_of_one_function_are_told_apart_by_their_number(mesh):
    """Counted anew in each forward; those that are not named go on as they are."""
    model = _static(
        mesh, lambda x: (x.reshape(2, 6), x.reshape(2, 6), x.reshape(12, 1)), reshape__1=S1
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shape '\\[2, 3\\]' is invalid"):
            model(torch.ones(12))
    model = _static(mesh, lambda x, y: (x.reshape(2, 6), y.reshape(2, 6)), reshape__1=S1)
    for _ in range(2):
        first, second = model(torch.ones(12), torch.ones(6))
        assert (first.shape, second.shape) == ((2, 6), (2, 3))
    model = _static(mesh, lambda x, y: (x.reshape(2, 6), y.reshape(2, 6)), reshape=S1, reshape__0=R)
    first, second = model(torch.ones(12), torch.ones(6))
    assert (first.shape, second.shape) == ((2, 6), (2, 3))


def test_what_children_call_is_not_caught(mesh):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(Calls(lambda x: x.reshape(2, 6)))
            self.leaf = Calls(lambda x: x.reshape(2, 6))

            self.unflatten = nn.Unflatten(0, (2, 6))  # one of torch's own

        def forward(self, x):
            mine = x[:6].reshape(2, 6)
            return self.inner(x), mine, self.leaf(x), self.inner(x), self.unflatten(x)

    plan = Plan(mesh).annotate("<op:reshape>", S1)
    model = parallelize(Block(), plan, mode="static", guard_steps=0)
    shapes = [one.shape for one in model(torch.ones(12))]
    assert shapes == [(2, 6), (2, 3), (2, 6), (2, 6), (2, 6)]
    assert torch.ones(12).reshape(2, 6).shape == (2, 6)  # nothing is caught afterwards


def test_nothing_is_caught_after_a_forward_that_raises(mesh):
    def fails(x):
        x.reshape(2, 6)
        raise KeyError("x")

    with pytest.raises(KeyError):
        _static(mesh, fails, reshape=S1)(torch.ones(6))
    assert torch.ones(12).reshape(2, 6).shape == (2, 6)


def test_fused_attention_with_dropout_is_refused_and_without_is_torchs(mesh):
    query = torch.randn(1, 2, 4, 4)

    def attend(p):
        return lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=p)

    with pytest.raises(NotImplementedError, match=r"dropout_p > 0.*attn_implementation='eager'"):
        _static(mesh, attend(0.1), dropout=S1)(query)
    assert _static(mesh, attend(0.0), dropout=S1)(query).equal(attend(0.0)(query))


def test_cross_entropy_with_label_smoothing_is_refused(mesh):
    model = _static(
        mesh, lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), cross_entropy=S0
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"label_smoothing.*use mode='eager'"):
        model(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))


@pytest.mark.ranks
def test_any_other_function_is_given_a_dtensor():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        whole = torch.arange(8.0).view(4, 2)
        part = distribute_tensor(whole, mesh, [S0]).to_local()
        total = _static(mesh, lambda x: torch.cumsum(x, 0), cumsum=S0)(part)
        assert not isinstance(total, DTensor)
        return total

    totals = run_ranks(check, 2)
    expected = torch.arange(8.0).view(4, 2).cumsum(0)
    assert all(one.shape in ((2, 2), (4, 2)) for one in totals)
    assert torch.equal(torch.cat(totals) if totals[0].shape == (2, 2) else totals[0], expected)


@pytest.mark.parametrize("name", ["view", "reshape"])
def test_a_size_that_is_left_open_stays_so_where_it_is_cut(mesh, name):
    model = _static(mesh, lambda x: getattr(x, name)(-1, 2), **{name: S0})
    assert model(torch.ones(4, 4)).shape == (8, 2)
