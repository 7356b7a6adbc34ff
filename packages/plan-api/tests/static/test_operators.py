"""Operators whose result depends on the global tensor equal those of DTensors."""

import functools
import itertools
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plan_api import Plan, parallelize, uninstall
from plan_api.ops.function_calls import with_wrapped
from plan_api.patches import install_patches
from testkit import TORCH_RELEASE, fake_mesh, run_ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


class Calls(nn.Module):
    """Its forward is a function of a test."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class OperatorCounts(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _static(mesh, function, **operators):
    """Returns a module that calls a function, with operators annotated along the first axis."""
    plan = Plan(mesh)
    for name, placement in operators.items():
        plan.annotate(f"<op:{name.replace('__', ':')}>", placement, mesh.mesh_dim_names[0])
    return parallelize(Calls(function), plan, mode="static", guard_steps=0)


@pytest.fixture
def mesh():
    with fake_mesh((2,), ("tp",)) as mesh:
        yield mesh


@pytest.mark.ranks
def test_dropout_draws_the_random_numbers_of_one_device():
    """On every shard, in place or not; a replicated tensor has the same mask on all ranks."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for placement in (R, S0, S1):
            for inplace in (False, True):
                torch.manual_seed(0)
                full = torch.randn(4, 6)
                dtensor = distribute_tensor(full, mesh, [placement], src_data_rank=None)
                local = dtensor.to_local().clone()
                model = _static(
                    mesh, lambda x, inplace=inplace: F.dropout(x, 0.5, True, inplace),
                    dropout=placement,
                )  # fmt: skip
                ends = []
                for call in (
                    lambda x=dtensor: F.dropout(x, 0.5, True).to_local(),
                    lambda x=local, model=model: model(x),
                    lambda x=full: F.dropout(x, 0.5, True),
                ):
                    torch.manual_seed(7)
                    result = call()
                    ends.append((result, torch.rand(2)))  # the next random numbers, too
                (eager, next_eager), (static, next_static), (single, next_single) = ends
                shard = distribute_tensor(single, mesh, [placement], src_data_rank=None).to_local()
                found[placement, inplace] = (
                    torch.equal(static, eager),
                    torch.equal(static, shard),
                    torch.equal(next_static, next_eager) and torch.equal(next_static, next_single),
                    (static is local) == inplace,
                    0 < int((static == 0).sum()) < static.numel(),
                )
        return found

    for found in run_ranks(check, 2, timeout=120):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


def test_dropout_that_is_off_returns_its_input(mesh):
    x = torch.ones(4, 4)
    assert _static(mesh, lambda x: F.dropout(x, 0.5, False), dropout=S0)(x) is x
    assert _static(mesh, lambda x: F.dropout(x, 0.0, True), dropout=S0)(x) is x


