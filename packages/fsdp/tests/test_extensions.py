"""Tensor subclasses with fsdp_pre_all_gather and fsdp_post_all_gather train as under FSDP2."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

import fsdp
from ragged_shard import RaggedShard
from testkit import CommLog, run_ranks
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks
BOTH = (fsdp, torch_fsdp)
ROW_OPS = {"chunk", "split", "narrow", "slice", "detach", "clone", "_to_copy", "alias", "view"}


def _quantized(rows):
    """int8 rows, and a scale for each."""
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(rows / scale).to(torch.int8), scale


class Wrapper(torch.Tensor):
    """Tensors with the same rows in one subclass; operators on rows are applied to each."""

    @staticmethod
    def __new__(cls, *parts):
        whole = parts[0]
        return torch.Tensor._make_wrapper_subclass(
            cls, whole.shape, strides=whole.stride(), dtype=torch.float32, device=whole.device
        )

    def __init__(self, *parts):
        self.parts = parts

    def __repr__(self):
        return f"{type(self).__name__}({self.parts})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name, first, kwargs = func.overloadpacket.__name__, args[0], kwargs or {}
        if name in ROW_OPS or name in ("new_zeros", "empty_like", "zeros_like"):
            results = [func(part, *_sizes(name, args[1:], part), **_plain(name, kwargs, part))
                       for part in first.parts]  # fmt: skip
            if isinstance(results[0], list | tuple):
                return [cls(*parts) for parts in zip(*results, strict=True)]
            return cls(*results)
        if name == "copy_":
            for part, other in zip(first.parts, args[1].parts, strict=True):
                part.copy_(other)
            return first
        return cls.compute(func, args, kwargs)


def _sizes(name, args, part):
    """Returns sizes with the columns of this part."""
    return ((*args[0][:-1], part.shape[-1]), *args[1:]) if name == "new_zeros" else args


def _plain(name, kwargs, part):
    return kwargs | {"dtype": part.dtype} if kwargs.get("dtype") is torch.float32 else kwargs


class Master(Wrapper):
    """fp32 weights that are gathered as int8 rows, as in torchao; the optimizer sees fp32."""

    @classmethod
    def compute(cls, func, args, kwargs):
        def plain(value):
            return value.parts[0] if isinstance(value, cls) else value

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        in_place = func._schema.is_mutable and not func._schema.name.startswith("aten::_foreach")
        return args[0] if in_place else result

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = self.parts[0]
        missing = -(-outer_size[0] // mesh.size()) - rows.shape[0]
        if missing:
            rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
        return _quantized(rows), (tuple(outer_size), mp_policy.param_dtype)

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        values, scale = outputs
        (size, param_dtype), whole = metadata, (values * scale).to(dtype)
        assert dtype == (param_dtype or torch.float32)
        assert whole.shape[0] >= size[0]
        if out is not None:
            local = out._local_tensor if isinstance(out, DTensor) else out
            local.untyped_storage().copy_(whole.untyped_storage())
            return None
        return whole, (whole,)


class Frozen(Wrapper):
    """int8 weights, as QLoRA's base has them."""

    @classmethod
    def compute(cls, func, args, kwargs):
        raise AssertionError(f"{func} computes with rows that are only to be gathered")

    def fsdp_pre_all_gather(self, mesh):
        return self.parts, None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        values, scale = outputs
        if out is not None:
            torch.mul(values, scale, out=out.data)
            return None
        whole = values * scale
        return whole, (whole,)


class Lora(nn.Module):
    def __init__(self, rows=8):
        super().__init__()
        base = Frozen(*_quantized(torch.randn(rows, 8)))
        self.base = nn.Parameter(base, requires_grad=False)
        self.down = nn.Parameter(torch.randn(8, 2) / 8)
        self.up = nn.Parameter(torch.randn(2, rows) / 8)

    def forward(self, x):
        return torch.tanh(x @ self.base.T + x @ self.down @ self.up)


