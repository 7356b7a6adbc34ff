"""Static mode with checkpoints, activation checkpointing and torch.compile."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from plan_api import Phase, installed, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_dropout": 0.1}


def _fully_shard(plan):
    return plan.fully_shard(r"model\.layers\.\d+", "dp").fully_shard("", "dp")


def _zero_1(plan):
    return plan.shard(r".*\.weight", Shard(0), "dp", Phase.OPTIM)


def _zero_3(plan):
    return plan.shard(r".*\.weight", Shard(0), "dp").shard(
        r".*\.weight", Replicate(), "dp", Phase.RUN
    )


def _llama(mesh, mode, prepare=None, seed=1, data_parallel=None, guard_steps=0, **changes):
    """`prepare` changes the model before it is parallelized, `data_parallel` its plan."""
    model = models.llama(**HEADS | changes)
    models.reinitialize(model, seed)
    if prepare is not None:
        prepare(model)
    plan = zoo.llama(mesh, dp="dp", sp=mesh.size(1) > 1)
    if data_parallel is not None:
        data_parallel(plan)
    return parallelize(
        model, plan, mode=mode, guard_steps=guard_steps if mode == "static" else None
    )


def _train(model, optimizer, steps, seed):
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = models.token_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _local_params(model):
    return {
        name: param.detach()._local_tensor if isinstance(param, DTensor) else param.detach()
        for name, param in model.named_parameters()
    }


CASES = {
    "TP + SP": ((1, 2), None),
    "fully_shard": ((2, 1), _fully_shard),
    "ZeRO-1": ((2, 1), _zero_1),
    "ZeRO-3": ((2, 1), _zero_3),
}


def each(*fast):
    """Runs a test in these cases in the fast tier, and in the others in the slow one."""
    cases = [
        pytest.param(*case, id=name, marks=() if name in fast else pytest.mark.slow)
        for name, case in CASES.items()
    ]
    return pytest.mark.parametrize(("shape", "data_parallel"), cases)


def _different(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _mesh(shape=(1, 2)):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


@each("fully_shard")
def test_checkpoints_of_one_mode_load_in_the_other(tmp_path, shape, data_parallel):
    """Model and optimizer; training continues to the same bits, whichever mode saved and loaded."""

    def check(folder):
        mesh = _mesh(shape)
        ends = {}
        for saves in ("eager", "static"):
            model = _llama(mesh, saves, data_parallel=data_parallel)
            optimizer = torch.optim.AdamW(model.parameters())
            _train(model, optimizer, 2, seed=3)
            parts, optimizer_state = get_state_dict(model, optimizer)
            dcp.save(
                {"model": parts, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{saves}"
            )
            ends[saves, saves, "continued"] = (
                _train(model, optimizer, 2, seed=4),
                _local_params(model),
            )
            for loads in ("eager", "static"):
                other = _llama(mesh, loads, seed=9, data_parallel=data_parallel)
                its = torch.optim.AdamW(other.parameters())
                parts, optimizer_state = get_state_dict(other, its)
                dcp.load(
                    {"model": parts, "optimizer": optimizer_state},
                    checkpoint_id=f"{folder}/{saves}",
                )
                set_state_dict(other, its, model_state_dict=parts, optim_state_dict=optimizer_state)
                assert all(isinstance(one, DTensor) for one in other.parameters())
                ends[saves, loads, "loaded"] = (_train(other, its, 2, seed=4), _local_params(other))
        losses, parts = ends["eager", "eager", "continued"]
        return {
            case: (its_losses == losses, _different(parts, its_parts))
            for case, (its_losses, its_parts) in ends.items()
        }

    for found in run_ranks(check, 2, str(tmp_path), timeout=240):
        assert len(found) == 6
        assert {case: facts for case, facts in found.items() if facts != (True, [])} == {}


def _recompute_blocks(model, **options):
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


def _of_transformers(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _reentrant(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})


def _save_products(_, operator, *args, **kwargs):
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _save_products_of_blocks(model):
    contexts = partial(create_selective_checkpoint_contexts, _save_products)
    _recompute_blocks(model, context_fn=contexts)


@each("TP + SP")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_activation_checkpointing_is_bitwise_equal(shape, data_parallel):
    """Full blocks, by torch and by transformers, and all but matrix products; with dropout."""
    policies = {
        "none": None,
        "blocks": _recompute_blocks,
        "transformers": _of_transformers,
        "reentrant": _reentrant,
        "selective": _save_products_of_blocks,
    }
    if data_parallel is _zero_3:  # parameters are gathered again where its storage is read
        del policies["selective"]

    def check():
        mesh = _mesh(shape)
        ends = {}
        for name, policy in policies.items():
            model = _llama(mesh, "static", policy, data_parallel=data_parallel)
            recomputed = []
            model.model.layers[1].mlp.up_proj.register_forward_hook(
                lambda *_, seen=recomputed: seen.append(1)
            )
            optimizer = torch.optim.AdamW(model.parameters())
            ends[name] = (
                _train(model, optimizer, 3, seed=3),
                _local_params(model),
                len(recomputed),
            )
        for name in ("none", "blocks"):
            model = _llama(mesh, "eager", policies[name], data_parallel=data_parallel)
            optimizer = torch.optim.AdamW(model.parameters())
            ends[name, "eager"] = (_train(model, optimizer, 3, seed=3), _local_params(model), 0)
        losses, parts, once = ends["none"]
        assert once == 3
        return {
            name: (its_losses == losses, _different(parts, its_parts), times)
            for name, (its_losses, its_parts, times) in ends.items()
        }

    for found in run_ranks(check, 2, timeout=240):
        for name, (losses, unlike, times) in found.items():
            assert losses, name
            assert unlike == [], name
            assert times == (6 if name in policies and name != "none" else times), name


def _compile_call(layer, backend):
    layer.compile(backend=backend)


def _compile_forward(layer, backend):
    layer.forward = torch.compile(layer.forward, backend=backend)


# Raised inside of Dynamo and inductor.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("backend", "within", "shape", "data_parallel"),
    [
        ("aot_eager", 0.0, (1, 2), None),
        ("aot_eager", 0.0, (2, 1), _fully_shard),
        ("inductor", 1e-5, (1, 2), None),  # compiles C++ for two minutes
    ],
)
@pytest.mark.parametrize("compile_layer", [_compile_call, _compile_forward])
@pytest.mark.slow  # test_policies compiles layers of both modes
def test_compiled_blocks_equal_eager_blocks(backend, within, shape, data_parallel, compile_layer):
    def check():
        mesh = _mesh(shape)
        ends = []
        for compiles in (False, True):
            changes = {"attention_dropout": 0.0, "num_hidden_layers": 1}
            # Its first step is compared with Eager without compiled code.
            model = _llama(mesh, "static", data_parallel=data_parallel, guard_steps=1, **changes)
            if compiles:
                compile_layer(model.model.layers[0], backend)
            optimizer = torch.optim.AdamW(model.parameters())
            with torch._dynamo.config.patch(error_on_recompile=True):
                ends.append((_train(model, optimizer, 3, seed=3), _local_params(model)))
            assert installed(model).coverage.unused_sites == []
        (losses, parts), (its_losses, its_parts) = ends
        # A shard of fully_shard may be empty.
        unlike = [(parts[name] - its_parts[name]).abs() for name in parts if parts[name].numel()]
        far = max(float(one.max()) for one in unlike)
        counters = torch._dynamo.utils.counters
        return losses, its_losses, far, dict(counters["stats"]), dict(counters["graph_break"])

    for losses, its_losses, far, stats, breaks in run_ranks(check, 2, timeout=400):
        assert its_losses == pytest.approx(losses, abs=within, rel=0)
        assert far <= within * 100
        assert stats["unique_graphs"] >= 1
        assert breaks == {}