SHARDINGS = {
    "replicated": (R, R),
    "rows": (S0, R),
    "classes": (R, S1),
    "both": (S0, S1),
    "rows twice": (S0, S0),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "classes", [pytest.param(8, id="even", marks=pytest.mark.slow), pytest.param(7, id="uneven")]
)
def test_cross_entropy_has_the_bits_of_dtensor_and_the_values_of_one_device(classes):
    """With ignored rows on one rank only, class weights, label smoothing, and all reductions."""

    def check():
        install_patches(())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = {}
        for name, placements in SHARDINGS.items():
            for reduction in ("mean", "sum", "none"):
                for weighted, smoothing in itertools.product((False, True), (0.0, 0.2)):
                    case = (name, reduction, weighted, smoothing)
                    found[case] = _same(mesh, placements, reduction, weighted, smoothing)
        return found

    def _same(mesh, placements, reduction, weighted, smoothing):
        torch.manual_seed(0)
        logits, labels = torch.randn(8, classes), torch.randint(0, classes, (8,))
        labels[:3] = -100
        weight = torch.rand(classes) if weighted else None
        options = {"reduction": reduction, "label_smoothing": smoothing}
        plain = logits.clone().requires_grad_()
        expected = F.cross_entropy(plain, labels, weight, **options)
        expected.square().sum().backward()
        eager = distribute_tensor(logits, mesh, placements).requires_grad_()
        rows = [one if one == S0 else R for one in placements]
        targets = distribute_tensor(labels, mesh, rows)
        weights = None if weight is None else distribute_tensor(weight, mesh, [R, R])
        loss = F.cross_entropy(eager, targets, weights, **options)
        loss.redistribute(placements=rows if reduction == "none" else [R, R]).square().sum(
        ).backward()  # fmt: skip
        plan = Plan(mesh).redistribute("<in:0>", [R, R], placements)
        plan.annotate("<op:cross_entropy>", placements)
        model = parallelize(
            Calls(lambda x, y: F.cross_entropy(x, y, weight, **options)),
            plan,
            mode="static",
            guard_steps=0,
        )
        static = logits.clone().requires_grad_()
        found = model(static, targets.to_local())
        if reduction == "none":
            same = torch.equal(found, loss.to_local())
            found.square().sum().backward()
        else:
            # Partial over the ranks that have other rows.
            value = found.detach().clone()
            for axis, one in enumerate(rows):
                if one == S0:
                    torch.distributed.all_reduce(value, group=mesh.get_group(axis))
            same = torch.equal(value, loss.full_tensor())
            found.backward(2 * value)
        close = torch.allclose(eager.grad.full_tensor(), plain.grad, atol=1e-6)
        close = close and torch.allclose(loss.full_tensor(), expected, atol=1e-6)
        return same, close, torch.equal(static.grad, eager.grad.full_tensor())

    for found in run_ranks(check, 4, timeout=240):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


def test_cross_entropy_of_sharded_rows_runs_torchs_operators_and_counts_targets(mesh):
    model = _static(mesh, F.cross_entropy, cross_entropy=S0)
    logits, targets = torch.randn(8, 5, requires_grad=True), torch.randint(0, 5, (8,))
    model(logits, targets)
    with OperatorCounts() as seen:
        model(logits, targets).backward()
    of_loss = {name: number for name, number in seen.counts.items() if "nll_loss" in name}
    assert of_loss == {"aten.nll_loss_forward.default": 1, "aten.nll_loss_backward.default": 1}
    assert seen.counts["_c10d_functional.all_reduce.default"] == 1


@pytest.mark.ranks
def test_a_mean_is_partial():
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
                local = x[part].clone().requires_grad_()

                def call(x, y, function=function, reduction=reduction):
                    return function(x, y, reduction=reduction)

                loss = _static(mesh, call, **{name: S0})(local, y[part])
                loss.backward()
                value = loss.detach().clone()
                torch.distributed.all_reduce(value)
                found[name, reduction] = (
                    torch.allclose(value, expected), torch.allclose(local.grad, plain.grad[part])
                )  # fmt: skip
        return found

    for found in run_ranks(check, 2):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