class Quantized(nn.Module):
    def __init__(self, rows=8):
        super().__init__()
        self.weight = nn.Parameter(Master(torch.randn(rows, 8) / 3))
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias))


class TensorParallel(nn.Module):
    """Two weights that ranks of TP shard, by outputs and by inputs."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        for name, dim in (("up", 0), ("down", 1)):
            part = (torch.randn(8, 8) / 3).chunk(mesh.size(), dim)[mesh.get_local_rank()]
            with torch.no_grad():
                weight = DTensor.from_local(Master(part.contiguous()), mesh, [Shard(dim)])
            setattr(self, name, nn.Parameter(weight))

    def forward(self, x):
        hidden = DTensor.from_local(x, self.mesh, [Replicate()])
        hidden = torch.tanh(nn.functional.linear(hidden, self.up))
        y = nn.functional.linear(hidden, self.down)
        return torch.tanh(y.redistribute(placements=[Replicate()]).to_local())


def _model(kind, *rows):
    torch.manual_seed(2)
    return nn.Sequential(*[kind(*rows) for _ in range(2)], nn.Linear(*rows or (8,), 4))


def _sharded(package, model, **options):
    for block in list(model)[:-1]:
        package.fully_shard(block, **options)
    return package.fully_shard(model, **options)


def _losses(model, rank, steps=5, device="cpu"):
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, found = torch.optim.SGD(trained, lr=0.2, momentum=0.9, foreach=False), []
    batches = []
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        batches.append(torch.randn(3, 8).to(device))
    for batch in batches:
        loss = model(batch).float().square().mean()
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found)


def _moved(model, device):
    """Moves parameters one by one: `nn.Module.to` cannot assign those of a wrapper's device."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            moved = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
            setattr(module, name, moved)
    return model


@pytest.mark.parametrize("kind", [Quantized, Lora])
def test_losses_equal_fsdp2(kind):
    def check():
        rank = torch.distributed.get_rank()
        actual, native = (_losses(_sharded(package, _model(kind)), rank) for package in BOTH)
        assert torch.equal(actual, native), (actual, native)
        assert actual[-1] != actual[0]

    run_ranks(check, 2)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tensors_on_axes_of_tensor_parallelism_train_as_under_fsdp2(tp):
    def check():
        mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("dp", "tp"))
        found, placements = [], []
        for package in BOTH:
            torch.manual_seed(2)
            model = nn.Sequential(*(TensorParallel(mesh["tp"]) for _ in range(2)))
            for block in model:
                package.fully_shard(block, mesh=mesh["dp"])
            model = package.fully_shard(model, mesh=mesh["dp"])
            losses = _losses(model, mesh.get_local_rank("dp"))
            found.append((losses, *(p._local_tensor.parts[0] for p in model.parameters())))
            placements.append([(p.device_mesh, p.placements) for p in model.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), found
        assert found[0][0][-1] != found[0][0][0]
        assert placements[0] == placements[1]
        assert [tuple(p.shape) for p in model.parameters()] == [(8, 8)] * 4

    run_ranks(check, 2 * tp)


def test_chunks_that_fsdp2_does_not_have_are_refused():
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        model = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            on_both = DTensor.from_local(Master(torch.ones(8, 8)), mesh, [Replicate(), Shard(0)])
        model.weight = nn.Parameter(on_both)
        with pytest.raises(ValueError, match="'weight', a DTensor on the axes of fully_shard"):
            fsdp.fully_shard(model, mesh=mesh["dp"])
        weight = DTensor.from_local(Master(torch.ones(8, 8)), mesh["dp"], [Shard(0)])
        model.weight = nn.Parameter(weight.detach())
        with pytest.raises(ValueError, match="that are not the last of the mesh"):
            fsdp.fully_shard(model, mesh=mesh["tp"])

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        (Quantized, 2),
        (Lora, 1),
        # On one rank no collective orders the copy before it.
        (Quantized, 1),
        pytest.param(Lora, 2, marks=pytest.mark.slow),
    ],
)
def test_losses_on_a_simulated_device_equal_the_cpus(kind, ranks):
    def check():
        def losses(device):
            mesh = init_device_mesh(device, (ranks,))
            model = _sharded(fsdp, _moved(_model(kind), device), mesh=mesh, strategy="native")
            return _losses(model, mesh.get_rank(), device=device).tolist()

        return losses("sim"), losses("cpu")

    for found, expected in run_sim_ranks(check, ranks):
        assert found[0] != found[-1]
        assert found == expected


