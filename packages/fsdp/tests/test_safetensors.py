"""Folders of safetensors: each rank reads and writes its shards, as Hugging Face's."""

import copy
import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp
from fsdp.checkpoint import TensorPart, load_safetensors, save_safetensors
from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit import CommLog, run_ranks


class Model(nn.Module):
    """Has rows that ranks do not divide, a scalar, buffers, tied weights and bfloat16."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.qkv = nn.Linear(6, 12)
        self.up = nn.Linear(6, 8, dtype=torch.bfloat16)
        self.down = nn.Linear(8, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        hidden = self.norm(self.qkv(x)[:, :6])
        hidden = self.up(hidden.bfloat16()).float()
        return self.head(self.down(hidden.relu()))


def make(seed=0):
    torch.manual_seed(seed)
    model = Model()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    return model


def interleave(model, mesh):
    weight = distribute_tensor(model.qkv.weight.detach(), mesh, [InterleavedShard(0, 3)])
    model.qkv.weight = nn.Parameter(weight)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return mesh


def replicated(model):
    mesh = init_device_mesh("cpu", (2, 2))
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        placed = distribute_tensor(parameter.detach(), mesh, [Replicate(), RaggedShard((), (0, 1))])
        setattr(module, name.rpartition(".")[2], nn.Parameter(placed))
    model.head.weight = model.embedding.weight


def interleaved_and_ragged(model):
    mesh = tensor_parallel(model)
    interleave(model, mesh["tp"])
    fsdp.fully_shard(model, mesh=mesh["dp"])
    assert isinstance(model.up.weight.placements[0], StridedRaggedShard)
    assert isinstance(model.qkv.weight.placements[1], InterleavedShard)


def hybrid(model):
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")))


def fsdp2(model, **options):
    return torch_fsdp.fully_shard(model, ignored_params={model.scale}, **options)  # no scalars


def fsdp2_with_tensor_parallel(model):
    fsdp2(model, mesh=tensor_parallel(model)["dp"])


LAYOUTS = {
    1: {"one process": lambda model: None, "fsdp": fsdp.fully_shard},
    2: {
        "plain": lambda model: None,
        "elements": fsdp.fully_shard,
        "rows": lambda m: fsdp.fully_shard(m, shard_placement_fn=lambda p: fsdp.Rows(2)),
        "whole": lambda m: fsdp.fully_shard(m, shard_placement_fn=lambda p: fsdp.Whole()),
        "FSDP2": fsdp2,
    },
    4: {
        "elements": fsdp.fully_shard,
        "hybrid": hybrid,
        "replicated": replicated,
        "interleaved and ragged": interleaved_and_ragged,
        "FSDP2 and TP": fsdp2_with_tensor_parallel,
    },
}


def write_folder(folder, model):
    """Writes a model with the library, the tied weight once, into two files with an index."""
    folder.mkdir()
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != "head.weight"}
    names = list(tensors)
    files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, of_file in files.items():
        safetensors.torch.save_file({name: tensors[name] for name in of_file}, folder / file)
    weight_map = {name: file for file, of_file in files.items() for name in of_file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_folder(folder):
    """Reads all tensors of a folder with the library."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(model, expected):
    state, wanted = model.state_dict(), expected.state_dict()
    assert list(state) == list(wanted)
    for name, tensor in state.items():
        assert torch.equal(full(tensor), wanted[name]), name
        assert tensor.dtype == wanted[name].dtype