@pytest.mark.ranks
def test_losses_with_weights_divide_by_the_weights_of_all_ranks():
    """Elements' weights, and those of classes; the result is Partial, with the bits of Eager's."""

    def _terms(loss, x):
        loss.backward()
        local = loss.detach()
        if isinstance(local, DTensor):
            assert local.placements == (Partial(),)
            local, x = local.to_local(), x.grad.to_local()
            return local, x
        return local, x.grad

    def check():
        install_patches(())  # before functions are looked up, as torch's l1_loss drops weights
        losses = {
            "mse_loss": F.mse_loss,
            "l1_loss": F.l1_loss,
            "huber_loss": functools.partial(F.huber_loss, reduction="sum"),
            "binary_cross_entropy": F.binary_cross_entropy,
        }
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        x, y, weights = torch.rand(4, 6), torch.rand(4, 6), torch.rand(4, 6)
        classes = torch.randint(0, 6, (4,))
        cases = {name: (loss, (y,), weights) for name, loss in losses.items()}
        cases["nll_loss"] = (F.nll_loss, (classes,), torch.rand(6))
        found = {}
        for name, (function, target, weight) in cases.items():
            of_rows = S0 if weight.ndim == 2 else R
            plain = x.clone().requires_grad_()
            expected = function(plain, *target, weight=weight)
            expected.backward()
            eager, y0, w0 = (
                distribute_tensor(one, mesh, [placement])
                for one, placement in ((x, S0), (*target, S0), (weight, of_rows))
            )
            local = eager.to_local().clone().requires_grad_()
            model = _static(
                mesh, lambda *args, function=function: function(*args[:2], weight=args[2]),
                **{name: S0},
            )  # fmt: skip
            eager.requires_grad_()
            of_eager = _terms(function(eager, y0, weight=w0), eager)
            of_static = _terms(model(local, y0.to_local(), w0.to_local()), local)
            total = of_static[0].clone()
            torch.distributed.all_reduce(total)
            part = plain.grad.chunk(2)[mesh.get_rank()]
            found[name] = (
                all(map(torch.equal, of_eager, of_static)),
                torch.allclose(total, expected.detach()),
                torch.allclose(of_static[1], part, atol=1e-7),
            )
        return found

    for found in run_ranks(check, 2):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


def test_weights_that_require_a_gradient_are_refused(mesh):
    weight = torch.ones(4, 4, requires_grad=True)
    model = _static(mesh, lambda x, y: F.mse_loss(x, y, weight=weight), mse_loss=S0)
    with pytest.raises(NotImplementedError, match=r"a weight without a gradient.*mode='eager'"):
        model(torch.ones(4, 4), torch.ones(4, 4))


REDUCTIONS = {
    "positional": (lambda x, y: F.huber_loss(x, y, "sum"), 1.0),
    "positional, among deprecated options": (lambda x, y: F.mse_loss(x, y, None, None, "sum"), 1.0),
    "in the torch namespace": (lambda x, y: torch.binary_cross_entropy_with_logits(x, y), 0.5),
    "in the torch namespace, sum": (
        lambda x, y: torch.binary_cross_entropy_with_logits(x, y, reduction=2),
        1.0,
    ),
    "deprecated": (lambda x, y: F.mse_loss(x, y, size_average=False), 1.0),
    "deprecated, mean": (lambda x, y: F.mse_loss(x, y, True), 0.5),
}


LOSSES = ("huber_loss", "mse_loss", "binary_cross_entropy_with_logits")


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_form_of_the_reduction_argument_is_recognised(mesh, name):
    call, share = REDUCTIONS[name]
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
def test_global_sizes_in_the_code_are_divided(mesh, name):
    operator = "view" if "view" in name else "reshape"
    result = _static(mesh, SIZES[name], **{operator: S2})(torch.arange(24.0).view(8, 3))
    assert result.shape == (2, 4, 3)
    assert result.flatten().equal(torch.arange(24.0))


def test_global_split_sizes_in_the_code_are_divided(mesh):
    part = torch.arange(24.0).view(4, 6)
    for split in (
        lambda x: x.split(4, 1), lambda x: x.split(4, -1), lambda x: torch.split(x, [4, 8], 1)
    ):  # fmt: skip
        assert [one.shape[1] for one in _static(mesh, split, split=S1)(part)] in ([2] * 3, [2, 4])
    rows = _static(mesh, lambda x: x.split(2), split=S1)(part)  # rows are not sharded
    assert [one.shape for one in rows] == [(2, 6), (2, 6)]


def test_uneven_global_sizes_become_those_of_the_rank(mesh):
    """Of 7 columns this rank, the first of two, has 4."""
    part = torch.ones(2, 4)
    assert _static(mesh, lambda x: x.view(2, 7), view=S1)(part).shape == (2, 4)
    parts = _static(mesh, lambda x: x.split([3, 3], dim=1), split=S1)(part)
    assert [one.shape for one in parts] == [(2, 2), (2, 2)]
    wrong = _static(mesh, lambda x: x.view(4, 3), view=S1)
    with pytest.raises(RuntimeError, match=r"invalid for input of size 12\n.*annotate <op>:view"):
        wrong(torch.ones(4, 3))