def test_mixed_precision_and_hsdp_losses_are_close_to_fsdp2():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        models = [
            _sharded(package, _model(Quantized), mesh=mesh, mp_policy=policy) for package in BOTH
        ]
        actual, native = (_losses(model, mesh.get_rank()) for model in models)
        torch.testing.assert_close(actual, native, rtol=1e-5, atol=1e-6)

    run_ranks(check, 4, timeout=120)


def test_int8_weights_are_gathered_in_one_collective_of_fewer_bytes():
    def check():
        model = _sharded(fsdp, _model(Quantized), strategy="native")
        _losses(model, 0, steps=1)
        states = [module._get_fsdp_state() for module in list(model)[:-1]]
        assert [len(state.groups) for state in states] == [2, 2]  # the int8 weight, the bias
        with CommLog() as log:
            states[0].unshard()
        (whole,) = [call for call in log.calls if call.output_bytes > 64]
        # int8 of 4 rows of 8 and a scale for each, on 2 ranks; fp32 would be 256 bytes
        assert whole.output_bytes == 2 * (4 * 8 + 4 * 4)
        unsharded = model[0].weight
        assert unsharded.untyped_storage().nbytes() == 4 * 8 * 8
        states[0].reshard()
        assert unsharded.untyped_storage().nbytes() == 0
        log = CommLog()
        with log:
            _losses(model, 0, steps=1)
        # five groups, those of the blocks gathered twice
        log.assert_counts({"all_gather": 2 * 4 + 1, "reduce_scatter": 5})

    run_ranks(check, 2)


class Releasing(Master):
    """Its unsharded parameter has memory of its own."""

    releases = True

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self):
        return self.releases


def test_gathered_tensors_are_freed_where_the_subclass_says_so():
    """Newer than torch 2.13, where FSDP2 keeps them."""

    def check():
        found = []
        for package in BOTH:
            torch.manual_seed(0)
            model = package.fully_shard(_of(Releasing))
            for step in range(2):
                model(torch.full((1, 8), 1.0 + step)).square().sum().backward()
            found.append([param.grad.full_tensor() for param in model.parameters()])
        model = fsdp.fully_shard(_of(Releasing))
        model.unshard()
        outputs = model._get_fsdp_state().groups[0].all_gather._outputs
        freed = [output.bytes.untyped_storage().nbytes() for output in outputs]
        assert model[0].weight.untyped_storage().nbytes() == 4 * 8 * 8
        Releasing.releases = "yes"
        model.reshard()
        with pytest.raises((ValueError, AssertionError), match="must return a bool"):
            model.unshard()
        Releasing.releases = True
        return freed, [torch.equal(*pair) for pair in zip(*found, strict=True)]

    assert run_ranks(check, 2) == [([0, 0], [True, True])] * 2


def test_frozen_int8_weights_are_not_reduced():
    def check():
        model = _sharded(fsdp, _model(Lora), strategy="native")
        with CommLog() as log:
            _losses(model, 0, steps=1)
        # the all-reduce compares the ranks' plans
        log.assert_counts({"all_gather": 2 * 4 + 1, "reduce_scatter": 3, "all_reduce": 1})
        assert model[0].base._local_tensor.parts[0].dtype == torch.int8
        assert isinstance(model[0].down.placements[0], RaggedShard)

    run_ranks(check, 2)


