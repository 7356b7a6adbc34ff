"""What `load_safetensors` and `save_safetensors` refuse, and that nothing is changed then."""

import resource
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import fsdp
from fsdp.checkpoint import TensorPart, check_safetensors, load_safetensors, save_safetensors
from testkit import run_ranks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(8, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(0.5))


def make(seed):
    torch.manual_seed(seed)
    model = Model()
    nn.init.normal_(model.scale)
    return model


def write(folder, model, change=lambda tensors: None):
    """Writes a model with the library, with a change to its tensors."""
    folder.mkdir()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def read(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def assert_equal(model, expected):
    for name, tensor in model.state_dict().items():
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(value, expected.state_dict()[name]), name


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
        write(tmp_path / name, make(0), change)
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
    with pytest.raises(FileExistsError, match="taken"):
        save_safetensors(make(0), folder / "taken" if dist.get_rank() == 0 else folder / "none")


@pytest.mark.ranks
def test_an_error_of_one_rank_is_raised_by_all(tmp_path):
    write(tmp_path / "in", make(0))
    (tmp_path / "in" / "taken").touch()
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


def test_a_dtype_that_torch_has_not_is_refused(tmp_path):
    header = b'{"weight":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"xx")
    with pytest.raises(ValueError, match=r"a dtype of torch for 'weight' in .*, got F4; write"):
        load_safetensors(nn.Linear(2, 2, bias=False), tmp_path)


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
        (nn.Linear(2, 2), {"dtype": torch.int8}, "a floating-point dtype .*dtype=torch.int8"),
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
    assert torch.equal(read(tmp_path / "out")["scale"], make(0).scale)


def test_files_of_ranks_that_were_killed_are_removed(tmp_path):
    partial = tmp_path / ".model-00001-of-00002.safetensors.partial"
    partial.write_bytes(b"x")
    save_safetensors(make(0), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def file_too_large(folder):
    """Rank 0 can create the first file, and not the second one."""
    model = nn.ModuleDict({"small": nn.Linear(2, 2), "large": nn.Linear(200, 200)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_safetensors(model, folder, max_shard_bytes=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert not list(folder.glob("[!.]*"))
    dist.barrier()
    save_safetensors(model, folder)
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]


@pytest.mark.ranks
def test_a_folder_that_could_not_be_written_has_no_weights_and_can_be_written_again(tmp_path):
    run_ranks(file_too_large, 2, tmp_path / "out")


def test_files_get_their_names_when_all_are_written_and_the_index_is_last(tmp_path, monkeypatch):
    renamed, rename = [], Path.rename

    def record(self, target):
        assert not target.exists()
        renamed.append(target.name)
        assert len(list(tmp_path.glob("model-*"))) == len(renamed) - 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", record)
    saved = save_safetensors(make(0), tmp_path, max_shard_bytes=100)
    assert len(saved.files) > 2
    assert renamed == [*saved.files, "model.safetensors.index.json"]


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
    assert sorted(read(tmp_path / "out")) == ["bias", "weight"]


def partial_sum():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(2, 2, bias=False)
    local = torch.ones(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Partial()]))
    with pytest.raises(ValueError, match="expected a reduced tensor for 'weight'"):
        save_safetensors(model, "/nowhere")


@pytest.mark.ranks
def test_a_tensor_that_is_not_reduced_is_refused():
    run_ranks(partial_sum, 2)


@pytest.mark.parametrize(
    "parts",
    [
        [TensorPart("a", (6, 4), (0, 0), (6, 4))],  # half
        [TensorPart("a", (6, 9), (0, 0), (6, 9))],  # outside
        [TensorPart("a", (6, 8), (0,), (6, 8))],  # another number of dims
        [TensorPart("a", (8, 6), (0, 0), (6, 8))],  # another shape
        [TensorPart(name, (3, 8), (0, 0), (3, 8)) for name in "ab"],  # one half twice
    ],
)
def test_parts_that_are_not_those_of_the_tensor_are_refused(tmp_path, parts):
    message = r"parts that are the boxes of 'down.weight' of shape \(6, 8\), got TensorPart"
    with pytest.raises(ValueError, match=message):
        save_safetensors(
            make(0), tmp_path / "out", rename=lambda name: parts if name == "down.weight" else name
        )
    assert not (tmp_path / "out").exists()
