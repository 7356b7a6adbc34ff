"""Communication beside products has the bits of the unsplit plan, forward and backward."""

import gc
import logging
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.flop_counter import FlopCounterMode

from plan_api import Plan, parallelize, zoo
from plan_api.ops.overlap import install, products, transfer
from plan_api.ops.overlap.fused import FusedOperators
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
LAYER = r"model\.layers\.\d+"


def llama(**changes):
    return models.llama(attn_implementation="sdpa", **HEADS, **changes)


def with_fully_shard(mesh, sp):
    return zoo.llama(mesh, dp="dp", sp=sp).fully_shard(LAYER, "dp").fully_shard("", "dp")


def with_recompute(mesh, sp):
    return zoo.llama(mesh, dp="dp", sp=sp, loss_parallel=True).recompute(LAYER, "full")


def with_selective_recompute(mesh, sp):
    return zoo.llama(mesh, dp="dp", sp=sp).recompute(LAYER, "selective-op")


CASES = {
    "llama": (llama, partial(zoo.llama, dp="dp")),
    "mixtral": (partial(models.mixtral, **HEADS), partial(zoo.mixtral, dp="dp", ep="tp")),
    "fully_shard": (llama, with_fully_shard),
    "recompute": (llama, with_recompute),
    "selective recompute": (llama, with_selective_recompute),
}


class Events:
    """Records products, and the begin and end of communication that is waited for later."""

    def __init__(self):
        self.names = []

    def __enter__(self):
        self._before = (transfer.Transfer.__init__, transfer.Transfer.wait, products._product)
        init, wait, product = self._before

        def record(name, function):
            def recorded(*args, **kwargs):
                self.names.append(name)
                return function(*args, **kwargs)

            return recorded

        transfer.Transfer.__init__ = record("begin", init)
        transfer.Transfer.wait = record("wait", wait)
        products._product = record("product", product)
        return self

    def __exit__(self, *_):
        transfer.Transfer.__init__, transfer.Transfer.wait, products._product = self._before


def trained(make, plan, mode, overlap, steps):
    guard = {"guard_steps": 0} if mode == "static" and overlap is None else {}
    model = parallelize(make(), plan, mode=mode, overlap=overlap, **guard)
    with Events() as events:
        losses = models.train(model, steps=steps)
    models.token_loss(model).backward()
    grads = {
        name: param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    return losses, grads, events.names.count("begin")


def compared(shape, cases):
    mesh, found = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), {}
    for name, mode, sp, steps in cases:
        make, plan = CASES[name]
        losses, grads, _ = trained(make, plan(mesh, sp=sp), mode, None, steps)
        actual, actual_grads, begun = trained(make, plan(mesh, sp=sp), mode, "tp", steps)
        different = [one for one, grad in grads.items() if not torch.equal(grad, actual_grads[one])]
        found[name, mode, sp] = losses, actual, different, begun
    return found


FAST = [
    ("llama", "static", True, 20),
    ("llama", "static", False, 2),
    ("llama", "eager", True, 2),
    ("mixtral", "static", True, 2),
    ("recompute", "static", True, 2),
]
ALL = [
    (name, mode, sp, 20 if name in ("llama", "mixtral") and mode == "static" else 3)
    for name in CASES
    for mode in ("static", "eager")
    for sp in (True, False)
]


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        pytest.param((1, 2), FAST, id="2 ranks"),
        pytest.param((1, 4), ALL, id="4 ranks", marks=pytest.mark.slow),
        pytest.param((2, 2), ALL, id="2 x 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_training_has_the_bits_of_the_unsplit_plan(shape, cases):
    for found in run_ranks(compared, shape[0] * shape[1], shape, cases, timeout=580):
        for (name, mode, sp), (losses, actual, different, begun) in found.items():
            case = f"{name}, {mode}, {sp=}"
            assert begun > 0, case
            expected = models.train(CASES[name][0](), steps=len(losses))
            assert actual == pytest.approx(expected, abs=2e-4), case
            if rows_of_products_are_independent():
                assert losses == actual, case
                assert different == [], case
            else:  # the kernel for few rows sums features in another order
                assert losses == pytest.approx(actual, abs=2e-4), case


def rows_of_products_are_independent():
    """Whether this CPU gives a row of a product the same bits, however many rows there are."""
    torch.manual_seed(0)
    rows, weight = torch.randn(32, 32), torch.randn(48, 32)
    whole = rows @ weight.t()
    return all(
        torch.equal(torch.cat([part @ weight.t() for part in rows.chunk(parts)]), whole)
        for parts in (2, 4, 8)
    )


class Gated(nn.Module):
    """An MLP that may use its input, its product and its gate otherwise than Linears do."""

    def __init__(self, kind, bias):
        super().__init__()
        self.kind = kind
        self.up, self.gate = nn.Linear(16, 24, bias=bias), nn.Linear(16, 24, bias=bias)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x):
        gate = self.gate(x + 0.0 if self.kind == "another input" else x)
        hidden = self.up(x) * torch.sigmoid(gate)
        if self.kind == "input used otherwise":
            hidden = hidden * x.square().mean(-1, keepdim=True)
        out = self.down(hidden)
        if self.kind == "product used otherwise":
            self.seen = out.sum()
        return out * 2.0 if self.kind == "another output" else out


