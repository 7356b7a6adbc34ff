"""Tokens sent to their experts' ranks: as on one device, whoever has what, and what is sent."""

import json
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from plan_api import Plan, explain, installed, lower, parallelize, track, zoo
from testkit import TORCH_RELEASE, CommLog, RankError, models, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
FEATURES = 6


class Experts(nn.Module):
    """A matrix for each expert, of those that are hit alone, as transformers' experts."""

    def __init__(self, number=4, features=FEATURES):
        super().__init__()
        torch.manual_seed(3)
        self.number, self.seen = number, []
        self.table = nn.Parameter(torch.randn(number, features, features))

    def forward(self, x, chosen, weights):
        self.seen.append((chosen.tolist(), self.number, len(self.table)))
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            token, place = torch.where(chosen == expert)
            made = torch.tanh(x[token] @ self.table[expert]) * weights[token, place, None]
            out = out.index_add(0, token, made.to(out.dtype))
        return out


def plan_of(mesh, axes=("dp",), **options):
    cut = [S0] * len(axes)
    plan = Plan(mesh).shard("table", cut, axes).local("", cut, axes)
    for given in ("x", "chosen", "weights"):
        plan.shard(f"<in:{given}>", cut, axes)
    options = {"weights": "weights", "count": "number"} | options
    return plan.dispatch("<in:chosen>", cut, axes, **options)


# Of four experts on two ranks; a row for each token.
CHOICES = {
    "both ranks": [[0, 3], [1, 2], [3, 2], [0, 1]],
    "nothing for the second rank": [[0, 1], [1, 0], [0, 1], [1, 0]],
    "nothing for the first rank": [[2, 3], [3, 2], [2, 3], [2, 3]],
    "one expert has all": [[3], [3], [3], [3]],
    "three choices": [[0, 1, 2], [3, 1, 0], [2, 0, 3], [1, 2, 3]],
    "an odd number of tokens": [[0, 3], [1, 2], [3, 2]],
    "a rank without tokens": [[1, 3]],
}


def _inputs(choices):
    torch.manual_seed(5)
    chosen = torch.tensor(choices)
    return torch.randn(len(chosen), FEATURES), chosen, torch.rand(chosen.shape)


def _results(model, given, mesh=None, axes=1):
    """What comes out, and the gradients of tokens, weights and parameters, whole."""
    x, chosen, weights = given
    if mesh is not None:
        cut = [S0] * axes
        x, chosen, weights = (distribute_tensor(one, mesh, cut) for one in given)
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = model(x, chosen, weights)
    out.square().sum().backward()
    found = [out.detach(), x.grad, weights.grad, *(one.grad for one in model.parameters())]
    return [one.full_tensor() if mesh is not None else one for one in found]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "chunks"),
    [(4, 1), (3, 1), (3, 2), pytest.param(4, 5, marks=pytest.mark.slow)],
    ids=["2 and 2 experts", "2 and 1", "2 chunks", "more chunks than tokens"],
)
def test_forward_and_backward_match_one_device(number, chunks):
    cases = {
        name: _inputs([[min(one, number - 1) for one in row] for row in choices])
        for name, choices in CHOICES.items()
    }

    def check(cases):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(Experts(number), plan_of(mesh, chunks=chunks))
        found = {}
        for name, given in cases.items():
            model.zero_grad()
            model.seen.clear()
            found[name] = _results(model, given, mesh), [*model.seen], model.number
        return found

    for rank, found in enumerate(run_ranks(check, 2, cases)):
        own = range(2 * rank, min(2 * rank + 2, number))
        for name, given in cases.items():
            wanted = _results(Experts(number), given)
            actual, calls, after = found[name]
            for one, other in zip(actual, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=name)
            native = [one - own.start for one in given[1].flatten().tolist() if one in own]
            assert len(calls) == chunks, name
            seen = [one for chosen, *_ in calls for row in chosen for one in row]
            assert Counter(seen) == Counter(native), name
            assert {call[1:] for call in calls} == {(len(own), len(own))}, name
            assert after == number, name


