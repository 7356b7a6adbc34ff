"""Muon: torch's figures whatever the ranks and the granularity, and little that travels."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import Muon
from fsdp.optim.jobs import jobs_of
from fsdp.optim.matrices import matrices_of as matrices_in
from fsdp.optim.orthogonalize import orthogonalize
from fsdp.optim.owners import Load, choose_owners, work_of
from ragged_shard import InterleavedShard, RaggedShard
from testkit import CommLog, models, run_ranks

STEPS = 50
GRANULARITIES = {"elements": Block(1), "rows": Rows(3), "whole": Whole()}


class Net(nn.Module):
    """Matrices of several shapes, uneven, wide and tall; an embedding, norms and biases."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, 13), nn.LayerNorm(13)
        self.up, self.down = nn.Linear(13, 37), nn.Linear(37, 13)
        self.square, self.head = nn.Linear(13, 13, bias=False), nn.Linear(13, 11)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x + self.square(x)).square().mean()


def matrices_of(model):
    """Of hidden layers: what Muon is for."""
    return [
        (name, param)
        for name, param in model.named_parameters()
        if param.ndim == 2 and not any(part in name for part in ("embed", "head"))
    ]


def groups_of(model, **adamw):
    hidden = matrices_of(model)
    names = {name for name, _ in hidden}
    rest = [(name, param) for name, param in model.named_parameters() if name not in names]
    return [{"params": hidden}, {"params": rest, "use_muon": False, "lr": 1e-2, **adamw}]


def muon_of(model, **options):
    return Muon(groups_of(model), lr=0.02, **options)


class TorchMuon:
    """Two optimizers of torch, which know nothing of shards."""

    def __init__(self, model, **options):
        muon, adamw = groups_of(model)
        adamw.pop("use_muon")
        self.both = [
            torch.optim.Muon(muon["params"], lr=0.02, **options),
            torch.optim.AdamW([adamw], weight_decay=options.get("weight_decay", 0.1)),
        ]

    def step(self):
        for one in self.both:
            one.step()

    def zero_grad(self):
        for one in self.both:
            one.zero_grad()