def test_calls_of_one_function_are_distinguished_by_number(mesh):
    """Counted from 0 in each forward; calls without an entry are unchanged."""
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


def test_calls_of_children_are_not_intercepted(mesh):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(Calls(lambda x: x.reshape(2, 6)))
            self.child = Calls(lambda x: x.reshape(2, 6))

            self.unflatten = nn.Unflatten(0, (2, 6))  # a module of torch

        def forward(self, x):
            own = x[:6].reshape(2, 6)
            return self.inner(x), own, self.child(x), self.inner(x), self.unflatten(x)

    plan = Plan(mesh).annotate("<op:reshape>", S1)
    model = parallelize(Block(), plan, mode="static", guard_steps=0)
    shapes = [one.shape for one in model(torch.ones(12))]
    assert shapes == [(2, 6), (2, 3), (2, 6), (2, 6), (2, 6)]
    assert torch.ones(12).reshape(2, 6).shape == (2, 6)  # nothing is intercepted afterwards


def test_nothing_is_intercepted_after_a_forward_that_raises(mesh):
    def fails(x):
        x.reshape(2, 6)
        raise KeyError("x")

    with pytest.raises(KeyError):
        _static(mesh, fails, reshape=S1)(torch.ones(6))
    assert torch.ones(12).reshape(2, 6).shape == (2, 6)


def _lookups(mesh, look_up):
    """Returns a module that looks tokens up in this rank's rows, and the modes that it ran in."""
    modes = []

    def forward(ids, rows):
        modes.append(torch._C._len_torch_function_stack())
        return look_up(ids, rows)

    return _static(mesh, forward, embedding=S0), modes


def _finds_rows_of_one_rank(model):
    ids, rows = torch.tensor([0, 3]), torch.ones(2, 3)  # two of four rows
    return model(ids, rows).sum(1).tolist() == [3.0, 0.0]


@pytest.mark.parametrize(
    ("padding", "gradients"), [(None, [1, 1]), (0, [0, 1]), (1, [1, 0]), (2, [1, 1]), (-4, [0, 1])]
)
def test_the_padding_row_of_a_sharded_table_is_one_ranks(mesh, padding, gradients):
    """Rows have global numbers; of four this rank has the first two."""
    model, _ = _lookups(mesh, lambda ids, rows: F.embedding(ids, rows, padding))
    rows = torch.ones(2, 3, requires_grad=True)
    model(torch.tensor([0, 1, 2, 3]), rows).sum().backward()
    assert rows.grad[:, 0].tolist() == gradients


def test_functions_are_intercepted_without_a_mode_once_a_call_has_shown_their_names(mesh):
    """One that the module calls by another name needs the mode, in each call."""
    native = [*with_wrapped(F.embedding)][-1]
    model, modes = _lookups(mesh, lambda ids, rows: F.embedding(ids, rows))
    assert all(_finds_rows_of_one_rank(model) for _ in range(3))
    assert modes == [1, 0, 0]
    with pytest.raises(IndexError):  # outside of the module
        F.embedding(torch.tensor([3]), torch.ones(2, 3))
    model, modes = _lookups(mesh, native)
    assert all(_finds_rows_of_one_rank(model) for _ in range(3))
    assert modes == [1, 1, 1]


def test_functions_that_others_have_replaced_are_intercepted_by_a_mode(mesh, monkeypatch):
    model, modes = _lookups(mesh, lambda ids, rows: F.embedding(ids, rows))
    assert all(_finds_rows_of_one_rank(model) for _ in range(2))
    redirected, native = with_wrapped(F.embedding)
    with monkeypatch.context() as others:
        others.setattr(F, "embedding", lambda *args, **options: redirected(*args, **options))
        assert _finds_rows_of_one_rank(model)
    assert modes == [1, 0, 1]
    with monkeypatch.context() as others:
        others.setattr(F, "embedding", functools.wraps(redirected)(partial(redirected)))
        model, _ = _lookups(mesh, lambda ids, rows: F.embedding(ids, rows))
        assert _finds_rows_of_one_rank(model)
    uninstall()
    assert F.embedding is native


