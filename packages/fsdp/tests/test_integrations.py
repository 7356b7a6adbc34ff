"""`fsdp.integrations`: Hugging Face's Trainer trains, saves and resumes as with native FSDP2."""

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp import integrations
from fsdp.integrations import versions
from ragged_shard import RaggedShard
from testkit import run_python, run_ranks

SCRIPT = Path(__file__).with_name("trainer_runs.py")
# Of the runs of ``trainer_runs.py``: one whose model accelerate shards, and one by transformers.
FAST = ("sharded", "loaded")
SLOW = ("full", "efficient", "weights only", "loaded, tied", "loaded, experts", "made")
BIT_FOR_BIT = ["sharded", "sharded, resumed", "loaded", "loaded, from shards"]
MORE_BIT_FOR_BIT = ["efficient", "efficient, resumed", "weights only", "made"]
MORE_BIT_FOR_BIT += ["loaded, experts", "loaded, experts, from shards"]


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """Returns a function of names: the results of ``trainer_runs.py`` on two ranks, once each."""

    @functools.cache
    def results(names):
        folder = tmp_path_factory.mktemp("trainer")
        # Of the environment accelerate and transformers would otherwise take the machine's.
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        # A hang ends in the time-out.
        done = run_python(str(SCRIPT), str(folder), *names, environment=env, timeout=480)
        assert done.returncode == 0, done.stderr[-5000:]
        return json.loads((folder / "runs.json").read_text())

    return results


@pytest.fixture
def runs(results_of, request):
    """Returns the results of the runs among which a test's is: the slow ones for a slow test."""
    return results_of(SLOW if request.node.get_closest_marker("slow") else FAST)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*BIT_FOR_BIT, *slow(MORE_BIT_FOR_BIT)])
def test_losses_and_saved_weights_equal_native_fsdp2(runs, name):
    native, actual = runs["native"][name], runs["fsdp"][name]
    assert (native["placement"], actual["placement"]) == ("Shard", "RaggedShard")
    assert len(actual["losses"]) == 4
    for what in ("losses", "eval", "weights", "saved", "generated"):
        assert actual.get(what) == native.get(what), what
    # Only the norm of all gradients is summed in another order, as the shards are others.
    assert actual["norms"] == pytest.approx(native["norms"], rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("name", slow(["full", "full, resumed"]))
def test_clipped_runs_equal_native_fsdp2_up_to_the_order_of_the_norm(runs, name):
    """Gradients are scaled by the norm, whose last bit the order of its sum decides."""
    native, actual = runs["native"][name], runs["fsdp"][name]
    assert (native["placement"], actual["placement"]) == ("Shard", "RaggedShard")
    assert len(actual["losses"]) == 4
    assert min(actual["norms"]) > 0.5  # every step is clipped
    for what in ("norms", "losses", "eval"):
        assert actual[what] == pytest.approx(native[what], rel=1e-6), what
    assert actual["weights"].keys() == native["weights"].keys()
    for weight, sums in native["weights"].items():
        assert actual["weights"][weight] == pytest.approx(sums, abs=1e-6), weight


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["sharded", *slow(["full", "efficient"])])
def test_resumed_run_has_the_losses_of_an_uninterrupted_run(runs, name):
    stopped, whole = runs["fsdp"][f"{name}, resumed"], runs["fsdp"][name]
    assert stopped["losses"] == whole["losses"]
    assert stopped["weights"] == whole["weights"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["loaded", *slow(["weights only", "loaded, tied", "loaded, experts"])]
)
def test_trainer_saves_the_weights_of_one_device(runs, name):
    actual = runs["fsdp"][name]
    assert actual["saved"] == actual["weights"]


@pytest.mark.slow
@pytest.mark.ranks
def test_tied_weights_are_one_parameter_of_one_group(runs):
    """FSDP2 reduces the gradients of both modules and adds them; here they are added first."""
    native, actual = runs["native"]["loaded, tied"], runs["fsdp"]["loaded, tied"]
    assert actual["losses"] == pytest.approx(native["losses"], rel=1e-6)
    assert actual["weights"].keys() == native["weights"].keys()
    assert actual["weights"]["lm_head.weight"] == actual["weights"]["model.embed_tokens.weight"]


