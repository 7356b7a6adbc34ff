"""On real ranks: training with the fast path gives bit for bit the numbers of native torch."""

import contextlib
import functools
import threading

import pytest

from testkit import assert_bitwise, models, run_ranks

pytestmark = pytest.mark.ranks


def _llama():
    """A small LLaMA with as many key-value heads as heads, and a batch of ids."""
    import torch

    return models.llama(num_key_value_heads=4), torch.randint(0, 64, (2, 8))


def _tensor_parallel(model, mesh):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj",
               "mlp.up_proj")  # fmt: skip
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj",
                                                                      "mlp.down_proj")}  # fmt: skip
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def _sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _checkpointed(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
    return model


def _train(kind):
    """Losses and last gradients of three steps, as plain tensors in order."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    size = torch.distributed.get_world_size()
    model, ids = _llama()
    cast = contextlib.nullcontext
    if kind == "fsdp":
        _sharded(model, init_device_mesh("cpu", (size,)))
    elif kind == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        _sharded(_tensor_parallel(model, mesh["tp"]), mesh["dp"])
    else:
        _tensor_parallel(model, init_device_mesh("cpu", (size,)))
    if kind == "checkpointing":
        _checkpointed(model)
    if kind == "autocast":
        cast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    # One group of tensors each: native refuses to mix meshes, and plain tensors, in a foreach.
    optimizers = [torch.optim.AdamW([p], lr=1e-2, foreach=True) for p in model.parameters()]
    seen = []
    for _ in range(3):
        with cast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        seen.append(loss.detach())
        seen += [p.grad for p in model.parameters()]
        seen = [x.to_local() if isinstance(x, DTensor) else x for x in seen]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [x.clone() for x in seen]


def _both(function):
    """What a function returns with native torch and with the fast path, and how often it hit."""
    import dtensor_rules

    dtensor_rules.disable()  # a rank keeps what the test before has left on
    native = function()
    with dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        actual = function()
        hits = sum(op.rule + op.cache for op in dtensor_rules.stats().values())
    return native, actual, hits


def _assert_same(function, world_size):
    for native, actual, hits in run_ranks(_both, world_size, function, timeout=240):
        assert hits > 0, "nothing took the fast path"
        assert len(native) == len(actual)
        for index, (expected, got) in enumerate(zip(native, actual, strict=True)):
            assert_bitwise(got, expected, f"tensor {index}")


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        pytest.param("tp", 2, id="tensor parallel on 2"),
        pytest.param("tp", 4, id="tensor parallel on 4", marks=pytest.mark.slow),
        pytest.param("2d", 4, id="fsdp x tensor parallel on 2x2", marks=pytest.mark.slow),
        pytest.param("fsdp", 2, id="fsdp on 2"),
        pytest.param("checkpointing", 2, id="activation checkpointing", marks=pytest.mark.slow),
        pytest.param("autocast", 2, id="autocast"),
    ],
)
def test_three_steps_of_llama(kind, world_size):
    _assert_same(functools.partial(_train, kind), world_size)


def _redistribute():
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, seen = torch.arange(42.0).view(7, 6), []
    for source in (Replicate(), Shard(0), Shard(1), Partial()):
        for target in (Replicate(), Shard(0), Shard(1)):
            start = DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()])
            placed = start if source == Partial() else start.redistribute(placements=[source])
            # An operator between them, so that there is a plan to execute.
            moved = (placed * 2).redistribute(placements=[target])
            other = torch.ops.aten.add.Tensor(placed, moved)
            # A partial sum and a replica: the rule chooses which rank has what, the sum is not.
            seen += [moved.to_local(), other.full_tensor()]
    return seen


@pytest.mark.parametrize("world_size", [2, 4])
def test_redistribution_of_uneven_shards(world_size):
    _assert_same(_redistribute, world_size)


def _embed(rows, *, tied):
    """Ids of one shape and changing values: what is masked is another part each time."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    table = distribute_tensor(torch.randn(rows, 4), mesh, [Shard(0)]).requires_grad_()
    seen = []
    for step in range(6):
        ids = torch.full((2, 3), 0 if step % 2 else rows - 1) - torch.arange(3) * (-1) ** (step % 2)
        ids = DTensor.from_local(ids, mesh, [Replicate()], run_check=False)
        embedded = F.embedding(ids, table).redistribute(placements=[Replicate()])
        # Reduces the gradient, which native cannot turn into that of a masked sum by itself.
        embedded = embedded.redistribute(placements=[Replicate()])
        result = F.linear(embedded, table) if tied else embedded
        (gradient,) = torch.autograd.grad((result * result).sum(), table)
        seen += [embedded.detach().to_local(), gradient.to_local()]
    return seen


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("rows", [8, 7], ids=["even", "uneven"])
def test_a_vocabulary_that_is_sharded(rows, tied):
    _assert_same(functools.partial(_embed, rows, tied=tied), 2)


def _save_and_load(folder):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import dtensor_rules

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folder = f"{folder}/{dtensor_rules.is_enabled()}"
    saved = distribute_tensor(torch.arange(42.0).view(7, 6), mesh, [Shard(0)]) * 2 * 3
    dcp.save({"tensor": saved}, checkpoint_id=folder)
    loaded = {"tensor": torch.zeros_like(saved)}
    dcp.load(loaded, checkpoint_id=folder)
    return [loaded["tensor"].to_local(), saved.to_local()]


def test_a_distributed_checkpoint_is_saved_and_loaded(tmp_path):
    _assert_same(functools.partial(_save_and_load, str(tmp_path)), 2)


def _compiled():
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
    y = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()]).requires_grad_()
    run = torch.compile(lambda a, b: (a @ b).relu() * 2, backend="aot_eager", fullgraph=True)
    seen = []
    for _ in range(2):
        result = run(x * 1, y)  # eager before it and after
        (gradient,) = torch.autograd.grad((result * result).sum(), y)
        seen += [result.detach().to_local(), gradient.full_tensor()]
    return seen


def test_eager_around_torch_compile():
    _assert_same(_compiled, 2)


def _threads():
    """Four threads, each with operators that need no other rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seen = [None] * 4

    def work(index):
        x = DTensor.from_local(torch.full((2, 4), index + 1.0), mesh, [Shard(0)], run_check=False)
        for step in range(50):
            x = ((x * 2 + step) / 2).t().t().softmax(-1) + x
        seen[index] = x.to_local()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_four_threads():
    _assert_same(_threads, 2)