@pytest.mark.ranks
def test_experts_get_gradients_from_tokens_without_gradients():
    """As behind frozen layers; a rank that nobody sends to has no gradients, and waits for none."""
    given = _inputs(CHOICES["nothing for the first rank"])

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(Experts(), plan_of(mesh))
        model(*(distribute_tensor(one, mesh, [S0]) for one in given)).square().sum().backward()
        return model.table.grad.full_tensor()

    alone = Experts()
    alone(*given).square().sum().backward()
    for found in run_ranks(check, 2):
        torch.testing.assert_close(found, alone.table.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.ranks
def test_experts_are_sharded_along_two_axes():
    """The group of both has the first axis outermost: rank 1 of 2 x 2 has the second quarter."""

    def check(given):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(Experts(4), plan_of(mesh, ("dp", "tp")))
        return _results(model, given, mesh, 2), lower(installed(model).plan, model).indices

    given = _inputs([[0, 3], [1, 2], [3, 2], [0, 1], [2, 1], [3, 3], [1, 0]])
    wanted = _results(Experts(4), given)
    for rank, (found, indices) in enumerate(run_ranks(check, 4, given)):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        assert [*indices[""][0].own] == [rank]


@pytest.mark.ranks
def test_one_row_is_communicated_for_each_token_and_other_rank():
    """Three all-to-alls forward, one of them of counts, and two backward; on ranks with nothing."""
    given = _inputs(CHOICES["nothing for the first rank"])  # all choose both experts of rank 1

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(Experts(), plan_of(mesh))
        x, chosen, weights = (distribute_tensor(one, mesh, [S0]) for one in given)
        x.requires_grad_()
        weights.requires_grad_()
        model(x, chosen, weights).to_local().sum().backward()  # the reducer of gradients begins
        with CommLog() as there:
            out = model(x, chosen, weights)
        loss = out.to_local().square().sum()
        with CommLog() as back:
            loss.backward()
        there.assert_counts({"all_to_all": 3})
        back.assert_counts({"all_to_all": 2})
        return [(one.input_bytes, one.wire_bytes) for one in (*there.calls, *back.calls)]

    counts = 2 * 8, 8 * 2  # rows and assignments for each rank
    features, weight_bytes, index_bytes = 4 * FEATURES, 4 * 2, 4 * 2
    row, gradient = features + weight_bytes + index_bytes, features + weight_bytes
    first, second = run_ranks(check, 2)
    # Rank 0 has two tokens, and sends each once; it has no expert that any token has chosen.
    assert first == [
        (2 * counts[0], counts[1]),
        (2 * row, 2 * row), (0, 0), (2 * features, 2 * features), (0, 0),
    ]  # fmt: skip
    # What rank 1 has chosen is its own; what it gives back is what came.
    assert second == [
        (2 * counts[0], counts[1]),
        (2 * row, 0), (4 * features, 2 * features), (2 * features, 0), (4 * gradient, 2 * gradient),
    ]  # fmt: skip


class Scales(Experts):
    """Experts whose results for a row have the same bits with any other rows."""

    def forward(self, x, chosen, weights):
        return x * self.table[chosen[:, 0], 0] * weights


@pytest.mark.ranks
@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"]
)
def test_results_have_the_same_bits_with_any_number_of_chunks(ranks):
    torch.manual_seed(7)
    chosen = torch.rand(9 * ranks + 1, 2 * ranks).topk(3).indices
    given = torch.randn(len(chosen), FEATURES), chosen, torch.rand(chosen.shape)

    def check():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        return [
            _results(
                parallelize(Scales(2 * ranks), plan_of(mesh, chunks=chunks), mode="eager"),
                given,
                mesh,
            )
            for chunks in (1, 2, 4)
        ]

    for first, *others in run_ranks(check, ranks):
        for (*same, table), (*expected, table_grad) in ((other, first) for other in others):
            assert [*map(torch.equal, same, expected)] == [True] * 3
            torch.testing.assert_close(table, table_grad)  # a sum over chunks