def test_modes_of_others_see_the_functions_of_torch(mesh):
    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    called = []
    _lookups(mesh, lambda ids, rows: F.embedding(ids, rows))
    redirected, native = with_wrapped(F.embedding)
    with Calls():
        F.embedding(torch.tensor([1]), torch.ones(2, 3))
    assert native in called
    assert redirected not in called


def test_a_call_that_raises_or_leaves_for_a_child_intercepts_nothing_there(mesh):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = Calls(lambda: F.embedding(torch.tensor([1]), torch.ones(2, 3)))

        def forward(self, ids, rows):
            self.child()
            found = F.embedding(ids, rows)
            if fails:
                raise KeyError("x")
            return found

    plan = Plan(mesh).annotate("<op:embedding>", S0)
    model, fails = parallelize(Block(), plan, mode="static", guard_steps=0), False
    assert all(_finds_rows_of_one_rank(model) for _ in range(2))
    fails = True
    with pytest.raises(KeyError):
        _finds_rows_of_one_rank(model)
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([3]), torch.ones(2, 3))


@pytest.mark.ranks
@pytest.mark.parametrize("operator", ["dropout", "scaled_dot_product_attention"])
def test_fused_attention_with_dropout_draws_the_mask_of_one_device(operator):
    """Sharded by batch, heads or both, causal or with a mask: output, gradients, generator."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = {}
        for placements in [(R, R), (S0, R), (R, S1), (S0, S1), (S1, S0), (S0, S0), (S1, S1)]:
            for causal in (False, True):
                torch.manual_seed(0)
                whole = [torch.randn(4, 4, 6, 8) for _ in range(3)]
                mask = None if causal else torch.randn(6, 6)

                def attend(q, k, v, m=mask, causal=causal):
                    return F.scaled_dot_product_attention(q, k, v, m, 0.4, causal)

                plan = Plan(mesh).annotate(f"<op:{operator}>", placements)
                model = parallelize(Calls(attend), plan, mode="static", guard_steps=0)
                placed = [distribute_tensor(x, mesh, placements) for x in whole]
                m = mask if mask is None else distribute_tensor(mask, mesh, [R, R])
                single = _attention_step(attend, whole)
                eager = _attention_step(lambda q, k, v, m=m: attend(q, k, v, m), placed)
                static = _attention_step(model, [x.to_local() for x in placed])
                found[placements, causal] = [
                    torch.equal(one.full_tensor(), expected) and torch.equal(one.to_local(), other)
                    for one, other, expected in zip(eager[:-1], static, single, strict=False)
                ] + [torch.equal(single[-1], state) for state in (eager[-1], static[-1])]
        return found

    def _attention_step(function, tensors):
        torch.manual_seed(7)
        leaves = [one.detach().clone().requires_grad_() for one in tensors]
        result = function(*leaves)
        result.square().sum().backward()
        return [result.detach(), *(one.grad for one in leaves), torch.get_rng_state()]

    for found in run_ranks(check, 4, timeout=240):
        assert len(found) == 14
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


@pytest.mark.ranks
def test_uneven_and_empty_parts_of_attention_draw_the_mask_of_one_device():
    """A batch of three on two and on four ranks, the last of which has nothing."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        whole = [torch.randn(3, 4, 6, 8) for _ in range(3)]
        attend = functools.partial(F.scaled_dot_product_attention, dropout_p=0.4)
        torch.manual_seed(7)
        single, state = attend(*whole), torch.get_rng_state()
        found = {}
        for placements in [(S0, R), (S0, S1), (S1, S0), (S0, S0)]:
            plan = Plan(mesh).annotate("<op:scaled_dot_product_attention>", placements)
            for argument in range(3):
                plan.redistribute(f"<in:{argument}>", [R, R], placements)
            model = parallelize(Calls(attend), plan, mode="static", guard_steps=0)
            torch.manual_seed(7)
            result, after = model(*whole), torch.get_rng_state()
            expected = distribute_tensor(single, mesh, placements).to_local()
            found[placements] = torch.equal(result, expected), torch.equal(after, state)
        return found

    for found in run_ranks(check, 4):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


