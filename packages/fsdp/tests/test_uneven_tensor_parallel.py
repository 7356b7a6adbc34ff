"""Vocabularies and experts that tensor and expert parallelism do not divide."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

import fsdp
from fsdp import DataParallelMeshDims, Rows, Tiles, Whole, clip_grad_norm_, fully_shard
from fsdp.checkpoint import load_safetensors, save_safetensors
from fsdp.optim import SOAP, Adam8bit, Muon
from fsdp.optim.adam8bit.state import local_moments
from ragged_shard import (
    InterleavedShard,
    RaggedShard,
    StridedRaggedShard,
    from_checkpointable,
    strict,
    to_checkpointable,
)
from testkit import CommLog, run_ranks

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH = 13, 6  # 7 and 6 rows on 2 ranks; 4, 4, 4 and 1 on 4


class Experts(nn.Module):
    """Experts whose results are summed; each axis rank computes those that it has."""

    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 4) / 2)
        self.down = nn.Parameter(torch.randn(count, 4, WIDTH) / 2)

    def forward(self, x):
        up, down = self.up, self.down
        if isinstance(up, DTensor):
            x = DTensor.from_local(x, up.device_mesh, [Replicate()], run_check=False)
        y = torch.bmm(x.expand(len(up), *x.shape), up).tanh().bmm(down).sum(0)
        return y.full_tensor() if isinstance(y, DTensor) else y


class Model(nn.Module):
    """Tied embeddings around experts."""

    def __init__(self, experts):
        super().__init__()
        self.tokens, self.middle = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts, self.head = Experts(experts), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = torch.tanh(self.middle(self.tokens(tokens)))
        return self.head(x + self.experts(x))


def _model(experts=3):
    torch.manual_seed(0)
    return Model(experts)


def _parallelized(mesh, experts=3):
    """The model on tp alone: vocabulary and experts are sharded, and logits stay so."""
    model, tp = _model(experts), mesh["tp"]
    styles = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, tp, styles)
    model.head.weight = model.tokens.weight
    for name, param in list(model.experts.named_parameters()):
        placed = nn.Parameter(distribute_tensor(param.detach(), tp, [Shard(0)]))
        setattr(model.experts, name, placed)
    return model


def _data_parallel(mesh):
    return mesh["replicate", "shard"] if "shard" in mesh.mesh_dim_names else mesh["dp"]


def _sharded(mesh, experts=3, **options):
    """Two groups, of which the boundaries of shards are in the rows and in the experts."""
    model, data = _parallelized(mesh, experts), _data_parallel(mesh)
    fully_shard([model.tokens, model.head], mesh=data, **options)
    fully_shard([model.middle, model.experts], mesh=data, **options)
    return fully_shard(model, mesh=data, **options)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model, optimizer, steps, data=None, *, same_batch=False):
    """Returns the loss and the norm of each step, of all ranks' sequences."""
    at, ranks = (0, 1) if data is None or same_batch else (_position(data), data.size())
    found = []
    for step in steps:
        torch.manual_seed(step)
        tokens, targets = torch.randint(VOCABULARY, (2, 4, 5))[:, at::ranks].flatten(1)
        with loss_parallel():
            loss = cross_entropy(model(tokens), targets)
            loss.backward()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss = loss.detach().clone()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        if data is not None:
            for axis in range(data.ndim):
                dist.all_reduce(loss, group=data.get_group(axis))
            loss /= data.size()
        found += [loss.item(), norm.item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _position(data):
    position = 0
    for axis, at in enumerate(data.get_coordinate()):
        position = position * data.size(axis) + at
    return position


def _full(model):
    params = [param.detach() for param in model.parameters()]
    return [param.full_tensor() if isinstance(param, DTensor) else param for param in params]


MESHES = {
    "FSDP x TP": ({"dp": 2, "tp": 2}, 3, None),
    "TP x FSDP": ({"tp": 2, "dp": 2}, 3, None),
    "ranks without an expert": ({"dp": 2, "tp": 2}, 1, None),
    "four ranks of TP": ({"dp": 1, "tp": 4}, 3, None),
    "replicas x TP": ({"replicate": 2, "shard": 1, "tp": 2}, 3, None),
    "TP x HSDP": ({"tp": 2, "replicate": 1, "shard": 2}, 3, None),
    "rows": ({"dp": 2, "tp": 2}, 3, lambda param: Rows(2)),
    "whole tensors": ({"tp": 2, "dp": 2}, 3, lambda param: Whole()),
}
FAST = ("ranks without an expert", "whole tensors")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in MESHES]
)
def test_training_is_that_of_one_device(name):
    axes, experts, granularity = MESHES[name]

    def check():
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=(*axes,))
        model, alone = _sharded(mesh, experts, shard_placement_fn=granularity), _model(experts)
        numels = torch.tensor([param.to_local().numel() for param in model.parameters()])
        dist.all_reduce(numels)
        for param, numel in zip(model.parameters(), numels.tolist(), strict=True):
            on_tp = "tp" in param.device_mesh.mesh_dim_names
            copies = axes.get("replicate", 1) * (1 if on_tp else axes["tp"])
            assert numel == param.numel() * copies
        assert all(map(torch.equal, _full(model), _full(alone)))
        found = _train(model, _adamw(model), range(3), _data_parallel(mesh))
        assert found == pytest.approx(_train(alone, _adamw(alone), range(3)), rel=1e-5)
        for mine, wanted in zip(_full(model), _full(alone), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)

    run_ranks(check, 4, timeout=120)


