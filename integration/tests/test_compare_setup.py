"""What a comparison refuses, and that it refuses before it deletes or writes."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from integration.compare import results_folder
from integration.compare.__main__ import main
from integration.compare.experiment import SharedOptions
from integration.compare.experiments import discover
from integration.compare.experiments.systems import SystemOptions
from integration.compare.options import CompareOptions, parse_options
from integration.compare.setup import prepare
from integration.compare.variants import SYSTEMS, get_variant
from integration.errors import EXIT_USAGE, UsageError
from integration.models import model_shape
from integration.systems import get_system
from integration.train.config import degrees_of, parse_config


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"real text " * 1000)
    return path


@pytest.fixture
def make_options(tmp_path, text):
    """Returns options that make sense, with keywords of the shared and the systems' options."""

    def make(experiments="systems", **changes):
        given = {"models": "llama-tiny", "systems": "ddp"}
        given |= {"out": tmp_path / "out", "data": text} | changes
        of_systems = {each.name for each in fields(SystemOptions)}
        own = {name: value for name, value in given.items() if name in of_systems}
        shared = {name: value for name, value in given.items() if name not in of_systems}
        return CompareOptions(
            SharedOptions(**shared), {"systems": SystemOptions(**own)}, experiments
        )

    return make


def former(out):
    """A folder as a former comparison left it."""
    (out / "runs" / "ddp").mkdir(parents=True)
    (out / "runs" / "ddp" / "metrics.jsonl").write_text("old")
    (out / results_folder.MARKER).write_text("")
    return out


def test_by_default_every_system_is_compared_reference_first():
    assert SystemOptions().system_names() == tuple(each.name for each in SYSTEMS)
    assert SYSTEMS[0].name == "single"


@pytest.mark.parametrize(
    ("given", "run"),
    [
        ("ddp", ("single", "ddp")),
        ("fsdp2,single,ddp", ("single", "fsdp2", "ddp")),
        (" ddp , ddp,", ("single", "ddp")),
    ],
)
def test_the_reference_is_always_added_first(given, run):
    assert SystemOptions(systems=given).system_names() == run


def test_the_trainer_understands_every_job_as_it_was_meant(make_options, text):
    comparison = prepare(make_options(systems="ddp,dtensor-tp", steps=7, seed=3))
    assert [job.system for job in comparison.jobs] == ["single", "ddp", "dtensor-tp"]
    for job in comparison.jobs:
        config = parse_config(job.arguments)
        assert [word for word in job.arguments if word in ("True", "False", "None")] == []
        assert (config.system, config.ranks, config.out) == (job.system, job.ranks, job.folder)
        assert (config.steps, config.seed, config.data) == (7, 3, text)
        assert (config.resume, config.checkpoint_every) == ("never", 0)
        assert not config.final_checkpoint
        assert not config.tensorboard
    assert [job.ranks for job in comparison.jobs] == [1, 2, 2]


def test_every_system_trains_the_models_that_it_takes_and_those_share_processes(make_options, text):
    given = {"models": "llama-tiny,mixtral-tiny,dit-tiny", "systems": "ddp,plan-ep"}
    comparison = prepare(make_options(**given, steps=7))
    assert [job.name for job in comparison.jobs] == [
        f"{model}-{system}"
        for system in ("single", "ddp", "plan-ep")
        for model in ("llama-tiny", "mixtral-tiny", "dit-tiny")
        if get_variant(system).takes(model_shape(model))
    ]
    assert [(job.session, job.model) for job in comparison.jobs[:2]] == [
        ("single", "llama-tiny"),
        ("single", "mixtral-tiny"),
    ]
    (systems,) = comparison.experiments
    for run, job in zip(systems.runs, comparison.jobs, strict=True):
        config = parse_config(job.arguments)
        assert config.model == job.model
        assert run.tolerance == (6e-5 if job.model == "mixtral-tiny" else 1e-5)
        assert config.data == (None if job.model == "dit-tiny" else text)
        # The collectives are those of a step whose time does not count; half the steps warm up.
        assert (config.count_collectives, config.warmup_steps) == (3, 3)
    alone = prepare(make_options(**given, share_processes=False))
    assert {job.session for job in alone.jobs} == {None}
    sources = [each.source for each in comparison.data]
    assert len(sources) == 2
    assert str(text) in sources[0]