def test_attention_without_dropout_is_native(mesh):
    query = torch.randn(1, 2, 4, 4)
    attend = functools.partial(F.scaled_dot_product_attention, dropout_p=0.0)
    model = _static(mesh, lambda x: attend(x, x, x), dropout=S1)
    assert model(query).equal(attend(query, query, query))


@pytest.mark.parametrize("placement", [S2, Shard(3)], ids=["queries", "keys"])
def test_dropout_of_attention_whose_sequence_is_sharded_is_refused(mesh, placement):
    model = _static(
        mesh, lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), dropout=placement
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"expected batch or heads sharded.*got \(Shard\(dim="):
        model(torch.randn(1, 2, 4, 4))


def test_attention_with_dropout_needs_dist_rng(mesh):
    uninstall()
    plan = Plan(mesh).annotate("<op:dropout>", S1)
    attend = Calls(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1))
    model = parallelize(attend, plan, mode="static", guard_steps=0, use=())
    with pytest.raises(NotImplementedError, match=r"or dist-rng .*attn_implementation='eager'"):
        model(torch.randn(1, 2, 4, 4))
    uninstall()


def test_cross_entropy_of_probabilities_is_refused(mesh):
    model = _static(mesh, F.cross_entropy, cross_entropy=S0)
    with pytest.raises(NotImplementedError, match=r"targets that are classes.*use mode='eager'"):
        model(torch.ones(4, 4), torch.ones(4, 4))


@pytest.mark.ranks
def test_any_other_function_runs_on_a_dtensor():
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


IN_PLACE = {
    "a random method": ("normal_", lambda x: x.normal_(2, 3)),
    "a function of torch": ("dropout_", lambda x: torch.dropout_(x, 0.5, True)),
    "inplace=True, by position": ("alpha_dropout", lambda x: F.alpha_dropout(x, 0.5, True, True)),
    "out=": ("cumsum", lambda x: torch.cumsum(x, 1, out=x)),
    "out= of several results": ("sort", lambda x: torch.sort(x, 1, out=_pair_with(x))[0]),
}
if TORCH_RELEASE >= (2, 12):  # 2.11's DTensor has no flip, which the backward of cumsum calls
    IN_PLACE["a method"] = ("cumsum_", lambda x: x.cumsum_(1))


def _pair_with(values):
    return values, torch.empty(0, dtype=torch.long)


@pytest.mark.ranks
def test_functions_change_tensors_in_place_as_on_one_device():
    """The tensor itself, with the numbers of one device; gradients pass through."""

    def run(function, leaf, out):
        torch.manual_seed(5)
        changed = (leaf.detach() if out else leaf * 1).clone()
        result = function(changed)
        assert result is changed
        if not out:
            result.square().sum().backward()
        return result.detach(), torch.zeros(()) if leaf.grad is None else leaf.grad

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for name, (operator, function) in IN_PLACE.items():
            torch.manual_seed(0)
            whole = torch.rand(4, 6)
            part = whole.chunk(2)[mesh.get_rank()].clone()
            model = _static(mesh, function, **{operator: S0})
            expected = run(function, whole.requires_grad_(), "out" in name)
            actual = run(model, part.requires_grad_(), "out" in name)
            found[name] = [
                torch.equal(one, other.chunk(2)[mesh.get_rank()] if other.ndim else other)
                for one, other in zip(actual, expected, strict=True)
            ]
        return found

    for found in run_ranks(check, 2):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


@pytest.mark.parametrize("name", ["view", "reshape"])
def test_a_size_of_minus_one_is_not_divided(mesh, name):
    model = _static(mesh, lambda x: getattr(x, name)(-1, 2), **{name: S0})
    assert model(torch.ones(4, 4)).shape == (8, 2)