@pytest.mark.ranks
def test_unsupported_runs_are_errors_on_every_rank(runs):
    first, second = runs["refused"]
    assert first == second
    assert "save_only_model=True" in first["optimizer"]  # transformers' own
    assert "expected a model that transformers or accelerate has sharded" in first["by hand"]
    assert "'model.embed_tokens.weight'" in first["by hand"]


@pytest.mark.ranks
def test_after_uninstall_models_are_sharded_by_torch(runs):
    assert runs["uninstalled"] == "Shard"


@pytest.fixture
def installed():
    integrations.install()
    yield
    integrations.uninstall()


def _attributes():
    import transformers.core_model_loading as loading
    import transformers.distributed.fsdp as sharding
    from transformers.distributed import mixin

    owners = (torch_fsdp, loading, sharding, mixin, mixin.DistributedMixin)
    return [dict(vars(owner)) for owner in owners]


def test_a_script_that_is_not_changed_runs_with_this_package(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch.distributed.fsdp\n"
        "print(torch.distributed.fsdp.fully_shard.__module__, sys.argv[1:], __name__)\n"
    )
    command = [sys.executable, "-m", "fsdp.integrations"]
    found = subprocess.run([*command, str(script), "a"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "fsdp.api ['a'] __main__\n"), found.stderr
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (
        1,
        "usage: python -m fsdp.integrations SCRIPT [ARGUMENT ...]\n",
    )


def installed_version(monkeypatch, framework, version):
    """Lets a framework's installed version be another, of which nothing has warned."""
    monkeypatch.setattr(versions, "_warned", set())
    found = {framework: version}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found.get(name) or real(name))


@pytest.mark.parametrize("version", ["5.22.9", "5.24.0.dev0", "6.23", "6"])
def test_a_version_that_was_not_tested_warns_once_with_what_was(monkeypatch, version):
    installed_version(monkeypatch, "transformers", version)
    with pytest.warns(UserWarning, match=rf"expected transformers 5\.23, .* got {version};"):
        integrations.install()
    integrations.uninstall()
    integrations.install()  # a second warning would be an error
    integrations.uninstall()


@pytest.mark.parametrize("version", ["5.23.0", "5.23.7", "5.23rc1"])
def test_a_tested_version_does_not_warn(monkeypatch, version):
    installed_version(monkeypatch, "transformers", version)
    integrations.check_version("transformers")


def test_ranges_have_their_ends_and_what_is_between():
    tested = versions.VersionRange((1, 9), (2, 1))
    assert str(tested) == "1.9 to 2.1"
    inside = {number: number in tested for number in ("1.8", "1.9.4", "1.10", "2", "2.1.1", "2.2")}
    assert list(inside.values()) == [False, True, True, True, True, False]


def test_frameworks_without_tested_versions_are_refused_and_those_not_installed_pass(monkeypatch):
    with pytest.raises(ValueError, match=r"expected one of accelerate, .* got 'keras'"):
        integrations.check_version("keras")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    integrations.check_version("trl")


def test_uninstall_restores_what_install_lists():
    before = _attributes()
    integrations.install()
    integrations.install()  # does nothing
    changed = {
        name
        for old, new in zip(before, _attributes(), strict=True)
        for name in old
        if old[name] is not new[name]
    }
    assert changed == {
        "fully_shard",
        "register_fsdp_forward_method",
        "apply_fully_sharded_data_parallelism",
        "DtensorShardOperation",
        "set_param_for_module",
        "gather_sharded_state_dict_for_save",
    }
    assert all(name in integrations.install.__doc__ for name in changed)
    integrations.uninstall()
    integrations.uninstall()
    assert _attributes() == before


def test_pipeline_stages_find_the_state_of_a_module(installed):
    assert torch_fsdp.fully_shard.state(torch.nn.Linear(2, 2)) is None


def test_transformers_refuses_its_pipeline_beside_fsdp(installed):
    from transformers.distributed import DistributedConfig

    with pytest.raises(ValueError, match="Combining FSDP with pipeline parallelism"):
        DistributedConfig(fsdp_size=2, pp_size=2)


def test_older_transformers_is_refused_before_anything_is_replaced(monkeypatch):
    from transformers.distributed import mixin

    monkeypatch.delattr(mixin, "apply_fully_sharded_data_parallelism")
    before = _attributes()
    with pytest.raises(RuntimeError, match=r"expected a transformers .* 5.20 or newer, got"):
        integrations.install()
    assert _attributes() == before