def gated_net(kind, bias=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(16), Gated(kind, bias), nn.LayerNorm(16))
    return net.double() if kind == "float64" else net


def gated_plan(mesh):
    plan = Plan(mesh).shard(r"1\.(up|gate)\..*", S0, "tp").shard(r"1\.down\.weight", S1, "tp")
    plan.redistribute("0.<in>", R, S1, "tp").annotate(r"(0|2)\..*\.grad", P, "tp")
    plan.redistribute("1.<in>", S1, R, "tp", grad_src=P, grad_dst=S1)
    plan.redistribute("1.<out>", P, S1, "tp")
    return plan.redistribute("2.<out>", S1, R, "tp", grad_src=R, grad_dst=S1)


def step_of(net, autocast=False, tokens=8):
    """Returns the output and all gradients of a step, and the numbers of events of three steps."""
    counts = []
    for _ in range(3):
        net.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(4, tokens, 16, dtype=next(net.parameters()).dtype)
        with Events() as events:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = net(x)
            loss = (out.full_tensor() if isinstance(out, DTensor) else out).float().square().sum()
            seen = getattr(net[1], "seen", 0.0)  # in static mode, of this rank
            (loss + (seen.full_tensor() if isinstance(seen, DTensor) else seen)).backward()
        counts.append((events.names.count("begin"), events.names.count("product")))
    grads = [one.grad for one in net.parameters()]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in (out, *grads)], counts


KINDS = {
    # By kind: communication that begins, and products, in the first step and in later ones. On two
    # ranks each of three products has two parts, and each of four transfers is one message.
    "plain": ((4, 6), (4, 6)),
    "float64": ((4, 6), (4, 6)),
    "input used otherwise": ((4, 6), (4, 6)),
    "product used otherwise": ((4, 6), (4, 6)),
    "another input": ((4, 6), (4, 4)),
    "another output": ((3, 6), (2, 5)),
}


def test_modules_that_do_something_else_get_what_they_get_unsplit():
    def check():
        mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {}
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("plan_api").addHandler(handler)
        for kind in KINDS:
            for mode in ("static", "eager"):
                expected, none = step_of(
                    parallelize(gated_net(kind, True), gated_plan(mesh), mode=mode)
                )
                options = {"guard_steps": 0} if mode == "static" else {}
                records.clear()
                actual, counts = step_of(
                    parallelize(
                        gated_net(kind, True), gated_plan(mesh), mode=mode, overlap="tp", **options
                    )
                )
                texts = [one for one in records if "overlap" in one]
                found[kind, mode] = (expected, actual, none, counts, texts)
        return found

    for found in run_ranks(check, 2, timeout=180):
        for (kind, mode), (expected, actual, none, counts, texts) in found.items():
            case = f"{kind}, {mode}"
            first, later = KINDS[kind]
            assert none == [(0, 0)] * 3, case
            assert counts == [first, later, later], case
            assert len(texts) == (first != later), case
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=case)
            on_one_device, _ = step_of(gated_net(kind, True))
            torch.testing.assert_close(actual, on_one_device, rtol=1e-4, atol=1e-4, msg=case)


