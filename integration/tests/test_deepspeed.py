"""DeepSpeed's ZeRO-3 trains as one device does, and refuses what its engine keeps to itself."""

import importlib.util
import subprocess
import sys

import pytest

from integration.compare.experiment import SharedOptions
from integration.compare.experiments.systems import SystemOptions
from integration.compare.options import CompareOptions
from integration.compare.setup import prepare as prepare_comparison
from integration.compare.variants import get_variant
from integration.errors import UsageError
from integration.models import model_shape
from integration.systems.deepspeed import ZeroThree
from integration.train.config import TrainConfig
from integration.train.setup import prepare

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
# Two microbatches a step, and a learning rate that a schedule sets in each.
OPTIONS = {
    "final_checkpoint": False,
    "micro_batch": 2,
    "warmup_steps": 3,
    "decay_steps": 2,
    "learning_rate": 3e-3,
}


@needs_deepspeed
@pytest.mark.ranks
@pytest.mark.slow  # it compiles an operator of its own on first use
@pytest.mark.filterwarnings("ignore")  # deepspeed's, of what torch deprecates
def test_it_trains_as_one_device_with_accumulation_and_a_schedule(train_runs, tmp_path):
    models = ("llama-tiny", "mixtral-tiny", "dit-tiny")

    def train(ranks, system, models=models, **others):
        runs = [
            OPTIONS | {"model": model, "system": system, "out": tmp_path / f"{system}-{model}"}
            for model in models
        ]
        return train_runs(ranks, [run | others for run in runs], out=tmp_path, steps=6)

    # In one call: its groups are of the first process group that a process has.
    zero, single = train(2, "deepspeed"), train(1, "single")
    for model, sharded, one in zip(models, zero, single, strict=True):
        assert sharded == pytest.approx(one, abs=model_shape(model).tolerance, rel=0)
    (unscheduled,) = train(1, "single", models[:1], warmup_steps=0)
    assert max(abs(a - b) for a, b in zip(single[0], unscheduled, strict=True)) > 1e-3


# In a process of its own: what DeepSpeed changes there stays.
LINEAR = """
import torch
from torch.nn import functional
from integration.models import model_shape
from integration.systems.deepspeed import ZeroThree
from integration.train.launch.world import exit_process, process_group

torchs, seen = functional.linear, []
with process_group(60):
    system, shape = ZeroThree(), model_shape("llama-tiny")
    model = system.parallelize(shape.build(dropout=0.0), shape, 1)
    note = lambda *_: seen.append(functional.linear)
    layer = model.model.model.layers[0]
    layer.register_forward_hook(note)
    layer.register_full_backward_hook(note)
    system.optimizer(model, torch.optim.AdamW(model.parameters()))
    assert functional.linear is torchs
    tokens = torch.arange(16).view(1, 16)
    system.forward_backward(model, {"input_ids": tokens, "labels": tokens}, parts=1, last=True)
assert functional.linear is torchs
print([one.__name__ for one in seen], flush=True)
exit_process(0)
"""


@needs_deepspeed
@pytest.mark.ranks
@pytest.mark.slow
def test_its_linear_operator_is_there_in_its_own_forward_and_backward_only():
    result = subprocess.run(
        [sys.executable, "-c", LINEAR], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(["zero3_linear_wrap"] * 2)


@pytest.fixture
def installed(monkeypatch):
    """As if it were installed; nothing here imports it."""
    monkeypatch.setattr(ZeroThree, "missing", None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clip_grad_norm": 1.0}, "--clip-grad-norm"),
        ({"checkpoint_every": 5}, "--checkpoint-every"),
        ({"final_checkpoint": True}, "expected --no-final-checkpoint"),
        ({"fingerprint": True}, "--fingerprint"),
        ({"pp_degree": 2}, "--pp-degree"),
        ({"dtype": "bf16"}, "--dtype bf16"),
        ({"init": "sharded"}, "--init whole"),
        ({"optimizer": "muon"}, "expected --optimizer adamw"),
    ],
)
def test_what_it_does_not_do_is_refused(options, named, installed, tmp_path):
    options = {"final_checkpoint": False} | options
    config = TrainConfig(system="deepspeed", model="llama-tiny", out=tmp_path / "run", **options)
    with pytest.raises(UsageError, match=named):
        prepare(config, 2)


def test_where_it_is_not_installed_it_is_refused_and_a_comparison_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else 1
    )
    config = TrainConfig(
        system="deepspeed", model="llama-tiny", out=tmp_path / "run", final_checkpoint=False
    )
    with pytest.raises(UsageError, match="not installed: pip install --no-deps deepspeed"):
        prepare(config, 2)
    own = SystemOptions(systems="ddp,deepspeed", models="llama-tiny")
    options = CompareOptions(SharedOptions(out=tmp_path / "out"), {"systems": own}, "systems")
    comparison = prepare_comparison(options)
    assert [job.system for job in comparison.jobs] == ["single", "ddp"]
    assert get_variant("deepspeed").make().missing is not None