def test_a_run_too_short_to_have_a_step_for_it_counts_no_collectives(make_options):
    for job in prepare(make_options(steps=3)).jobs:
        assert parse_config(job.arguments).count_collectives is None


def test_a_profile_is_a_set_of_defaults_that_options_override():
    quick, full = parse_options([]), parse_options(["full"])
    assert parse_options(["quick"]) == quick
    assert quick.own == {each.name: each.quick for each in discover()}
    assert full.own == {each.name: each.full for each in discover()}
    assert full.own["systems"].steps > quick.own["systems"].steps
    assert full.own["parallelism"].steps > quick.own["parallelism"].steps
    assert full.own["parallelism"].every_case
    assert not full.own["systems"].share_processes
    changed = parse_options(["full", "--steps", "5", "--parallelism.no-every-case"]).own
    assert changed["systems"] == replace(full.own["systems"], steps=5)
    assert changed["parallelism"] == replace(full.own["parallelism"], every_case=False)
    assert parse_options(full.command_line()) == full
    with pytest.raises(SystemExit):
        parse_options(["--steps", "5", "full"])


def test_a_system_that_cannot_run_here_is_left_out(make_options, monkeypatch):
    monkeypatch.setattr(type(get_variant("fsdp2").make()), "missing", "not installed: do that")
    comparison = prepare(make_options(systems="ddp,fsdp2"))
    assert [job.system for job in comparison.jobs] == ["single", "ddp"]


def test_experiments_run_in_order_and_their_jobs_have_folders_of_their_own(make_options):
    comparison = prepare(make_options(experiments=None))
    names = [each.experiment.name for each in comparison.experiments]
    assert names == ["systems", "random_numbers", "optimizers", "parallelism", "diffusion"]
    folders = [job.folder for job in comparison.jobs]
    assert len(set(folders)) == len(folders)
    assert len({job.name for job in comparison.jobs}) == len(folders)
    assert list(dict.fromkeys(folder.parent.name for folder in folders)) == names


@pytest.mark.slow  # plans three experiments
def test_native_systems_share_no_process_with_packages_that_patch_torch(make_options):
    """A package that is switched off again leaves its extension modules loaded."""
    comparison = prepare(
        make_options("systems,random_numbers,parallelism", systems="ddp,fsdp2,plan-tp")
    )
    sessions = {}
    for job in comparison.jobs:
        config = parse_config(job.arguments)
        dist_rng_run = (
            config.random == "dist-rng" or not get_system(config.system, degrees_of(config)).native
        )
        sessions.setdefault(job.session, set()).add(dist_rng_run)
    assert all(len(kinds) == 1 for kinds in sessions.values()), sessions
    assert set.union(*sessions.values()) == {False, True}


@pytest.mark.parametrize(
    ("experiment", "error"),
    [
        ("optimizers", r"global batch 4 .* data-parallel degree 2"),
        ("parallelism", "--global-batch: expected at least 8, as pipelines"),
    ],
)
def test_batches_of_every_experiment_are_checked_before(make_options, experiment, error):
    # A system whose ranks see one batch, which DDP's share.
    assert prepare(make_options(systems="dtensor-tp", global_batch=4)).jobs
    with pytest.raises(UsageError, match=error):
        prepare(make_options(f"systems,{experiment}", systems="dtensor-tp", global_batch=4))