def test_a_product_is_computed_while_others_are_in_flight():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        net = parallelize(
            gated_net("plain"), gated_plan(mesh), mode="static", guard_steps=0, overlap="tp"
        )
        with Events() as events:
            out = net(torch.randn(4, 8, 16))
            forward = list(events.names)
            events.names.clear()
            out.sum().backward()
            return forward, events.names

    for forward, backward in run_ranks(check, 2):
        gather = ["begin", "product", "product", "wait", "product", "product"]
        assert forward == [*gather, "product", "begin", "product", "wait"]
        # The gradients of products are no `_product`.
        assert backward == ["begin", "wait", "begin", "wait"]


class FusedFallbacks:
    """Gives sites torch's fallbacks of its fused operators, which run on any device, and counts."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        self._before = install.fused_operators
        install.fused_operators = self._operators
        return self

    def __exit__(self, *_):
        install.fused_operators = self._before

    def _operators(self, group, device_type):
        from torch.distributed import _symmetric_memory

        def counted(name, function):
            def call(*args, **kwargs):
                self.calls.append(name)
                return function(*args, **kwargs)

            return call

        return FusedOperators(
            counted("gather", _symmetric_memory._fused_all_gather_matmul_fallback),
            counted("scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback),
            group.group_name,
        )


# Calls of the operators in a step; the others send and receive, or communicate unsplit: where the
# input has another gradient, too, or a dtype is not that of the products.
FUSED_CALLS = {
    "plain": {"gather": 2, "scatter": 2},
    "input used otherwise": {"gather": 2, "scatter": 1},
    "product used otherwise": {"gather": 2, "scatter": 2},
    "another output": {"gather": 1, "scatter": 1},
}


def test_fused_operators_of_torch_compute_what_sends_and_receives_do():
    def check():
        mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {}
        for kind in FUSED_CALLS:
            for mode in ("static", "eager")[: 2 if kind == "plain" else 1]:
                options = {"mode": mode, "overlap": "tp"}
                options |= {"guard_steps": 0} if mode == "static" else {}
                sent, _ = step_of(parallelize(gated_net(kind, True), gated_plan(mesh), **options))
                with FusedFallbacks() as fused:
                    net = parallelize(gated_net(kind, True), gated_plan(mesh), **options)
                step_of(net)
                fused.calls.clear()
                actual, _ = step_of(net)
                found[kind, mode] = sent, actual, Counter(fused.calls)
        return found

    for found in run_ranks(check, 2, timeout=180):
        for (kind, mode), (sent, actual, calls) in found.items():
            case = f"{kind}, {mode}"
            torch.testing.assert_close(actual, sent, rtol=1e-5, atol=1e-5, msg=case)
            expected = FUSED_CALLS[kind]
            assert calls == {name: 3 * count for name, count in expected.items()}, case
            on_one_device, _ = step_of(gated_net(kind, True))
            torch.testing.assert_close(actual, on_one_device, rtol=1e-4, atol=1e-4, msg=case)


def trained_with_fused_operators():
    mesh, found = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), {}
    for name, (make, plan) in CASES.items():
        for mode in ("static", "eager"):
            sent, _, _ = trained(make, plan(mesh, sp=True), mode, "tp", 3)
            with FusedFallbacks() as fused:
                losses, _, _ = trained(make, plan(mesh, sp=True), mode, "tp", 3)
            found[name, mode] = sent, losses, Counter(fused.calls)
    return found


@pytest.mark.slow
def test_training_with_fused_operators_has_the_losses_of_sends_and_receives():
    for found in run_ranks(trained_with_fused_operators, 2, timeout=580):
        for case, (sent, losses, calls) in found.items():
            assert losses == pytest.approx(sent, abs=1e-5), case
            assert min(calls["gather"], calls["scatter"]) > 0, case


class Residual(nn.Module):
    """An MLP behind a norm, whose result is added to its input."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(16), Gated("plain", False)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def residual_net():
    torch.manual_seed(0)
    return nn.Sequential(Residual(), Residual())