@pytest.mark.ranks
def test_loader_reads_the_rows_of_a_rank_from_tensors_and_single_experts():
    def check(units):
        from transformers import core_model_loading as loading

        integrations.install()
        try:
            mesh = init_device_mesh("cpu", (2,))
            whole = torch.arange(48.0).view(4, 6, 2)
            param = distribute_tensor(whole, mesh, [RaggedShard((0,), units)])
            local = param.to_local()
            read = loading.DtensorShardOperation(param).shard_tensor
            assert torch.equal(read(whole), local)
            experts = [read(whole[row], tensor_idx=row) for row in range(4)]
            mine = [expert for expert in experts if expert is not None]
            if local.numel():
                assert torch.equal(torch.stack(mine), local)
            else:  # an empty one, for what stacks them
                assert [tuple(expert.shape) for expert in mine] == [(0, 2)]
            # half of each expert's rows, as two checkpoint tensors are joined along a whole dim
            half = [read(whole[row, :3], tensor_idx=row) for row in range(4)]
            assert sum(part is not None for part in half) == len(mine)
            # A tensor of another size has another number of dims: a mismatched key on each rank,
            # also on the one that has as many rows as it.
            for rows in (2, 3, 5):
                assert read(torch.zeros(rows, 6, 2)).ndim == 4
            with pytest.raises(ValueError, match=r"one of several along a dim that is sharded"):
                read(torch.zeros(2, 6, 2), tensor_idx=0)
            even = distribute_tensor(whole, mesh, [Shard(0)])  # transformers' own
            operation = loading.DtensorShardOperation(even)
            assert torch.equal(operation.shard_tensor(whole), even.to_local())
        finally:
            integrations.uninstall()

    for units in [(3, 1), (4, 0)]:
        run_ranks(check, 2, units)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_loaded_model_takes_whole_tensors_as_the_trainer_passes_them(tmp_path):
    """When it resumes, and for the best model: FSDP2's raises on plain tensors then."""

    def check(source):
        import torch.distributed as dist
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        config = LlamaConfig(use_cache=False, vocab_size=51, num_attention_heads=4, **sizes)
        torch.manual_seed(0)
        other = LlamaForCausalLM(config)
        whole = {name: value.clone() for name, value in other.state_dict().items()}
        if dist.get_rank() == 0:
            with torch.no_grad():
                for param in other.parameters():
                    param.add_(1)
            other.save_pretrained(source)
        dist.barrier()
        integrations.install()
        try:
            model = LlamaForCausalLM.from_pretrained(
                source, distributed_config=DistributedConfig(fsdp_size=2)
            )
            assert not model.load_state_dict(whole, strict=False).missing_keys
            for name, param in model.named_parameters():
                assert isinstance(param.placements[0], RaggedShard)
                assert torch.equal(param.full_tensor(), whole[name])
            with pytest.raises(RuntimeError, match=r"size mismatch|mixed torch.Tensor"):
                model.load_state_dict({"lm_head.weight": torch.zeros(50, 32)}, strict=False)
            tokens = torch.arange(16).view(2, 8)
            model(tokens, labels=tokens).loss.backward()  # still shards of its groups
        finally:
            integrations.uninstall()

    run_ranks(check, 2, str(tmp_path / "source"), timeout=200)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_losses_with_tensor_parallelism_of_transformers_equal_fsdp2(tmp_path):
    def check(source):
        import torch.distributed as dist
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        if dist.get_rank() == 0:
            config = LlamaConfig(use_cache=False, vocab_size=50, num_attention_heads=4, **sizes)
            LlamaForCausalLM(config).save_pretrained(source)
        dist.barrier()
        found = []
        tokens = torch.arange(16).view(2, 8)
        for package in ("native", "fsdp"):
            if package == "fsdp":
                integrations.install()
            model = LlamaForCausalLM.from_pretrained(
                source, distributed_config=DistributedConfig(fsdp_size=2, tp_size=2)
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                loss = model(tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            model.save_pretrained(f"{source}-{package}")
        integrations.uninstall()
        assert isinstance(next(model.parameters()).placements[0], RaggedShard)
        assert found[:3] == found[3:]
        native, actual = (
            LlamaForCausalLM.from_pretrained(f"{source}-{package}").state_dict()
            for package in ("native", "fsdp")
        )
        assert all(torch.equal(actual[name], value) for name, value in native.items())

    run_ranks(check, 4, str(tmp_path / "source"), timeout=200)