def test_the_spelled_out_command_line_means_the_same(make_options):
    given = make_options("systems,diffusion", steps=7, learning_rate=3e-4)
    parsed = parse_options(given.command_line())
    assert parsed.command_line() == given.command_line()
    assert (parsed.shared, parsed.own["systems"]) == (given.shared, given.own["systems"])
    assert parse_options(CompareOptions().command_line()).facts() == CompareOptions().facts()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"systems": "ddp,fsdp9"}, r"unknown system 'fsdp9'; choose one of: single, ddp"),
        ({"systems": "single"}, r"--systems: expected a system to compare .*, got 'single'"),
        ({"systems": ""}, r"add one or more of: ddp, fsdp1"),
        ({"models": ","}, r"--models: expected the name of a model, got ','"),
        ({"models": "dit-tiny", "systems": "ddp,plan-ep"}, r"'plan-ep' supports none of"),
        (
            {"models": "mixtral-tiny,dit-tiny", "systems": "plan-ep"},
            r"no system of .* supports model 'dit-tiny'",
        ),
        ({"warmup_steps": -1}, r"--warmup-steps is -1"),
        ({"models": "llama-9000b"}, r"unknown model 'llama-9000b'"),
        ({"steps": 0}, r"--steps is 0; it should be greater than or equal to 1"),
        ({"steps": -5}, r"--steps is -5"),
        ({"learning_rate": -1.0}, r"--learning-rate is -1\.0"),
        ({"threads": 0}, r"--threads is 0"),
        ({"global_batch": 9}, r"global batch 9 is not micro batch 4"),
        ({"global_batch": 4}, r"data-parallel degree 2"),
        ({"sequence_length": 5000}, r"the data has 10000 bytes, fewer than the 40000"),
        ({"data": Path("/no/such/text")}, r"data path /no/such/text does not exist"),
    ],
)
def test_bad_options_are_refused_and_a_former_result_survives(make_options, change, message):
    out = former(make_options().out)
    with pytest.raises(UsageError, match=message):
        prepare(make_options(**change))
    assert (out / "runs" / "ddp" / "metrics.jsonl").read_text() == "old"


def test_empty_data_is_refused(make_options, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="contains no bytes to train on"):
        prepare(make_options(data=tmp_path / "nothing"))
    assert not (tmp_path / "out").exists()


def test_the_command_says_it_in_one_sentence_with_exit_code_2(make_options, capsys):
    options = make_options(systems="fsdp9")
    arguments = options.command_line()
    assert main(arguments) == EXIT_USAGE
    message = capsys.readouterr().err
    assert message.startswith("error: unknown system 'fsdp9'")
    assert message.count("\n") == 1
    assert not options.out.exists()


def test_a_word_where_a_number_belongs_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(["--steps", "many"])
    assert ended.value.code == EXIT_USAGE
    assert "--steps" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["absent", "empty", "former"])
def test_a_folder_of_results_that_may_be_replaced_is(make_options, state):
    out = make_options().out
    if state == "empty":
        out.mkdir()
    elif state == "former":
        former(out)
    prepare(make_options())
    results_folder.replace(out)
    assert sorted(path.name for path in out.rglob("*")) == [results_folder.MARKER, "runs"]


def test_files_of_others_are_not_replaced(make_options):
    out = make_options().out
    out.mkdir()
    thesis = out / "thesis.tex"
    thesis.write_text("years of work")
    with pytest.raises(
        UsageError, match=r"--out: expected .* contains files that no comparison wrote"
    ):
        prepare(make_options())
    assert thesis.read_text() == "years of work"


def test_links_in_a_former_result_are_removed_and_not_followed(make_options, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    out = former(make_options().out)
    (out / "link").symlink_to(elsewhere)
    results_folder.replace(out)
    assert (elsewhere / "kept").exists()
    assert not (out / "link").is_symlink()


def test_a_file_for_the_results_is_refused(make_options, text):
    with pytest.raises(UsageError, match="is a file, not a folder"):
        prepare(make_options(out=text, data=None))
    with pytest.raises(UsageError, match="is a file, not a folder"):
        prepare(make_options(out=text / "below", data=None))


@pytest.mark.parametrize("below", ["data in results", "results in data", "the same"])
def test_results_and_data_that_overlap_are_refused(make_options, tmp_path, below):
    out = former(tmp_path / "one")
    data = {"data in results": out / "runs", "results in data": tmp_path, "the same": out}[below]
    with pytest.raises(UsageError, match="overlap; give another --out"):
        prepare(make_options(out=out, data=data))
    assert (out / "runs" / "ddp" / "metrics.jsonl").exists()


@pytest.mark.parametrize("experiment", ["random_numbers", "parallelism"])
def test_draws_on_the_simulated_device_are_refused(experiment, tmp_path, capsys):
    out = tmp_path / "out"
    status = main(["--device", "sim", "--experiments", experiment, "--out", str(out)])
    assert status == EXIT_USAGE
    assert f"leave {experiment} out of --experiments" in capsys.readouterr().err
    assert not out.exists()
