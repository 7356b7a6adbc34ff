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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from fsdp.checkpoint import TensorPart, check_safetensors, load_safetensors, save_safetensors
from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit import CommLog, run_ranks
from testkit.inspection.memory import peak_bytes


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
        written = torch.tensor(saved.bytes_written)
        dist.all_reduce(written)
        assert written == saved.total_bytes, name


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
    saved = save_safetensors(make(0), tmp_path / "out")
    assert saved.files == ("model.safetensors",)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    model = make(1)
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


class FilePages(TorchDispatchMode):
    """Measures the maximum of the resident bytes of a file's mappings, after each copy."""

    def __init__(self, file):
        super().__init__()
        self.file, self.peak = str(file), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.copy_.default:
            return result
        resident, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                inside = line.endswith(self.file)
            elif inside and line.startswith("Rss:"):
                resident += int(line.split()[1]) * 1024
        self.peak = max(self.peak, resident)
        return result


MIB = 2**20


def large(layers, size):
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))


def load_pages(folder):
    with torch.device("meta"):
        model = fsdp.fully_shard(large(1, 4096))
    with FilePages(Path(folder) / "model.safetensors") as pages:
        result = load_safetensors(model, folder)
    return result.bytes_read, pages.peak


@pytest.mark.ranks
def test_a_rank_touches_its_pages_of_a_file_and_no_others(tmp_path):
    state = {"0.weight": torch.zeros(4096, 4096, dtype=torch.bfloat16)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    for bytes_read, touched in run_ranks(load_pages, 4, tmp_path, timeout=200):
        assert bytes_read == 8 * MIB  # a quarter
        # Linux maps pages around one that is touched, up to 2 MiB of them.
        assert 8 * MIB <= touched <= 8 * MIB + 4 * MIB


def load_into_memory(folder):
    with torch.device("meta"):
        model = large(4, 1024)
    for layer in model:
        fsdp.fully_shard(layer)
    peak, result = peak_bytes(lambda: load_safetensors(model, folder, buffer_bytes=MIB))
    return peak, result.bytes_read


@pytest.mark.ranks
def test_loading_allocates_the_shards_and_those_of_one_group_again(tmp_path):
    state = large(4, 1024).bfloat16().state_dict()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    for peak, bytes_read in run_ranks(load_into_memory, 2, tmp_path, timeout=120):
        assert bytes_read == 4 * MIB  # half
        assert peak <= (8 + 2) * MIB + 100_000  # of float32


def save_large(folder):
    model = fsdp.fully_shard(large(1, 2048))
    peak, saved = peak_bytes(
        lambda: save_safetensors(model, folder, dtype=torch.bfloat16, buffer_bytes=MIB // 4)
    )
    return peak, saved.bytes_written


@pytest.mark.ranks
def test_saving_allocates_the_buffer_only(tmp_path):
    for peak, written in run_ranks(save_large, 2, tmp_path / "out", timeout=120):
        assert written == 4 * MIB
        assert peak <= MIB // 4 + 100_000
    [weight] = read_folder(tmp_path / "out").values()
    assert (weight.dtype, weight.shape) == (torch.bfloat16, (2048, 2048))


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


def test_parts_that_do_not_cover_a_tensor_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"boxes of 'gate_up' of shape \(3, 4, 5\), got .* 50 ele"):
        save_safetensors(experts(0), tmp_path, rename=lambda name: of_experts(name)[:-1])


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


def edit(folder, change):
    tensors = read_folder(folder)
    change(tensors)
    for file in folder.iterdir():
        file.unlink()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


INVALID = {
    "missing": (lambda t: t.pop("scale"), "expected the tensor 'scale' in .*, got none; load"),
    "unexpected": (lambda t: t.update(more=torch.ones(1)), "got 'more', which it does not have"),
    "shape": (
        lambda t: t.update({"down.weight": torch.ones(6, 9)}),
        r"expected 'down.weight' of shape \(6, 8\) in .*, got \(6, 9\); load",
    ),
    "dtype": (
        lambda t: t.update({"norm.num_batches_tracked": torch.tensor(1.0)}),
        r"'norm.num_batches_tracked' in .* to have a dtype like torch.int64, .* torch.float32;",
    ),
}


def load_invalid(folders):
    for folder, message in folders:
        model = make(1)
        fsdp.fully_shard(model)
        with pytest.raises(ValueError, match=message):
            load_safetensors(model, folder)
        assert_equal(model, make(1))
        with torch.device("meta"):
            model = Model()
        with pytest.raises(ValueError, match=message):
            load_safetensors(model, folder)
        assert model.scale.is_meta


@pytest.mark.ranks
def test_a_folder_of_another_model_is_refused_on_every_rank_and_changes_nothing(tmp_path):
    for name, (change, message) in INVALID.items():
        write_folder(tmp_path / name, make(0))
        edit(tmp_path / name, change)
        with pytest.raises(ValueError, match=message):
            check_safetensors(make(1), tmp_path / name)
    run_ranks(load_invalid, 2, [(tmp_path / name, INVALID[name][1]) for name in INVALID])


def one_rank_fails(folder):
    path = folder if dist.get_rank() == 0 else folder / "no"
    with pytest.raises(ValueError, match=r"got .*/no, which is no folder"):
        load_safetensors(make(0), path)
    model = nn.ModuleDict({"a": nn.Linear(2, 2 + dist.get_rank())})
    with pytest.raises(ValueError, match=r"one shape .* of 'a.weight' .* \(2, 2\).* \(3, 2\)"):
        save_safetensors(model, folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.ranks
def test_an_error_of_one_rank_is_raised_by_all(tmp_path):
    write_folder(tmp_path / "in", make(0))
    run_ranks(one_rank_fails, 2, tmp_path / "in")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "model.safetensors or model.safetensors.index.json, .* which has neither"),
        ({"model.safetensors": "x"}, "model.safetensors cannot be read"),
        ({"model.safetensors.index.json": "{"}, "index.json cannot be read"),
        ({"model.safetensors.index.json": "{}"}, "cannot be read .it has no weight_map"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors"}}'},
            "b.safetensors cannot be read",
        ),
    ],
)
def test_damaged_folders_are_one_sentence(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_safetensors(make(0), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_buffer_that_no_file_has_is_refused_on_meta(tmp_path):
    save_safetensors(nn.Linear(2, 2), tmp_path / "out")
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.register_buffer("frequencies", torch.ones(2), persistent=False)
    with pytest.raises(ValueError, match=r"values of the buffer 'frequencies', .* got it on meta"):
        load_safetensors(model, tmp_path / "out")
    assert model.weight.is_meta


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(2, 2, dtype=torch.complex128), {}, "a dtype of safetensors for 'weight', got"),
        (nn.Linear(2, 2), {"rename": lambda name: "same"}, "different names in files, got 'same'"),
    ],
)
def test_what_the_format_cannot_have_is_refused(tmp_path, model, options, message):
    with pytest.raises(ValueError, match=message):
        save_safetensors(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_weights_are_not_overwritten(tmp_path):
    save_safetensors(make(0), tmp_path / "out")
    with pytest.raises(ValueError, match=r"a folder without weights, got .* with model.safetensor"):
        save_safetensors(make(1), tmp_path / "out")
    assert torch.equal(read_folder(tmp_path / "out")["scale"], make(0).scale)


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"step": 1}

    def set_extra_state(self, state):
        pass


def test_values_that_are_no_tensors_are_refused_or_left_out(tmp_path):
    model = WithExtraState(2, 2)
    with pytest.raises(ValueError, match="a state dict of tensors, got dict for '_extra_state'"):
        save_safetensors(model, tmp_path / "out")
    save_safetensors(model, tmp_path / "out", rename=lambda n: None if n == "_extra_state" else n)
    assert sorted(read_folder(tmp_path / "out")) == ["bias", "weight"]


def partial_sum():
    mesh = init_device_mesh("cpu", (2,))
    from torch.distributed.tensor import Partial

    model = nn.Linear(2, 2, bias=False)
    local = torch.ones(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Partial()]))
    with pytest.raises(ValueError, match="expected a reduced tensor for 'weight'"):
        save_safetensors(model, "/nowhere")


@pytest.mark.ranks
def test_a_tensor_that_is_not_reduced_is_refused():
    run_ranks(partial_sum, 2)