def local_bytes(model):
    """The bytes of this rank's shards, tied ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)


def round_trip(folder, out, ranks):
    for name, shard in LAYOUTS[ranks].items():
        model = make(1)
        shard(model)
        with CommLog() as log:
            result = load_safetensors(model, folder, buffer_bytes=64)
            saved = save_safetensors(model, f"{out}/{name}", max_shard_bytes=300, buffer_bytes=64)
        assert result.bytes_read == local_bytes(model), name
        assert (result.missing, result.unexpected) == ((), ())
        # Names and sizes are pickled into bytes; no tensor is sent.
        assert {call.dtype for call in log.calls} <= {"uint8", "int64"}, log.calls
        assert_equal(model, make(0))
        written = torch.zeros(ranks, dtype=torch.int64)
        written[dist.get_rank()] = saved.bytes_written
        dist.all_reduce(written)
        assert written.sum() == saved.total_bytes, name
        if name in ("plain", "hybrid"):  # ranks with the same tensors take turns
            assert all(written), name


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_reads_its_shards_and_writes_the_same_bytes(tmp_path, ranks):
    write_folder(tmp_path / "in", make(0))
    run_ranks(round_trip, ranks, tmp_path / "in", tmp_path / "out", ranks, timeout=200)
    wanted = read_folder(tmp_path / "in")
    for name in LAYOUTS[ranks]:
        folder = tmp_path / "out" / name
        found = read_folder(folder)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name
        assert all(found[key].dtype == wanted[key].dtype for key in wanted)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())
        assert set(index["weight_map"].values()) == {f.name for f in folder.glob("*.safetensors")}
        assert len(set(index["weight_map"].values())) > 1
        assert not list(folder.glob(".*"))


def test_one_process_without_a_group(tmp_path):
    saved_model = make(0)
    with torch.device("meta"):  # the default device is not that of buffers
        saved = save_safetensors(saved_model, tmp_path / "out")
    assert saved.files == ("model.safetensors",)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    model = make(1)
    load_safetensors(model, tmp_path / "out")
    assert_equal(model, make(0))
    with torch.device("meta"):
        model = Model()
        load_safetensors(model, tmp_path / "out")
    assert_equal(model, make(0))


@pytest.mark.ranks
def test_from_pretrained_reads_what_ranks_have_written(tmp_path):
    transformers = pytest.importorskip("transformers")

    def save(folder):
        model = llama(transformers, 0)
        for layer in model.model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        save_safetensors(model, folder, max_shard_bytes=20_000)
        model.config.save_pretrained(folder)

    run_ranks(save, 2, tmp_path, timeout=120)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_equal(loaded, llama(transformers, 0))


def llama(transformers, seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(num_attention_heads=4, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config)


def on_meta(folder):
    for shard in (lambda model: None, fsdp.fully_shard, fsdp2):
        with torch.device("meta"):
            model = Model()
        shard(model)
        load_safetensors(model, folder)
        assert model.head.weight is model.embedding.weight
        assert_equal(model, make(0))
        if shard is not fsdp2:  # which has one dtype
            tokens = torch.arange(8)
            torch.testing.assert_close(model(tokens), make(0)(tokens))


@pytest.mark.ranks
def test_a_model_on_meta_is_allocated_and_remains_tied(tmp_path):
    write_folder(tmp_path / "in", make(0))
    run_ranks(on_meta, 2, tmp_path / "in")


def through_wrappers(folder):
    model = make(1)
    model.up = checkpoint_wrapper(model.up)
    model.down = torch.compile(model.down, backend="eager")
    fsdp.fully_shard(model)
    load_safetensors(model, folder)
    for name, tensor in model.named_parameters():
        wanted = make(0).get_parameter(
            re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.", "", name)
        )
        assert torch.equal(full(tensor), wanted), name
    save_safetensors(model, folder.parent / "out")
    replicated = nn.parallel.DistributedDataParallel(make(1))
    load_safetensors(replicated, folder.parent / "out")
    assert_equal(replicated.module, make(0))


@pytest.mark.ranks
def test_names_are_those_of_the_model_without_wrappers(tmp_path):
    write_folder(tmp_path / "in", make(0))
    run_ranks(through_wrappers, 2, tmp_path / "in")
    assert read_folder(tmp_path / "out").keys() == read_folder(tmp_path / "in").keys()


def of_other_strides(folder):
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 6, bias=False)
    full_weight = torch.arange(24.0).view(6, 4)
    local = full_weight.chunk(2)[dist.get_rank()].t().contiguous().t()  # column-major
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    save_safetensors(model, folder)
    model.weight.data.zero_()
    load_safetensors(model, folder)
    assert not model.weight.to_local().is_contiguous()
    assert torch.equal(full(model.weight), full_weight)


@pytest.mark.ranks
def test_local_tensors_that_are_not_contiguous(tmp_path):
    run_ranks(of_other_strides, 2, tmp_path / "out")
    assert torch.equal(read_folder(tmp_path / "out")["weight"], torch.arange(24.0).view(6, 4))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 4, 5))
        self.bias = nn.Parameter(torch.randn(5))


def of_experts(name):
    if name == "bias":
        return "layer.bias"
    return [
        TensorPart(f"experts.{expert}.{part}", (2, 5), (expert, 2 * row, 0), (1, 2, 5))
        for expert in range(3)
        for row, part in enumerate(("w1", "w3"))
    ]


def experts(seed):
    torch.manual_seed(seed)
    return Experts()


def load_and_save_experts(folder, out):
    model = experts(1)
    fsdp.fully_shard(model)
    load_safetensors(model, folder, rename=of_experts)
    assert_equal(model, experts(0))
    save_safetensors(model, out, rename=of_experts)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_parameter_is_several_tensors_in_files(tmp_path, ranks):
    weight, bias = experts(0).parameters()
    tensors = {
        f"experts.{e}.{part}": weight[e, rows].detach().clone()
        for e in range(3)
        for part, rows in (("w1", slice(2)), ("w3", slice(2, 4)))
    }
    tensors["layer.bias"] = bias.detach()
    (tmp_path / "in").mkdir()
    safetensors.torch.save_file(tensors, tmp_path / "in" / "model.safetensors")
    run_ranks(load_and_save_experts, ranks, tmp_path / "in", tmp_path / "out")
    found = read_folder(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def stage(folder):
    """A pipeline: the first rank has `embedding`, the second `head`, of one checkpoint."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    parts = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5)})
    wanted = copy.deepcopy(parts)
    del parts[("head", "embedding")[rank]]
    save_safetensors(parts, folder)
    for tensor in parts.parameters():
        tensor.data.zero_()
    result = load_safetensors(parts, folder)
    assert result.unexpected == ()
    for name, tensor in parts.state_dict().items():
        assert torch.equal(tensor, wanted.state_dict()[name])