def test_equal_batches_have_the_bits_of_tensor_parallelism_alone():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        results = []
        for model in (_sharded(mesh), _parallelized(mesh)):
            # Norms are summed in another order, so gradients are not clipped.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for step in range(3):
                torch.manual_seed(step)
                tokens, targets = torch.randint(VOCABULARY, (2, 20))
                with loss_parallel():
                    cross_entropy(model(tokens), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(_full(model))
        assert all(map(torch.equal, *results))

    run_ranks(check, 4, timeout=120)


class OneHotModel(Model):
    """The same with one-hot vectors and gathered experts, for which DTensor has all rules."""

    def forward(self, x):
        rows, up, down = self.head.weight, self.experts.up, self.experts.down
        if isinstance(up, DTensor):
            up, down = (one.redistribute(placements=[Replicate()] * 2) for one in (up, down))
        x = torch.tanh(self.middle(x @ rows))
        return (x + sum(torch.tanh(x @ up[i]) @ down[i] for i in range(len(up)))) @ rows.T


def _on_all_axes(mesh):
    def place(name, module, mesh):
        placements = [Replicate()] * mesh.ndim
        if name in ("tokens", "head", "experts"):
            placements[mesh.mesh_dim_names.index("tp")] = Shard(0)
        for key, param in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(param.detach(), mesh, placements)
            setattr(module, key, nn.Parameter(value))

    torch.manual_seed(0)
    model = distribute_module(OneHotModel(3), mesh, place)
    model.head.weight = model.tokens.weight
    return model


@pytest.mark.parametrize(
    ("names", "dims"),
    [
        pytest.param(("dp", "tp"), None, id="plan", marks=pytest.mark.slow),
        pytest.param(("tp", "dp"), DataParallelMeshDims(shard="dp"), id="dims, tp first"),
        pytest.param(("tp", "dp"), None, id="plan, tp first", marks=pytest.mark.slow),
        pytest.param(
            ("dp", "tp"), DataParallelMeshDims(shard="dp"), id="dims", marks=pytest.mark.slow
        ),
    ],
)
def test_parameters_on_all_axes_train_as_on_one_device(names, dims):
    """As a plan over the whole mesh makes them, and with dp_mesh_dims: DTensors everywhere."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = _on_all_axes(mesh)
        fully_shard(model, mesh=mesh["dp"] if dims is None else mesh, dp_mesh_dims=dims)
        if dims is not None:  # gradients are terms of a sum; gloo has no factors
            model.set_gradient_divide_factor(1.0)
            model.set_force_sum_reduction_for_comms(True)
        torch.manual_seed(0)
        alone = OneHotModel(3)
        optimizers = [_adamw(model), _adamw(alone)]
        batch = [Shard(0) if name == "dp" else Replicate() for name in names]
        for step in range(3):
            torch.manual_seed(step)
            tokens, weights = torch.eye(VOCABULARY)[:8], torch.randn(8, VOCABULARY)
            given = [distribute_tensor(one, mesh, batch) for one in (tokens, weights)]
            loss = (model(given[0]).tanh() * given[1]).sum()
            expected = (alone(tokens).tanh() * weights).sum()
            assert loss.full_tensor().item() == pytest.approx(expected.item(), rel=1e-5)
            loss.backward()
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for mine, wanted in zip(_full(model), _full(alone), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)

    run_ranks(check, 4, timeout=120)


def _saved(model, optimizer):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    params, states = get_state_dict(model, optimizer, options=options)
    return {"model": params, "optimizer": states}


def _resume(model, path, steps, data=None):
    """Loads a checkpoint, and returns losses and norms of the steps after it."""
    optimizer = _adamw(model)
    state = _saved(model, optimizer)  # whose state is that of a step with gradients of zero
    dcp.load(state, checkpoint_id=path)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        options=options,
    )  # fmt: skip
    return _train(model, optimizer, steps, data)


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param(
            [((2, 1), ("tp", "dp")), ((1,), ())], id="tp to one rank", marks=pytest.mark.slow
        ),
        pytest.param(
            [((2,), ("dp",)), ((2,), ("data",)), ((4, 1), ("tp", "dp"))],
            id="more",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_checkpoints_resume_on_other_meshes_and_without_tensor_parallelism(tmp_path, meshes):
    def save():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = _sharded(mesh)
        optimizer = _adamw(model)
        _train(model, optimizer, range(2), mesh["dp"])
        dcp.save(_saved(model, optimizer), checkpoint_id=tmp_path)
        expected = _train(model, optimizer, range(2, 4), mesh["dp"])
        assert _resume(_sharded(mesh), tmp_path, range(2, 4), mesh["dp"]) == expected  # all bits
        return expected

    def load(shape, names):
        if not names:
            return _resume(_model(), tmp_path, range(2, 4))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        data = mesh["dp"] if "dp" in names else None
        if names == ("tp", "dp"):
            model = _sharded(mesh)
        else:
            package = fsdp if names == ("dp",) else torch_fsdp
            model = _model()
            if data is None:
                mesh, data = mesh, mesh["data"]
            for part in (model.experts, model):
                package.fully_shard(part, mesh=data)
        return _resume(model, tmp_path, range(2, 4), data)

    expected, *_ = run_ranks(save, 4, timeout=120)
    for shape, names in meshes:
        for found in run_ranks(load, math.prod(shape), shape, names, timeout=120):
            assert found == pytest.approx(expected, rel=1e-5), (shape, names)


def test_checkpoints_of_other_packages_are_loaded(tmp_path):
    """A single process saves, and uneven tensor parallelism resumes."""

    def save():
        model = _model()
        optimizer = _adamw(model)
        _train(model, optimizer, range(2))
        dcp.save(_saved(model, optimizer), checkpoint_id=tmp_path)
        return _train(model, optimizer, range(2, 4))

    def load():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return _resume(_sharded(mesh), tmp_path, range(2, 4), mesh["dp"])

    [expected] = run_ranks(save, 1)
    for found in run_ranks(load, 4, timeout=120):
        assert found == pytest.approx(expected, rel=1e-5)


PLACED = {
    "rows": ((63, 4), Shard(0)),
    "interleaved": ((15, 4), InterleavedShard(0, 3)),  # 3 and 2 rows of each chunk
    "experts": ((3, 4, 2), Shard(0)),
    "one expert": ((1, 4, 2), Shard(0)),
    "columns": ((4, 5), Shard(1)),  # whole on a rank of data parallelism
    "heads": ((6, 12), InterleavedShard(1, 1, unit=4)),
}


@pytest.mark.parametrize(
    ("names", "experts"),
    [
        (("dp", "tp"), 3),
        (("tp", "dp"), 1),
        pytest.param(("tp", "dp"), 3, marks=pytest.mark.slow),
        pytest.param(("dp", "tp"), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_safetensors_are_exchanged_with_one_device(names, experts, tmp_path):
    alone = _model(experts)
    save_safetensors(alone, tmp_path / "alone")

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = _sharded(mesh, experts)
        result = save_safetensors(model, tmp_path / "sharded", max_shard_bytes=400)
        assert len(result.files) > 1
        for folder in ("sharded", "alone"):
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            load_safetensors(model, tmp_path / folder)
            assert all(map(torch.equal, _full(model), _full(alone)))

    run_ranks(check, 4)
    loaded = _model(experts).requires_grad_(False)
    for param in loaded.parameters():
        param.zero_()
    load_safetensors(loaded, tmp_path / "sharded")
    assert all(map(torch.equal, _full(loaded), _full(alone)))


def test_plain_tensors_of_checkpoints_are_exchanged_with_dtensors(tmp_path):
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = _sharded(mesh)
        wanted, state = _full(model), model.state_dict()
        dcp.save(to_checkpointable(state), checkpoint_id=tmp_path / "plain")
        dcp.save(state, checkpoint_id=tmp_path / "dtensors")
        for folder, convert in (("plain", dict), ("dtensors", to_checkpointable)):
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            state = model.state_dict()
            loaded = convert(state)
            dcp.load(loaded, checkpoint_id=tmp_path / folder)
            model.load_state_dict(from_checkpointable(loaded, state))
            assert all(map(torch.equal, _full(model), wanted))

    run_ranks(check, 4)


def _placed(mesh, granularity):
    torch.manual_seed(3)
    model = nn.Module()
    for name, (shape, placement) in PLACED.items():
        value = distribute_tensor(torch.randn(shape), mesh["tp"], [placement])
        model.register_parameter(name, nn.Parameter(value))
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=granularity)
    torch.manual_seed(3)
    alone = [nn.Parameter(torch.randn(shape)) for shape, _ in PLACED.values()]
    return dict(model.named_parameters()), alone


@pytest.mark.parametrize(
    ("names", "granularity"),
    [
        (("dp", "tp"), Rows(2)),
        (("tp", "dp"), None),
        pytest.param(("dp", "tp"), None, marks=pytest.mark.slow),
        pytest.param(("tp", "dp"), Rows(2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_norms_are_one_devices_and_nothing_is_gathered(names, granularity):
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        params, alone = _placed(mesh, lambda param: granularity)
        kind = StridedRaggedShard if names == ("dp", "tp") else RaggedShard
        for param, other in zip(params.values(), alone, strict=True):
            of_rows = all(getattr(one, "dim", 0) == 0 for one in param.placements)
            assert type(param.placements[names.index("dp")]) is (kind if of_rows else RaggedShard)
            assert torch.equal(param.full_tensor(), other)
        for order in (1.0, 2.0, 3.0, float("inf")):
            for param, other in zip(params.values(), alone, strict=True):
                param.grad, other.grad = param.detach() * 3, other.detach() * 3
            with strict():
                norm = clip_grad_norm_(params.values(), 0.5, order)
                native = nn.utils.get_total_norm([p.grad for p in params.values()], order)
            expected = nn.utils.clip_grad_norm_(alone, 0.5, order)
            torch.testing.assert_close(norm, expected)
            torch.testing.assert_close(native.full_tensor(), norm * 0 + order_of(alone, order))
            for param, other in zip(params.values(), alone, strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), other.grad)

    def order_of(params, order):
        return nn.utils.get_total_norm([param.grad for param in params], order)

    run_ranks(check, 4, timeout=120)


OPTIMIZERS = {
    "AdamW": lambda named: torch.optim.AdamW(named.values(), lr=1e-2),
    "fused AdamW": lambda named: torch.optim.AdamW(named.values(), lr=1e-2, fused=True),
    "Muon": lambda named: Muon(named.items(), lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_one_device(name):
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for granularity in (None, Rows(2)):
            params, alone = _placed(mesh, lambda param, given=granularity: given)
            others = dict(zip(params, alone, strict=True))
            optimizers = [OPTIMIZERS[name](given) for given in (params, others)]
            for step in range(3):
                torch.manual_seed(step)
                for param, other in zip(params.values(), alone, strict=True):
                    other.grad = torch.randn(other.shape)
                    param.grad = distribute_tensor(
                        other.grad, param.device_mesh, param.placements, src_data_rank=None
                    )
                for optimizer in optimizers:
                    optimizer.step()
            for param, other in zip(params.values(), alone, strict=True):
                torch.testing.assert_close(param.full_tensor(), other, rtol=0, atol=1e-6)

    run_ranks(check, 4, timeout=120)


@pytest.mark.parametrize("granularity", [Rows(2), None], ids=str)
def test_adam8bit_has_the_bits_of_each_rank_of_tensor_parallelism(granularity, tmp_path):
    """Its blocks are those of local tensors; without a granularity shards split them."""

    def step(params, grads):
        optimizer = Adam8bit(params.items(), lr=1e-2, block_size=8, min_8bit_size=0)
        for of_step in grads:
            for param, grad in zip(params.values(), of_step, strict=True):
                param.grad = grad
            optimizer.step()
        return optimizer

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        params, alone = _placed(mesh, lambda param: granularity)
        torch.manual_seed(1)
        grads = [[torch.randn_like(other) for other in alone] for _ in range(3)]

        def placed(tensors, given):
            return [
                distribute_tensor(one.detach(), *(how), src_data_rank=None)
                for one, how in zip(tensors, given, strict=True)
            ]

        on_tp = [(mesh["tp"], [placement]) for _, placement in PLACED.values()]
        on_all = [(param.device_mesh, param.placements) for param in params.values()]
        local = [nn.Parameter(one.to_local()) for one in placed(alone, on_tp)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Adam8bit: the shards of .* split a block")
            with CommLog() as log:
                optimizer = step(params, [placed(one, on_all) for one in grads])
        assert bool(log.counts()) == (granularity is None)
        for param in params.values():  # no more scales than blocks
            moments = local_moments(optimizer.state[param], 8)
            assert len(moments.first_scales) == -(-moments.first.numel() // 8)
        local_grads = [[one.to_local() for one in placed(of_step, on_tp)] for of_step in grads]
        step(dict(zip(PLACED, local, strict=True)), local_grads)
        found = placed([param.full_tensor() for param in params.values()], on_tp)
        assert all(
            torch.equal(one.to_local(), other) for one, other in zip(found, local, strict=True)
        )
        state = {
            name: {k: v for k, v in optimizer.state[param].items() if isinstance(v, DTensor)}
            for name, param in params.items()
        }
        dcp.save(state, checkpoint_id=tmp_path)
        loaded = {n: {k: torch.zeros_like(v) for k, v in of.items()} for n, of in state.items()}
        dcp.load(loaded, checkpoint_id=tmp_path)
        for name, of_param in state.items():
            assert all(
                torch.equal(v.to_local(), loaded[name][k].to_local()) for k, v in of_param.items()
            )

    run_ranks(check, 4, timeout=120)


def test_initial_numbers_are_one_devices():
    def check():
        import dist_rng

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = _parallelized(mesh)
            data = _data_parallel(mesh)
        for part in (model.experts, model):
            fully_shard(part, mesh=data)
        model.to_empty(device="cpu")
        dist_rng.install()
        alone = _model()
        for one in (model, alone):
            torch.manual_seed(7)
            for param in one.parameters():
                nn.init.normal_(param)
        assert all(map(torch.equal, _full(model), _full(alone)))

    run_ranks(check, 4, timeout=120)


def test_tiles_and_soap_are_refused_by_name():
    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Linear(4, 7, bias=False)
        weight = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
        model.weight = nn.Parameter(weight)
        with pytest.raises(ValueError, match=r"None for 'weight' .* of different sizes"):
            fully_shard(model, mesh=mesh["dp"], quantize_fn=lambda param: Tiles(rows=1, cols=4))
        fully_shard(model, mesh=mesh["dp"])
        model.weight.grad = model.weight.detach().clone()
        with pytest.raises(ValueError, match=r"'weight' .* to have even shards"):
            SOAP(model.named_parameters(), lr=1e-2).step()

    run_ranks(check, 2)