def residual_plan(mesh):
    plan = Plan(mesh).shard(r"\d\.mlp\.(up|gate)\.weight", S0, "tp")
    plan.shard(r"\d\.mlp\.down\.weight", S1, "tp").shard("<in:input>", R, "tp")
    plan.redistribute(r"\d\.mlp.<in>", R, R, "tp", grad_src=P, grad_dst=R)
    return plan.redistribute(r"\d\.mlp.<out>", P, R, "tp")


def test_the_last_rows_of_a_sum_arrive_beside_the_next_products():
    """Without sequence parallelism, and through the residual sum and the norm; not under a mode."""

    def check():
        mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {}
        for mode in ("static", "eager"):
            options = {"mode": mode} | ({"guard_steps": 0} if mode == "static" else {})
            unsplit = parallelize(residual_net(), residual_plan(mesh), **options)
            split = parallelize(residual_net(), residual_plan(mesh), overlap="tp", **options)
            torch.manual_seed(1)
            x, results = torch.randn(4, 8, 16), []
            for model in (residual_net(), unsplit, split):
                with Events() as events:
                    out = model(x)
                found[mode] = list(events.names)
                out.square().sum().backward()
                tensors = [out.detach(), *(one.grad for one in model.parameters())]
                results.append(
                    [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
                )
            torch.testing.assert_close(results[2], results[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(results[2], results[1], rtol=1e-6, atol=1e-6)
            assert type(out) is (torch.Tensor if mode == "static" else DTensor)
            assert type(out) is torch.Tensor or type(out.to_local()) is torch.Tensor
            for context in (FlopCounterMode(display=False), torch.inference_mode()):
                with context, Events() as events:
                    out = split(x)
                assert events.names.count("wait") == 8
                out = out.full_tensor() if isinstance(out, DTensor) else out
                torch.testing.assert_close(out, results[1][0], rtol=1e-6, atol=1e-6)
        return found

    down, in_blocks = ["product", "begin"] * 2, ["wait", "product"] * 2
    expected = ["product"] * 2 + down + [*in_blocks, "product"] + down + ["wait"] * 2
    for found in run_ranks(check, 2):
        assert found == {"static": expected, "eager": expected}


def test_autocast_an_uneven_sequence_and_no_gradients():
    """An uneven sequence is sent unsplit, in all modes alike."""

    def check():
        mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
        for mode in ("static", "eager"):
            options = {"guard_steps": 0} if mode == "static" else {}
            nets = [
                parallelize(gated_net("plain"), gated_plan(mesh), mode=mode, overlap=one, **options)
                for one in (None, "tp")
            ]
            found.append((mode, "autocast", *(step_of(net, autocast=True) for net in nets)))
            found.append((mode, "uneven", *(step_of(net, tokens=7) for net in nets)))
            x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
            with torch.no_grad(), Events() as events:
                outs = [net(x) for net in nets]
            outs = [[one.full_tensor() if mode == "eager" else one] for one in outs]
            counts = [(events.names.count("begin"), events.names.count("product"))] * 3
            found.append((mode, "no_grad", (outs[0], []), (outs[1], counts)))
        return found

    counts = {"autocast": (4, 6), "uneven": (0, 0), "no_grad": (2, 6)}
    for found in run_ranks(check, 2, timeout=180):
        assert len(found) == 6
        for mode, case, (expected, _), (actual, count) in found:
            assert count == [counts[case]] * 3, (mode, case)
            for one, other in zip(expected, actual, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=f"{mode}, {case}")


def test_nothing_of_a_model_is_alive_once_it_is_deleted():
    """Hooks, replaced forwards and what `installed` knows keep no module and no parameter."""

    def check():
        mesh, found = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), {}
        for mode in ("static", "eager"):
            model = parallelize(llama(), with_fully_shard(mesh, True), mode=mode, overlap="tp")
            models.train(model, steps=1)
            seen = [(name, weakref.ref(one)) for name, one in model.named_modules()]
            seen += [(name, weakref.ref(one)) for name, one in model.named_parameters()]
            gc.collect()  # the optimizer
            del model
            gc.collect()
            found[mode] = len(seen), [name for name, reference in seen if reference() is not None]
        return found

    for found in run_ranks(check, 2):
        for mode, (count, alive) in found.items():
            assert count > 40, mode
            assert alive == [], mode