@pytest.mark.ranks
def test_ranks_have_different_modules_of_one_folder(tmp_path):
    run_ranks(stage, 2, tmp_path / "out")
    assert sorted(read_folder(tmp_path / "out")) == ["embedding.weight", "head.bias", "head.weight"]


class Halves(nn.Module):
    """Has one parameter, and two tensors in state dicts, which hooks copy."""

    def __init__(self):
        super().__init__()
        self.both = nn.Parameter(torch.randn(4, 3))
        self.register_state_dict_post_hook(self.divide)
        self.register_load_state_dict_pre_hook(self.unite)

    @staticmethod
    def divide(module, state, prefix, metadata):
        first, second = state.pop(prefix + "both").chunk(2)
        state |= {prefix + "first": first.clone(), prefix + "second": second.clone()}

    @staticmethod
    def unite(module, state, prefix, *args):
        halves = [state.pop(prefix + name) for name in ("first", "second")]
        state[prefix + "both"] = torch.cat(halves)


def test_hooks_of_state_dicts_that_copy_tensors_see_the_loaded_values(tmp_path):
    model, other = Halves(), Halves()
    save_safetensors(model, tmp_path / "out")
    assert sorted(read_folder(tmp_path / "out")) == ["first", "second"]
    load_safetensors(other, tmp_path / "out")
    assert torch.equal(other.both, model.both)


def test_tensors_begin_at_multiples_of_their_element_size(tmp_path):
    model = nn.ParameterDict({"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3)})
    save_safetensors(model, tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data])
    assert header.pop("__metadata__") == {"format": "pt"}  # which transformers expects
    for name, element_size in {"a": 2, "b": 4}.items():
        assert (data + header[name]["data_offsets"][0]) % element_size == 0


def test_dtype_casts_floating_point_tensors_and_no_others(tmp_path):
    save_safetensors(make(0), tmp_path / "out", dtype=torch.float16)
    found, wanted = read_folder(tmp_path / "out"), make(0).state_dict()
    for name, tensor in found.items():
        cast = torch.float16 if wanted[name].is_floating_point() else torch.int64
        assert torch.equal(tensor, wanted[name].to(cast)), name
        assert tensor.dtype == cast, name
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    model = make(1)
    load_safetensors(model, tmp_path / "out")
    rounded = {
        name: tensor.half().to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in wanted.items()
    }
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in model.state_dict().items())


def test_strict_false_loads_what_both_have(tmp_path):
    tensors = make(0).state_dict()
    del tensors["head.weight"], tensors["scale"]
    safetensors.torch.save_file(tensors | {"more": torch.ones(1)}, tmp_path / "model.safetensors")
    model = make(1)
    result = load_safetensors(model, tmp_path, strict=False)
    assert (result.missing, result.unexpected) == (("scale",), ("more",))
    assert torch.equal(model.scale, make(1).scale)
    assert torch.equal(model.qkv.weight, make(0).qkv.weight)


def test_rename_leaves_tensors_out(tmp_path):
    def rename(name):
        return None if name.startswith("norm") else f"model.{name}"

    save_safetensors(make(0), tmp_path / "out", rename=rename)
    assert "model.scale" in (found := read_folder(tmp_path / "out"))
    assert not [name for name in found if "norm" in name]
    model = make(1)
    load_safetensors(model, tmp_path / "out", rename=rename)
    assert torch.equal(model.norm.weight, make(1).norm.weight)
    assert torch.equal(model.down.weight, make(0).down.weight)


def test_files_may_have_any_of_the_names_of_a_tied_weight(tmp_path):
    tensors = make(0).state_dict()
    del tensors["embedding.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    model = make(1)
    load_safetensors(model, tmp_path)
    assert_equal(model, make(0))


def load_while_unsharded(folder):
    model = make(1)
    fsdp.fully_shard(model, reshard_after_forward=False)
    tokens = torch.arange(8)
    model(tokens)
    assert not isinstance(model.qkv.weight, DTensor)
    load_safetensors(model, folder)
    torch.testing.assert_close(model(tokens), make(0)(tokens))


@pytest.mark.ranks
def test_a_model_that_is_unsharded_computes_with_the_loaded_weights(tmp_path):
    write_folder(tmp_path / "in", make(0))
    run_ranks(load_while_unsharded, 2, tmp_path / "in")