@pytest.mark.parametrize("rows", [7, 1])
def test_uneven_chunks_train_and_are_padded(rows):
    """The second rank has 3 of 7 rows, and none of 1; the hook pads what is gathered."""

    def check():
        rank = torch.distributed.get_rank()
        torch.manual_seed(2)
        model = nn.Sequential(Quantized(rows), nn.Linear(rows, 4))
        alone = nn.Sequential(Quantized(rows), nn.Linear(rows, 4))
        with torch.no_grad():
            values, scale = _quantized(model[0].weight.detach().parts[0])
            alone[0].weight = nn.Parameter(values * scale)
            alone[0].bias.copy_(model[0].bias)
            alone[1].load_state_dict(model[1].state_dict())
        sharded = _sharded(fsdp, model)
        torch.manual_seed(3)
        x = torch.randn(6, 8)
        sharded(x[rank * 3 : rank * 3 + 3]).square().mean().backward()
        alone(x).square().mean().backward()
        for mine, wanted in zip(sharded.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)
        assert sharded[0].weight.to_local().shape[0] == (-(-rows // 2), rows // 2)[rank]

    run_ranks(check, 2)


def test_state_dict_has_the_tensor_subclass():
    def check():
        model = _sharded(fsdp, _model(Quantized))
        _losses(model, 0, steps=1)
        state = model.state_dict()
        weight = state["0.weight"]
        assert isinstance(weight, DTensor)
        assert isinstance(weight._local_tensor, Master)
        copy = {name: _clone(value) for name, value in state.items()}
        wanted = _losses(model, 0, steps=1)
        model.load_state_dict(copy)
        assert torch.equal(_losses(model, 0, steps=1), wanted)

    run_ranks(check, 2)


def _clone(value):
    return DTensor(value._local_tensor.clone(), value._spec, requires_grad=False)


class OneHook(Master):
    fsdp_post_all_gather = property()


class Unpadded(Master):
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.parts[0],), None


class Growing(Master):
    def fsdp_pre_all_gather(self, mesh):
        Growing.calls += 1
        return (self.parts[0].new_zeros(Growing.calls, 1),), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        whole = torch.zeros(8, 8)
        return (whole, (whole,)) if out is None else None


class Short(Master):
    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return outputs[0][:2], ()


class Three(Master):
    def fsdp_pre_all_gather(self, a, b, c):
        return (), None


def _of(kind, rows=8):
    model = nn.Sequential(Quantized(rows))
    model[0].weight = nn.Parameter(kind(torch.randn(rows, 8)))
    return model


def _with(weight):
    model = nn.Linear(8, 8)
    model.weight = weight
    return model


def test_wrong_all_gather_hooks_are_refused_by_name():
    def check():
        with pytest.raises(ValueError, match=r"'0.weight' is a OneHook with fsdp_pre_all_gather"):
            fsdp.fully_shard(_of(OneHook))
        weight = nn.Linear(8, 8).weight
        weight.fsdp_should_release_all_gather_outputs_after_post_all_gather = lambda: True
        with pytest.raises(ValueError, match="which requires fsdp_pre_all_gather and"):
            fsdp.fully_shard(_with(weight))
        x, Growing.calls = torch.ones(1, 8), 0
        for kind, rows, message in (
            (Unpadded, 7, r"'0.weight' of \(7, 8\) .* unevenly over 2 ranks"),
            (Short, 8, r"'0.weight' gave a tensor of \(2, 8\); expected \(8, 8\)"),
            (Three, 8, r"'0.weight' takes 3 arguments"),
        ):
            model = fsdp.fully_shard(_of(kind, rows))
            last = torch.distributed.get_rank() == 1
            if kind is Unpadded and not last:
                continue  # only the ranks with a shorter chunk can know
            with pytest.raises((RuntimeError, ValueError), match=message):
                model._get_fsdp_state().unshard()
        model = fsdp.fully_shard(_of(Growing))
        model(x)
        model.reshard()
        with pytest.raises(RuntimeError, match=r"'0.weight' gave .* before; expected the same"):
            model.unshard()

    run_ranks(check, 2)
