"""``--device``: what it selects, and what it refuses before anything is written."""

import os

import pytest
import torch

from integration.device import CPU, Device, local_ranks, select_device
from integration.errors import EXIT_USAGE, UsageError
from integration.train.__main__ import main
from testkit import run_python
from testkit.sim.ranks import run_sim_ranks

TOO_MANY_RANKS = "--device sim: expected at most 8 ranks on this machine, one for each sim device"
TRAIN = ("integration.train", "--model", "llama-tiny", "--steps", "1")
SAMPLE = ("integration.sampling", "no-checkpoint")


def sentence_of(printed):
    """What is printed, without the frame and the lines of a terminal."""
    return " ".join(printed.replace("│", " ").split())


@pytest.mark.parametrize("command", [TRAIN, SAMPLE], ids=lambda command: command[0])
def test_cuda_without_a_device_is_refused(command, tmp_path):
    arguments = [*command, "--device", "cuda", "--out", str(tmp_path / "out.png")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # so that no machine has one
    result = run_python("-m", *arguments, environment=environment)
    assert result.returncode == EXIT_USAGE
    assert "--device cuda: expected a CUDA device, got none" in sentence_of(result.stderr)
    assert "Traceback" not in result.stderr
    assert not any(tmp_path.iterdir())


def test_more_ranks_than_devices_are_refused(tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["--device", "sim", "--system", "ddp", "--ranks", "9", "--out", str(out)]
    assert main([*TRAIN[1:], *arguments]) == EXIT_USAGE
    assert f"{TOO_MANY_RANKS}, got 9" in sentence_of(capsys.readouterr().err)
    assert not out.exists()


def test_ranks_of_torchrun_are_those_of_this_machine(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert select_device("sim", local_ranks(None)) == Device("sim")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")
    with pytest.raises(UsageError, match=TOO_MANY_RANKS):
        select_device("sim", local_ranks(None))


def test_the_cpu_has_any_number_of_ranks():
    assert select_device("cpu", 1000) == CPU
    assert CPU.current == torch.device("cpu")
    assert CPU.backend == "gloo"


def test_auto_is_never_the_simulated_device():
    def selected():
        automatic, device = select_device("auto").type, Device("sim")
        device.start(local_rank=None, rank=11)
        by_rank = device.current.index
        device.start(local_rank=2, rank=11)
        loaded = torch.accelerator.current_accelerator().type
        return loaded, automatic, by_rank, device.current.index

    ((loaded, automatic, by_rank, by_local_rank),) = run_sim_ranks(selected, 1)
    assert (loaded, automatic) == ("sim", "cuda" if torch.cuda.is_available() else "cpu")
    assert (by_rank, by_local_rank) == (3, 2)  # of 8 devices


def test_the_generators_of_host_and_device_are_restored():
    def drawn_twice():
        device = Device("sim")
        state = device.random_state()
        first = torch.rand(3), torch.rand(3, device="sim").cpu()
        device.set_random_state(state)
        second = torch.rand(3), torch.rand(3, device="sim").cpu()
        return sorted(state), [torch.equal(a, b) for a, b in zip(first, second, strict=True)]

    assert run_sim_ranks(drawn_twice, 1) == [(["cpu", "sim"], [True, True])]