def train(model, optimizer, steps=STEPS, first=0):
    """The same batch on all ranks, so that gradients do not depend on their number."""
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        loss = model(torch.randint(0, 11, (4, 6)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(granularity="elements", **options):
    model = Net()
    policy = GRANULARITIES[granularity]
    choose = lambda param: policy if param.ndim == 2 else None
    return fully_shard(model, shard_placement_fn=choose, **options)


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def wholes(model):
    return {name: whole(param) for name, param in model.named_parameters()}


def same_bits(ours, theirs):
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


@pytest.mark.ranks
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fifty_steps_are_torchs_bit_for_bit(ranks, granularity):
    def check():
        ours, theirs = sharded(granularity), Net()
        losses = train(ours, muon_of(ours)), train(theirs, TorchMuon(theirs))
        return losses, same_bits(wholes(ours), wholes(theirs))

    for (ours, theirs), differing in run_ranks(check, ranks):
        assert ours == theirs
        assert ours[-1] < ours[0]
        assert differing == []


OPTIONS = [
    {"nesterov": False},
    {"momentum": 0.5, "weight_decay": 0.0, "ns_steps": 3},
    {"adjust_lr_fn": "match_rms_adamw", "eps": 10.0},
    {"ns_coefficients": (2.0, -1.5, 0.5)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: ",".join(one))
def test_options_are_torchs_on_plain_parameters(options):
    ours, theirs = Net(), Net()
    losses = train(ours, muon_of(ours, **options), 5)
    assert losses == train(theirs, TorchMuon(theirs, **options), 5)
    assert same_bits(wholes(ours), wholes(theirs)) == []


def test_a_learning_rate_may_be_a_tensor():
    ours, theirs = Net(), Net()
    optimizer = Muon(groups_of(ours), lr=torch.tensor(0.02, dtype=torch.float64))
    assert train(ours, optimizer, 3) == train(theirs, TorchMuon(theirs), 3)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype):
    """torch adds a tall matrix's update with other strides, and so rounds bfloat16 otherwise."""

    def check():
        model = fully_shard(Net().to(dtype))
        return train(model, muon_of(model), 8)

    alone, theirs = Net().to(dtype), Net().to(dtype)
    wanted = train(alone, muon_of(alone), 8)
    assert run_ranks(check, 2) == [wanted] * 2
    tolerance = {torch.bfloat16: 0.05, torch.float64: 0.0}[dtype]
    assert train(theirs, TorchMuon(theirs), 8) == pytest.approx(wanted, rel=tolerance)


def test_a_schedule_changes_the_learning_rate_of_both_kinds():
    ours, theirs = Net(), Net()
    one, others = muon_of(ours), TorchMuon(theirs)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (one, *others.both)]
    for step in range(4):
        assert train(ours, one, 1, step) == train(theirs, others, 1, step)
        for schedule in schedules:
            schedule.step()


class Stacks(nn.Module):
    """Five experts in one parameter, a fused QKV, and a projection of unlike rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(5, 6, 7))
        self.qkv, self.gqa = nn.Parameter(torch.randn(12, 5)), nn.Parameter(torch.randn(9, 4))

    def forward(self, x):
        y = torch.tanh(torch.einsum("bi,eij->bj", x, self.experts))
        return (y[:, :5] @ self.qkv.T).square().mean() + (x[:, :4] @ self.gqa.T).square().mean()


SPLITS = {"experts": None, "qkv": 3, "gqa": lambda param: (5, 2, 2)}
ROWS = {"qkv": (4, 4, 4), "gqa": (5, 2, 2)}


def apart(stacks):
    """The matrices as parameters of their own."""
    found = list(stacks.experts.detach().clone())
    for name, rows in ROWS.items():
        found += [one.clone() for one in getattr(stacks, name).detach().split(rows)]
    return [nn.Parameter(one) for one in found]


def stack_muon(model):
    groups = [
        {"params": [(name, param)], "split": SPLITS[name]}
        for name, param in model.named_parameters()
    ]
    return Muon(groups, lr=0.1)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 3])
def test_experts_heads_and_projections_are_matrices_of_their_own(ranks):
    def check():
        model = Stacks()
        fully_shard(model)
        params = apart(Stacks())
        ours, theirs = stack_muon(model), torch.optim.Muon(params, lr=0.1)
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(3, 6)).backward()
            with torch.no_grad():
                parts = list(whole(model.experts.grad))
                for name, rows in ROWS.items():
                    parts += whole(getattr(model, name).grad).split(rows)
            for param, grad in zip(params, parts, strict=True):
                param.grad = grad.contiguous()
            ours.step()
            theirs.step()
            ours.zero_grad()
        got = Stacks()
        for name, param in model.named_parameters():
            getattr(got, name).data = whole(param)
        assert all(torch.equal(a, b) for a, b in zip(apart(got), params, strict=True))
        return ours.owners()

    owners = run_ranks(check, ranks)
    assert all(one == owners[0] for one in owners)
    assert len(owners[0]) == 5 + 3 + 3
    assert {owners[0][f"experts[{n}]"] for n in range(5)} == set(range(ranks))


def steps_of(model, optimizer, inputs, steps=3):
    """Steps ours and torch's with the same gradients: the names of matrices that differ."""
    alone = {name: nn.Parameter(whole(param)) for name, param in matrices_of(model)}
    theirs = torch.optim.Muon(alone.values(), lr=0.02)
    for step in range(steps):
        model(inputs(step)).sum().backward()
        for name, param in matrices_of(model):
            alone[name].grad = None if param.grad is None else whole(param.grad)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
    return same_bits(wholes(model), alone)


@pytest.mark.ranks
def test_hybrid_shards_are_gathered_within_their_axis():
    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        model = sharded(mesh=mesh)
        torch.manual_seed(dist.get_rank())
        assert steps_of(model, muon_of(model), lambda step: torch.randint(0, 11, (4, 6))) == []

    run_ranks(check, 4)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.mix = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.mix(x + self.down(torch.relu(self.up(x))))


@pytest.mark.ranks
@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp and tp", "tp alone"])
def test_tensor_parallel_matrices_are_whole_where_they_iterate(fsdp):
    def check():
        shape = (2, 2) if fsdp else (1, 4)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = Mlp()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if fsdp:
            fully_shard(model, mesh=mesh["dp"])
        torch.manual_seed(mesh.get_local_rank("dp"))
        assert steps_of(model, muon_of(model), lambda step: torch.randn(5, 6)) == []

    run_ranks(check, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stacked_experts_beside_expert_and_tensor_parallelism(dim):
    """Cut along dim 0 each rank has whole experts; along others a part of each."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = nn.Module()
        values = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
        model.experts = nn.Parameter(distribute_tensor(values, mesh["ep"], [Shard(dim)]))
        fully_shard(model, mesh=mesh["dp"])
        ours = Muon(model.named_parameters(), lr=0.1)
        alone = [nn.Parameter(one) for one in values.clone()]
        theirs = torch.optim.Muon(alone, lr=0.1)
        for _ in range(2):
            model.experts.grad = torch.zeros_like(model.experts)
            torch.manual_seed(dist.get_rank())
            model.experts.grad.to_local().normal_()
            for param, grad in zip(alone, whole(model.experts.grad), strict=True):
                param.grad = grad.contiguous()
            ours.step()
            theirs.step()
        assert torch.equal(whole(model.experts), torch.stack(list(alone)))
        return ours.owners()

    for owners in run_ranks(check, 4):
        assert len(owners) == (2 if dim == 0 else 4)


@pytest.mark.ranks
def test_torchs_fully_shard_is_served_too():
    def check():
        model = torch_fully_shard(Net())
        torch.manual_seed(dist.get_rank())
        assert steps_of(model, muon_of(model), lambda step: torch.randint(0, 11, (4, 6))) == []

    run_ranks(check, 3)


@pytest.mark.ranks
def test_frozen_and_unused_matrices_stay_and_ranks_may_have_nothing_to_do():
    def check():
        model = Net()
        model.down.requires_grad_(False)
        model.unused = nn.Linear(5, 5)
        fully_shard(model)
        before = wholes(model)
        optimizer = muon_of(model)
        assert steps_of(model, optimizer, lambda step: torch.randint(0, 11, (4, 6))) == []
        same = [name for name, value in wholes(model).items() if torch.equal(value, before[name])]
        assert same == ["down.weight", "down.bias", "unused.weight", "unused.bias"]
        return optimizer.owners()

    for owners in run_ranks(check, 4):  # two matrices, four ranks
        assert set(owners) == {"up.weight", "square.weight"}
        assert len(set(owners.values())) == 2


def test_owners_have_equal_work_and_what_they_hold():
    """Largest first; what is fixed stays, and counts."""
    even = choose_owners([Load(5, (1, 9)), Load(5, (2, 8)), Load(5, (3, 7)), Load(5, (9, 1))], 2)
    assert even == [1, 1, 0, 0]
    assert choose_owners([Load(3, (9, 0), fixed=0), Load(3, (8, 1)), Load(6, (9, 0))], 2) == [
        0,
        0,
        1,
    ]
    draw = random.Random(0)
    for _ in range(50):
        ranks = draw.randint(1, 9)
        loads = [
            Load(draw.randint(1, 99), tuple(draw.randint(0, 9) for _ in range(ranks)))
            for _ in range(draw.randint(0, 30))
        ]
        busy = [0] * ranks
        for load, owner in zip(loads, choose_owners(loads, ranks), strict=True):
            busy[owner] += load.work
        work = [load.work for load in loads]
        assert max(busy) <= sum(work) / ranks + max(work, default=0)
    assert work_of((2, 5)) == work_of((5, 2)) == 2 * 2 * 2 * 5 + 2**3


# Bytes and collectives.


def sent(granularity, **options):
    model = sharded(granularity)
    optimizer = muon_of(model, **options)
    train(model, optimizer, 1)
    model(torch.arange(6)).backward()
    with CommLog() as log:
        optimizer.step()
    return log, sum(param.numel() for _, param in matrices_of(model))


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_an_nth_of_what_gathering_everything_would(ranks):
    def check():
        log, elements = sent("elements")
        log.assert_counts({"all_reduce": 1, "all_to_all": 2})
        return log.wire_bytes("all_to_all"), elements

    found = run_ranks(check, ranks)
    total, naive = sum(own for own, _ in found), found[0][1] * 4 * (ranks - 1)
    assert 0 < total <= naive / ranks


@pytest.mark.ranks
def test_the_next_bucket_comes_while_the_present_one_iterates():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        values = [torch.randn(4, 3) for _ in range(5)]
        params = [distribute_tensor(v, mesh, [RaggedShard((0,), (1, 3))]) for v in values]
        params.append(distribute_tensor(values[0], mesh, [RaggedShard.owned_by(1, 2)]))
        jobs = jobs_of([m for n, p in enumerate(params) for m in matrices_in(p, (4,), str(n))])
        events, results = [], {}

        def direction(job):
            events.append(f"gather {job.number}")
            return params[job.number].to_local().reshape(-1)[job.matrix.part]

        def iterate(job, matrix):
            events.append(f"iterate {job.number}")
            return 2 * matrix

        def apply(job, part):
            results[job.number] = part

        with CommLog() as log:
            orthogonalize(jobs, direction, iterate, apply, bucket_bytes=48)  # two of bfloat16
        log.assert_counts({"all_to_all": 6})
        for number, part in results.items():
            assert torch.equal(part, 2 * params[number].to_local().reshape(-1))
        return events, [job.owner for job in jobs]

    found = run_ranks(check, 2)
    for rank, (events, owners) in enumerate(found):
        assert owners == [1, 1, 0, 0, 0, 1]  # where most of it is, and three for each
        first = ["gather 0", "gather 2"]  # of both owners
        home = ["gather 5", "iterate 5"] if rank == 1 else []  # meanwhile
        second = ["gather 1", "gather 3", f"iterate {(2, 0)[rank]}"]
        third = ["gather 4", f"iterate {(3, 1)[rank]}", *(["iterate 4"] if rank == 0 else [])]
        assert events == first + home + second + third


@pytest.mark.ranks
def test_whole_matrices_are_iterated_on_where_they_lie_and_nothing_is_sent():
    def check():
        log, _ = sent("whole")
        log.assert_counts({})

    run_ranks(check, 2)


# What goes wrong.


def test_what_is_no_matrix_is_refused_by_name():
    model = Net()
    with pytest.raises(ValueError, match=r"parameter 'norm.weight' is .* of shape \(13,\).*AdamW"):
        Muon(model.named_parameters())
    optimizer = muon_of(model)
    with pytest.raises(ValueError, match=r"parameter 'late' is"):
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(3)))]})
    assert len(optimizer.param_groups) == 2
    with pytest.raises(ValueError, match=r"parameter '1 of group 0' is"):
        Muon([model.up.weight, model.up.bias])
    with pytest.raises(ValueError, match=r"'turned' of shape \(3, 2\) has strides \(1, 3\)"):
        Muon([("turned", nn.Parameter(torch.zeros(2, 3).T))])


@pytest.mark.parametrize("split", [3, 0, (5, 6), (12, -2), lambda param: 4])
def test_splits_that_do_not_fit(split):
    with pytest.raises(ValueError, match=r"split=.* of parameter 'w', whose matrices have 10 rows"):
        Muon([("w", nn.Parameter(torch.zeros(10, 4)))], split=split)


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": -0.1}, {"ns_steps": 100}, {"adjust_lr_fn": "x"}, {"bucket_mb": 0}],
    ids=str,
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=rf"Muon: {next(iter(options))}="):
        Muon([nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.ranks
def test_a_gradient_on_some_ranks_only_is_an_error_on_all():
    def check():
        model = sharded()
        optimizer = muon_of(model)
        model(torch.arange(6)).backward()
        if dist.get_rank() == 1:
            model.square.weight.grad = None
        before = wholes(model)
        with pytest.raises(
            ValueError, match=r"square.weight .*: a gradient on rank 0 and .*no gra"
        ):
            optimizer.step()
        assert same_bits(wholes(model), before) == []

    run_ranks(check, 2)


@pytest.mark.ranks
def test_placements_that_it_cannot_use_are_refused_before_anything_is_sent():
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))

        def optimizer(placements, **options):
            param = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, placements))
            param.grad = torch.ones_like(param)
            return Muon([("qkv", param)], **options)

        interleaved = optimizer([InterleavedShard(0, 2), Replicate()])
        with pytest.raises(ValueError, match=r"'qkv' is placed as .*wants RaggedShard on one axis"):
            interleaved.step()
        cut = optimizer([Shard(0), Replicate()], split=2)
        with pytest.raises(ValueError, match=r"'qkv' is split into 2 matrices and placed as"):
            cut.step()
        moved = optimizer([Shard(0), Replicate()])
        [param] = moved.param_groups[0]["params"]
        param.grad = param.grad.redistribute(placements=[Replicate(), Replicate()])
        with pytest.raises(ValueError, match=r"gradient of parameter 'qkv' is .* placed as"):
            moved.step()

    run_ranks(check, 2)


@pytest.mark.ranks
def test_state_of_another_layout_is_refused():
    def check():
        rows, elements = sharded("rows"), sharded("elements")
        ours, theirs = muon_of(rows), muon_of(elements)
        train(rows, ours, 1)
        train(elements, theirs, 1)
        before = copy.deepcopy(ours.state_dict())
        with pytest.raises(ValueError, match=r"momentum_buffer of parameter 'up.weight' is placed"):
            ours.load_state_dict(theirs.state_dict())
        after = ours.state_dict()
        assert after["param_groups"] == before["param_groups"]
        ours.load_state_dict(before)
        assert len(train(rows, ours, 1)) == 1

    run_ranks(check, 2)


# Checkpoints, and a real model.


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "saved_as", "loaded", "loaded_as"),
    [(2, "elements", 4, "whole"), (4, "rows", 1, "elements")],
)
def test_training_goes_on_at_another_number_of_ranks(tmp_path, saved, saved_as, loaded, loaded_as):
    def state(model, optimizer):
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }

    def save():
        model = sharded(saved_as)
        optimizer = muon_of(model)
        train(model, optimizer, 3)
        dcp.save(state(model, optimizer), checkpoint_id=tmp_path)
        return train(model, optimizer, 5, 3)

    def load():
        model = sharded(loaded_as)
        optimizer = muon_of(model)
        train(model, optimizer, 1)  # something to be overwritten
        found = state(model, optimizer)
        dcp.load(found, checkpoint_id=tmp_path)
        set_model_state_dict(model, found["model"])
        set_optimizer_state_dict(model, optimizer, found["optimizer"])
        return train(model, optimizer, 5, 3)

    wanted = run_ranks(save, saved)[0]
    for losses in run_ranks(load, loaded):
        assert losses == wanted


@pytest.mark.ranks
def test_losses_of_a_llama_are_those_of_ddp_and_torchs_muon_bit_for_bit():
    def check():
        curves = []
        for kind in ("ddp", "fsdp"):
            model = models.llama()
            if kind == "fsdp":
                for layer in model.model.layers:
                    fully_shard(layer)
                fully_shard(model)
                optimizer, called = muon_of(model), model
            else:
                called = DistributedDataParallel(model)
                optimizer = TorchMuon(model)
            losses = []
            for step in range(STEPS):
                torch.manual_seed(10 * (step % 3) + dist.get_rank())
                ids = torch.randint(0, models.VOCABULARY, (2, 8))
                loss = called(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            curves.append(losses)
        return curves

    for ddp, ours in run_ranks(check, 2):
        assert ours == ddp
        assert ours[-1] < ours[0] / 2
