"""Loading reads the pages of a rank's shards, and neither way allocates more than a buffer."""

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from fsdp.checkpoint import load_safetensors, save_safetensors
from testkit import run_ranks
from testkit.inspection.memory import peak_bytes

pytestmark = pytest.mark.ranks


class FilePages(TorchDispatchMode):
    """Measures the largest copy of bfloat16, and the most resident bytes of a file's mappings."""

    def __init__(self, file):
        super().__init__()
        self.file, self.resident, self.largest_copy = str(file), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.copy_.default or args[1].dtype != torch.bfloat16:
            return result
        self.largest_copy = max(self.largest_copy, args[0].nbytes)
        resident, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                inside = line.endswith(self.file)
            elif inside and line.startswith("Rss:"):
                resident += int(line.split()[1]) * 1024
        self.resident = max(self.resident, resident)
        return result


MIB = 2**20


def large(layers, size):
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))


def load_pages(folder):
    with torch.device("meta"):
        model = fsdp.fully_shard(large(1, 4096))
    with FilePages(Path(folder) / "model.safetensors") as pages:
        result = load_safetensors(model, folder, buffer_bytes=4 * MIB)
    return result.bytes_read, pages.resident, pages.largest_copy


def test_a_rank_touches_its_pages_of_a_file_and_no_others(tmp_path):
    state = {"0.weight": torch.zeros(4096, 4096, dtype=torch.bfloat16)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    for bytes_read, touched, copied in run_ranks(load_pages, 4, tmp_path, timeout=200):
        assert bytes_read == 8 * MIB  # a quarter
        # Linux maps pages around one that is touched, up to 2 MiB of them.
        assert 8 * MIB <= touched <= 8 * MIB + 4 * MIB
        assert copied == 4 * MIB


def load_into_memory(folder):
    with torch.device("meta"):
        model = large(4, 1024)
    for layer in model:
        fsdp.fully_shard(layer)
    peak, result = peak_bytes(lambda: load_safetensors(model, folder, buffer_bytes=MIB))
    return peak, result.bytes_read


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


def test_saving_allocates_the_buffer_only(tmp_path):
    for peak, written in run_ranks(save_large, 2, tmp_path / "out", timeout=120):
        assert written == 4 * MIB
        assert peak <= MIB // 4 + 100_000
    [weight] = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").values()
    assert (weight.dtype, weight.shape) == (torch.bfloat16, (2048, 2048))