EVENTS = {
    "_c10d_functional.all_to_all_single": "send",
    "_c10d_functional.wait_tensor": "wait",
    "aten.nonzero_static": "sort",
    "aten.copy_": "copy",
}


class Events(TorchDispatchMode):
    """Records when collectives are started, and when they are waited for."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(EVENTS.get(str(func).rpartition(".")[0], ""))
        return func(*args, **(kwargs or {}))

    def of(self, *names):
        return [one for one in self.seen if one in names]


class Traced(Experts):
    """Records when it computes, forward and backward."""

    def forward(self, x, chosen, weights):
        out = super().forward(x, chosen, weights)
        self.events.append("compute")
        if out.requires_grad:
            out.register_hook(lambda _: self.events.append("compute"))
        return out


@pytest.mark.ranks
def test_chunks_are_sent_while_experts_compute_others():
    given = _inputs(CHOICES["both ranks"])

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(Traced(), plan_of(mesh, chunks=2), mode="eager")
        x, *others = (distribute_tensor(one, mesh, [S0]) for one in given)
        events = Events(), Events()
        with events[0]:
            model.events = events[0].seen
            out = model(x.requires_grad_(), *others).to_local()
        with events[1]:
            model.events = events[1].seen
            out.backward(torch.ones_like(out))
        return events[0].seen, [one.of("send", "wait", "compute") for one in events]

    for seen, (forward, backward) in run_ranks(check, 2):
        computed = ["wait", "compute", "send"]
        counted, dispatched, combined = ["send", "wait"], ["send"] * 2, ["wait"] * 2
        assert forward == [*counted, *dispatched, *computed, *computed, *combined]
        assert backward == [*dispatched, *computed, *computed, *combined]
        # Rows are prepared while the numbers of rows are sent, for which the host waits once.
        meanwhile = seen[seen.index("send") : seen.index("wait")]
        assert meanwhile.count("sort") == 2
        assert meanwhile.count("copy") >= 3  # tokens, choices and weights
        assert "sort" not in seen[seen.index("wait") :]


class Shared(nn.Module):
    """Records when it computes, forward and backward."""

    def __init__(self):
        super().__init__()
        self.events = []

    def forward(self, x):
        self.events.append("shared")
        out = torch.sin(x)
        if out.requires_grad:
            out.register_hook(lambda _: self.events.append("shared"))
        return out


class Mixture(nn.Module):
    """Experts beside one that takes all tokens, called as a subclass says."""

    def __init__(self):
        super().__init__()
        self.experts, self.shared = Traced(), Shared()

    def forward(self, x, chosen, weights):
        return self.experts(x, chosen, weights) + self.shared(x)


class SharedFirst(Mixture):
    def forward(self, x, chosen, weights):
        return self.shared(x) + self.experts(x, chosen, weights)


class SharedOfOthers(Mixture):
    def forward(self, x, chosen, weights):
        return self.experts(x, chosen, weights) + self.shared(2 * x)


def mixture_plan(mesh, **options):
    plan = Plan(mesh).shard(r"experts\.table", S0, "dp").local("experts", S0, "dp")
    for given in ("x", "chosen", "weights"):
        plan.shard(f"<in:{given}>", S0, "dp")
    options = {"weights": "weights", "count": "number"} | options
    return plan.dispatch("experts.<in:chosen>", S0, "dp", **options)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_a_module_beside_the_experts_runs_while_results_are_sent(mode):
    given = _inputs(CHOICES["an odd number of tokens"])

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        found = []
        for overlap in (None, "shared"):
            options = {"guard_steps": 0} if mode == "static" else {}
            plan = mixture_plan(mesh, overlap=overlap)
            model = parallelize(Mixture(), plan, mode=mode, use=(), **options)
            x, *others = (one.detach() for one in given)
            if mode == "eager":
                x, *others = (distribute_tensor(one, mesh, [S0]) for one in given)
            x.requires_grad_()
            events = Events(), Events()
            with events[0]:
                model.experts.events = model.shared.events = events[0].seen
                out = model(x, *others)
            out = out if mode == "static" else out.to_local()
            with events[1]:
                model.experts.events = model.shared.events = events[1].seen
                out.square().sum().backward()
            grads = [one.grad.full_tensor() for one in model.parameters()]
            events = [one.of("send", "wait", "compute", "shared") for one in events]
            assert "shared" not in vars(model)
            found.append((out.detach(), grads, events))
        return found

    expected = Mixture()
    expected.experts.events = []
    expected(*given).square().sum().backward()
    grads = [one.grad for one in expected.parameters()]
    for (out, plain_grads, (plain, plain_back)), (same, found_grads, events) in run_ranks(check, 2):
        assert torch.equal(out, same)
        torch.testing.assert_close(plain_grads, grads)
        torch.testing.assert_close(found_grads, grads)
        routed, back = ["send", "wait", "send", "wait", "compute", "send"], ["send", "wait"]
        assert plain == [*routed, "wait", "shared"]
        assert events[0] == [*routed, "shared", "wait"]
        # In static mode the gradients of the model's inputs are summed at the end.
        assert plain_back[:6] == ["shared", *back, "compute", *back]
        assert events[1][:6] == ["send", "shared", "wait", "compute", *back]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (SharedFirst, "does not call it behind the experts; leave 'shared' out of dispatch"),
        (SharedOfOthers, "calls it with something else than its own first input; leave 'shared'"),
    ],
)
def test_a_caller_that_cannot_overlap_is_refused(make, message):
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(make(), mixture_plan(mesh, overlap="shared"), mode="eager")
        model.experts.events = []
        given = [distribute_tensor(one, mesh, [S0]) for one in _inputs(CHOICES["both ranks"])]
        try:
            model(*given)
        finally:
            assert "shared" not in vars(model)

    with pytest.raises(RankError, match=rf"the model runs shared while .*, but {message}"):
        run_ranks(check, 2)


def test_overlap_is_explained_and_has_to_name_a_module_beside_the_experts(mesh):
    plan = mixture_plan(mesh, overlap="shared", chunks=2)
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
    rows = {(row.site, row.tensor): row.after for row in explain(plan, Mixture()).rows}
    assert rows["experts", "<index>:1"] == "dp=S(0), chunks=2, overlap=shared"
    for name in ("shred", "experts", 1):
        expected = (
            r"dispatch\(.*: overlap: expected the name of a module beside experts, 'shared', got"
        )
        with pytest.raises(ValueError, match=rf"{expected} {name!r}"):
            lower(mixture_plan(mesh, overlap=name), Mixture())
    with pytest.raises(ValueError, match="a module beside the model, of none, got 'shared'"):
        lower(plan_of(mesh, overlap="shared"), Experts())


def test_shared_experts_of_deepseek_v3_are_overlapped(mesh):
    plan = zoo.deepseek_v3(mesh, tp=None, dp=("dp", "tp"), ep="dp", dense=1)
    (dispatch,) = lower(plan, models.deepseek_v3()).indices["model.layers.1.mlp.experts"]
    assert dispatch.dispatch.overlap == "shared_experts"


@pytest.mark.ranks
def test_rows_of_four_ranks_are_those_of_pairs_of_tokens_and_other_ranks():
    """Of experts 2, 2, 2 and 1 to a rank; bfloat16 tokens with float32 weights."""
    torch.manual_seed(7)
    chosen = torch.rand(4 * 9, 7).topk(3).indices

    def check():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = parallelize(Experts(7, features=5).bfloat16(), plan_of(mesh))
        x = torch.randn(len(chosen), 5, dtype=torch.bfloat16)
        given = x, chosen, torch.rand(chosen.shape)
        with CommLog() as log:
            model(*(distribute_tensor(one, mesh, [S0]) for one in given))
        return [one.wire_bytes for one in log.calls if one.op == "all_to_all"]

    ranks = chosen // 2
    pairs = [
        [{*row} - {rank} for row in ranks[9 * rank : 9 * rank + 9].tolist()] for rank in range(4)
    ]
    row = 2 * 5 + 3 * 4 + 3 * 4 + 2  # a multiple of the widest dtype's size
    for rank, (counts, dispatched, combined) in enumerate(run_ranks(check, 4)):
        assert counts == 3 * 16
        assert dispatched == row * sum(map(len, pairs[rank]))
        received = sum(rank in others for of_rank in pairs for others in of_rank)
        assert combined == 2 * 5 * received


@pytest.mark.ranks
@pytest.mark.parametrize("frozen", ["nothing", "the tokens", "the experts", "all but the weights"])
def test_backward_communicates_on_all_ranks_whatever_is_trained(frozen):
    given = _inputs(CHOICES["nothing for the second rank"])

    def results(model, mesh=None):
        x, chosen, weights = given
        if mesh is not None:
            x, chosen, weights = (distribute_tensor(one, mesh, [S0]) for one in given)
        model.table.requires_grad_(frozen in ("nothing", "the tokens"))
        x = x.detach().requires_grad_(frozen in ("nothing", "the experts"))
        weights = weights.detach().requires_grad_()
        model(x, chosen, weights).square().sum().backward()
        grads = [one.grad for one in (x, weights, model.table)]
        return [one if one is None or mesh is None else one.full_tensor() for one in grads]

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return results(parallelize(Experts(), plan_of(mesh)), mesh)

    wanted = results(Experts())
    for found in run_ranks(check, 2):
        assert [one is None for one in found] == [one is None for one in wanted]
        for one, other in zip(found, wanted, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.skipif(
    TORCH_RELEASE < (2, 12),
    reason="torch 2.11's topk of a DTensor has no backward",
)
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_mixtral_sends_the_tokens_that_its_routers_chose(mode):
    """With activation checkpointing too, which sends twice what forward sends."""

    def check(checkpoints):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = models.mixtral(num_local_experts=3)
        for layer in model.model.layers if checkpoints else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        parallelize(model, zoo.mixtral(mesh, tp=None, dp="dp", ep="dp"), mode=mode, guard_steps=0)
        chosen = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
        torch.manual_seed(1)
        with track(model) as record:
            loss = models.token_loss(model)
            loss.backward()
        locals_ = [one.to_local() if mode == "eager" else one for one in chosen[:2]]
        sent = [[one for one in record.collectives if one.name == "all_to_all"]]
        own = range(2) if mesh.get_rank() == 0 else range(2, 3)
        elsewhere = [
            sum(any(one not in own for one in row) for row in index.tolist()) for index in locals_
        ]
        text = {(one.axis, one.cause, "experts.py" in one.line) for one in sent[0]}
        sites = Counter((one.site, one.phase.value) for one in sent[0])
        grads = [param.grad.full_tensor() for param in model.parameters()]
        return sites, text, elsewhere, grads

    def bytes_sent():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = models.mixtral(num_local_experts=3)
        parallelize(model, zoo.mixtral(mesh, tp=None, dp="dp", ep="dp"), mode=mode, guard_steps=0)
        torch.manual_seed(1)
        with CommLog() as log:
            models.token_loss(model)
        return [one.wire_bytes for one in log.calls if one.op == "all_to_all"]

    alone = models.mixtral(num_local_experts=3)
    torch.manual_seed(1)
    models.token_loss(alone).backward()
    experts = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    sent = run_ranks(bytes_sent, 2, timeout=120)
    for checkpoints, again in ((False, 0), (True, 3)):
        found = run_ranks(check, 2, checkpoints, timeout=120)
        for rank, (sites, text, elsewhere, grads) in enumerate(found):
            assert sites == Counter(
                {(site, "forward"): 3 for site in experts}
                | {(site, "backward"): 2 + again for site in experts}
            )
            assert text == {("dp", "plan", True)}
            features, choices = 4 * 32, (4 + 4) * 2  # a choice has a number and a weight
            assert sent[rank][1::3] == [(features + choices) * tokens for tokens in elsewhere]
            assert sent[rank][2::3] == [features * tokens for tokens in found[1 - rank][2]]
            assert 0 < sum(elsewhere) <= 2 * 16  # of 16 tokens in two layers
            for one, param in zip(grads, alone.parameters(), strict=True):
                torch.testing.assert_close(one, param.grad, rtol=1e-4, atol=1e-6)


def test_dispatch_is_explained_and_serialized(mesh):
    plan = plan_of(mesh)
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
    assert str(plan).splitlines()[-1] == (
        "dispatch('<in:chosen>', dp=S(0), tokens=0, weights='weights', count='number')"
    )
    rows = {(row.hook, row.tensor): row.after for row in explain(plan, Experts()).rows}
    assert rows["forward_pre", "<index>:1"] == "dp=S(0)"
    ops = [*map(str, lower(plan, Experts()).ops)]
    assert "forward_pre:<index>:1:dispatch(->S(0), dp)" in ops


def test_chunks_are_explained_and_serialized(mesh):
    plan = plan_of(mesh, ("dp", "tp"), chunks=3)
    assert str(plan).endswith("count='number', chunks=3)")
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
    rows = {row.tensor: row.after for row in explain(plan, Experts()).rows}
    assert rows["<index>:1"] == "dp=S(0), tp=S(0), chunks=3"
    lowered = lower(plan, Experts())
    assert lowered.indices[""][0].dispatch.chunks == 3
    ranks_compare = "forward_pre:<index>:1:dispatch(->S(0), dp, chunks=3)"
    assert ranks_compare in [*map(str, lowered.ops)]
    assert plan_of(mesh, chunks=1).entries == plan_of(mesh).entries


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, "2", None])
def test_what_is_no_number_of_chunks_is_refused(mesh, chunks):
    expected = r"dispatch\('<in:chosen>'\): chunks: expected a number of at least 1, got "
    with pytest.raises(ValueError, match=expected):
        plan_of(mesh, chunks=chunks)
    changed = json.loads(plan_of(mesh, chunks=3).to_json())
    changed["entries"][-1]["options"]["chunks"] = chunks
    with pytest.raises(ValueError, match=expected):
        Plan.from_json(json.dumps(changed), mesh)


@pytest.mark.parametrize(
    ("change", "make", "message"),
    [
        (lambda plan: plan, lambda: Experts(1), "at least one of 1 on each rank"),
        (lambda plan: plan.shard("table", R, "dp"), Experts, "all of one size, got: none"),
        (
            lambda plan: plan.dispatch("<in:chosen>", S0, "dp", weights="weight"),
            Experts,
            "has no argument 'weight'; did you mean 'weights'",
        ),
        (
            lambda plan: plan.dispatch("<in:chosen>", S0, "dp", tokens=5),
            Experts,
            "has 3 arguments: x, chosen, weights",
        ),
        (
            lambda plan: plan.dispatch("<in:chosen>", S0, "dp", count="experts"),
            Experts,
            "Experts has no attribute 'experts'",
        ),
        (
            lambda plan: plan.dispatch("<in:weights>", S0, "dp"),
            Experts,
            "got another one; tokens are dispatched by one",
        ),
    ],
    ids=["too few", "not divided", "weights", "tokens", "count", "two"],
)
def test_entries_that_do_not_fit_the_module_are_refused(mesh, change, make, message):
    with pytest.raises(
        ValueError, match=rf"(?s)test_expert_dispatch\.py:\d+: dispatch\(.*{message}"
    ):
        lower(change(plan_of(mesh)), make())


def test_a_module_on_dtensors_is_refused(mesh):
    plan = Plan(mesh).shard("table", S0, "dp").dispatch("<in:chosen>", S0, "dp")
    with pytest.raises(ValueError, match=r"add local\('', Partial\(\), 'dp'\)"):
        lower(plan, Experts())


def test_arguments_of_dispatch_are_checked(mesh):
    with pytest.raises(ValueError, match=r"dispatch\('table'\): expected an argument"):
        Plan(mesh).dispatch("table", S0, "dp")
    with pytest.raises(ValueError, match="expected one Shard of the module's parameters"):
        Plan(mesh).dispatch("<in:chosen>", [S0, S1])
    with pytest.raises(ValueError, match=r"axes \('dp', 'tp'\), not 'ep'"):
        Plan(mesh).dispatch("<in:chosen>", S0, "ep")


def test_replicated_tokens_are_refused(mesh):
    plan = plan_of(mesh).shard("<in:x>", R, "dp")
    model = parallelize(Experts(), plan, src_data_rank=None)
    pattern = r"dispatches tokens along 'dp'.*would send the same.*Shard\(0\), 'dp'.*or use index\("
    with pytest.raises(ValueError, match=pattern):
        model(*_inputs(CHOICES["both ranks"]))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, chosen, weights: (x, chosen + 2, weights), "got choices from 2 to 5"),
        (lambda x, chosen, weights: (x, chosen - 1, weights), "choices from 0 to 3 as chosen"),
        (
            lambda x, chosen, weights: (x[None], chosen, weights),
            r"expected x of \(tokens, features\)",
        ),
        (lambda x, chosen, weights: (x, chosen, None), "expected a tensor as weights, got None"),
        (lambda x, chosen, weights: (x, chosen, weights[:, :1]), "expected a weight for each"),
    ],
    ids=["too large", "negative", "three dims", "nothing", "a weight for two choices"],
)
def test_inputs_that_cannot_be_dispatched_are_refused(change, message):
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(Experts(), plan_of(mesh), mode="eager")
        given = change(*_inputs([[0, 3]] * 4 if "2 to 5" in message else [[0, 1]] * 4))
        made = [one if one is None else distribute_tensor(one, mesh, [S0]) for one in given]
        if given[0].ndim == 3:
            made[0] = distribute_tensor(given[0].expand(2, -1, -1), mesh, [S0])
        try:
            model(*made)
        finally:
            assert model.number == 4

    with pytest.raises(RankError, match=message):
        run_ranks(check, 2)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_plans_of_the_zoo_dispatch_in_chunks(mesh, name):
    make = partial(getattr(zoo, name), mesh, dp="dp")
    for chunks, expected in ((1, None), (3, 3)):
        (options,) = (
            dict(entry.options)
            for entry in make(ep="dp", ep_chunks=chunks).entries
            if entry.kind.value == "dispatch"
        )
        assert options.get("chunks") == expected
    pattern = r"ep_chunks=3: expected axes of ep that shard tokens, .*got ep="
    with pytest.raises(ValueError, match=rf"{pattern}None; .*leave ep_chunks out"):
        make(ep_chunks=3)
    with pytest.raises(ValueError, match=rf"{pattern}\['tp'\]; "):
        make(ep="tp", ep_chunks=3)
    with pytest.raises(ValueError, match="chunks: expected a number of at least 1, got 0"):
        make(ep="dp", ep_chunks=0)


def test_expert_axes_of_which_some_shard_tokens_are_refused(mesh):
    pattern = r"zoo\.mixtral: .* ep=.* 'dp' that do and 'tp' that do not; .*sp=True for tp"
    with pytest.raises(ValueError, match=pattern):
        zoo.mixtral(mesh, dp="dp", ep=("dp", "tp"))
    with pytest.raises(ValueError, match=r"axes \('dp', 'tp'\), not 'ep'"):
        zoo.mixtral(mesh, dp="dp", ep="ep")
    plan = zoo.mixtral(mesh, dp="dp", sp=True, ep=("dp", "tp"))
    with pytest.raises(ValueError, match="at least one of 3 on each rank"):
        lower(plan, models.mixtral(num_local_experts=3))
