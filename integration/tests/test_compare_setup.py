"""What a comparison refuses, and that it refuses before it deletes or writes."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from integration.compare import results_folder
from integration.compare.__main__ import main
from integration.compare.options import CompareOptions, parse_options
from integration.compare.random_jobs import RandomCase, Source
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
def options(tmp_path, text):
    """Options that make sense, as keywords."""
    small = {"models": "llama-tiny", "systems": "ddp", "parallelism": False, "diffusion": False}
    return small | {"out": tmp_path / "out", "data": text}


def former(out):
    """A folder as a former comparison left it."""
    (out / "runs" / "ddp").mkdir(parents=True)
    (out / "runs" / "ddp" / "metrics.jsonl").write_text("old")
    (out / results_folder.MARKER).write_text("")
    return out


def test_by_default_every_system_is_compared_reference_first():
    assert parse_options([]).system_names() == tuple(each.name for each in SYSTEMS)
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
    assert CompareOptions(systems=given).system_names() == run


def test_the_trainer_understands_every_job_as_it_was_meant(options):
    comparison = prepare(CompareOptions(**options | {"systems": "ddp,dtensor-tp"}, steps=7, seed=3))
    assert [job.system for job in comparison.jobs] == ["single", "ddp", "dtensor-tp"]
    for job in comparison.jobs:
        config = parse_config(job.arguments)
        assert [word for word in job.arguments if word in ("True", "False", "None")] == []
        assert (config.system, config.ranks, config.out) == (job.system, job.ranks, job.folder)
        assert (config.steps, config.seed, config.data) == (7, 3, options["data"])
        assert (config.resume, config.checkpoint_every) == ("never", 0)
        assert not config.final_checkpoint
        assert not config.tensorboard
    assert [job.ranks for job in comparison.jobs] == [1, 2, 2]


def test_every_system_trains_the_models_that_it_takes_and_those_share_processes(options):
    options |= {"models": "llama-tiny,mixtral-tiny,dit-tiny", "systems": "ddp,plan-ep"}
    comparison = prepare(CompareOptions(**options | {"steps": 7}))
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
    for job in comparison.jobs:
        config = parse_config(job.arguments)
        assert config.model == job.model
        assert job.tolerance == (6e-5 if job.model == "mixtral-tiny" else 1e-5)
        assert config.data == (None if job.model == "dit-tiny" else options["data"])
        # The collectives are those of a step whose time does not count; half the steps warm up.
        assert (config.count_collectives, config.warmup_steps) == (3, 3)
    alone = prepare(CompareOptions(**options, share_processes=False))
    assert {job.session for job in alone.jobs} == {None}
    sources = [each.source for each in comparison.data]
    assert len(sources) == 2
    assert str(options["data"]) in sources[0]


def test_a_run_too_short_to_have_a_step_for_it_counts_no_collectives(options):
    for job in prepare(CompareOptions(**options, steps=3)).jobs:
        assert parse_config(job.arguments).count_collectives is None


def test_a_profile_is_a_set_of_defaults_that_options_override():
    assert parse_options(["quick"]) == parse_options([]) == CompareOptions()
    full = parse_options(["full"])
    assert full.steps > CompareOptions().steps
    assert full.parallel_steps > CompareOptions().parallel_steps
    assert full.every_case
    assert not full.share_processes
    assert parse_options(["full", "--steps", "5"]) == replace(full, steps=5)
    assert parse_options(full.command_line()) == full
    with pytest.raises(SystemExit):
        parse_options(["--steps", "5", "full"])


def test_a_system_that_cannot_run_here_is_named_and_left_out(options, monkeypatch):
    monkeypatch.setattr(type(get_variant("fsdp2").make()), "missing", "not installed: do that")
    comparison = prepare(CompareOptions(**options | {"systems": "ddp,fsdp2"}))
    assert [job.system for job in comparison.jobs] == ["single", "ddp"]
    assert comparison.missing == {"fsdp2": "not installed: do that"}


def test_random_numbers_are_compared_in_two_cases_with_equal_batches(options):
    given = CompareOptions(**options, random_steps=7, seed=3, global_batch=16, micro_batch=8)
    comparison = prepare(given)
    assert [job.job for job in comparison.random_jobs] == list(comparison.all_jobs[2:-4])
    cases = {
        case: [job for job in comparison.random_jobs if job.case is case] for case in RandomCase
    }
    for case, jobs in cases.items():
        assert [(job.job.system, job.job.ranks, job.source) for job in jobs] == [
            ("single", 1, "native"),
            *(("dtensor-tp", ranks, source) for ranks in (2, 4) for source in Source),
        ]
        for job in jobs:
            config = parse_config(job.job.arguments)
            assert (config.system, config.ranks) == (job.job.system, job.job.ranks)
            assert config.random == job.source.option
            assert config.init == ("sharded" if case is RandomCase.INIT else "whole")
            assert config.dropout == (0.1 if case is RandomCase.DROPOUT else 0)
            assert (config.model, config.steps, config.seed) == ("llama-tiny", 7, 3)
            assert (config.global_batch, config.micro_batch) == (16, 8)
            assert config.fingerprint
            assert config.out == options["out"] / "runs" / "random" / job.job.name
            assert job.job.tolerance == 1e-5
    names = [job.name for job in comparison.all_jobs]
    assert len(set(names)) == len(names)


def test_native_systems_share_no_process_with_packages_that_patch_torch(options):
    """A package that is switched off again leaves its extension modules loaded."""
    comparison = prepare(
        CompareOptions(**options | {"parallelism": True, "systems": "ddp,plan-tp"})
    )
    sessions = {}
    for job in (*comparison.jobs, *(each.job for each in comparison.parallel_jobs)):
        config = parse_config(job.arguments)
        dist_rng_run = (
            config.random == "dist-rng" or not get_system(config.system, degrees_of(config)).native
        )
        sessions.setdefault(job.session, set()).add(dist_rng_run)
    assert all(len(kinds) == 1 for kinds in sessions.values()), sessions
    assert set.union(*sessions.values()) == {False, True}


def test_optimizers_are_compared_at_last_and_their_batches_are_checked_before(options):
    comparison = prepare(CompareOptions(**options, optimizer_steps=7))
    jobs = [job for each in comparison.optimizer_jobs for job in each.jobs]
    assert list(comparison.all_jobs[-4:]) == jobs
    options["systems"] = "dtensor-tp"  # whose ranks see one batch, which DDP's share
    assert prepare(CompareOptions(**options, optimizers=False, global_batch=4)).optimizer_jobs == ()
    with pytest.raises(UsageError, match=r"global batch 4 .* data-parallel degree 2"):
        prepare(CompareOptions(**options, global_batch=4))


def test_kinds_of_parallelism_are_compared_at_last_and_their_batches_are_checked_before(options):
    options |= {"parallelism": True, "random_numbers": False, "optimizers": False}
    comparison = prepare(CompareOptions(**options))
    jobs = [each.job for each in comparison.parallel_jobs]
    assert list(comparison.all_jobs[2:]) == jobs
    # What eight samples are too few for: a system on four ranks that see different data.
    assert {job.ranks for job in jobs} == {1, 2, 4}
    with pytest.raises(UsageError, match=r"global batch 4 .* data-parallel degree 2"):
        prepare(CompareOptions(**options | {"systems": "dtensor-tp"}, global_batch=4))


def test_random_numbers_can_be_left_out_and_nothing_about_them_matters_then(options, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    options["optimizers"] = False
    left_out = CompareOptions(**options, random_numbers=False, random_model="nope", random_steps=-1)
    assert prepare(left_out).random_jobs == ()
    with pytest.raises(UsageError, match=r"needs the package dist-rng.* --no-random-numbers"):
        prepare(CompareOptions(**options))


def test_the_spelled_out_command_line_means_the_same(options):
    given = CompareOptions(**options, steps=7, learning_rate=3e-4, random_numbers=False)
    assert parse_options(given.command_line()) == given
    assert parse_options(CompareOptions().command_line()) == CompareOptions()


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
        ({"random_model": "llama-9000b"}, r"unknown model 'llama-9000b'"),
        ({"random_steps": 0}, r"--random-steps is 0; it should be greater than or equal to 1"),
        ({"data": Path("/no/such/text")}, r"data path /no/such/text does not exist"),
    ],
)
def test_bad_options_are_refused_and_a_former_result_survives(options, change, message):
    out = former(options["out"])
    with pytest.raises(UsageError, match=message):
        prepare(CompareOptions(**options | change))
    assert (out / "runs" / "ddp" / "metrics.jsonl").read_text() == "old"


def test_empty_data_is_refused(options, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="contains no bytes to train on"):
        prepare(CompareOptions(**options | {"data": tmp_path / "nothing"}))
    assert not options["out"].exists()


def test_the_command_says_it_in_one_sentence_with_exit_code_2(options, capsys):
    arguments = CompareOptions(**options | {"systems": "fsdp9"}).command_line()
    assert main(arguments) == EXIT_USAGE
    message = capsys.readouterr().err
    assert message.startswith("error: unknown system 'fsdp9'")
    assert message.count("\n") == 1
    assert not options["out"].exists()


def test_a_word_where_a_number_belongs_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(["--steps", "many"])
    assert ended.value.code == EXIT_USAGE
    assert "--steps" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["absent", "empty", "former"])
def test_a_folder_of_results_that_may_be_replaced_is(options, state):
    out = options["out"]
    if state == "empty":
        out.mkdir()
    elif state == "former":
        former(out)
    prepare(CompareOptions(**options))
    results_folder.replace(out)
    assert sorted(path.name for path in out.rglob("*")) == [results_folder.MARKER, "runs"]


def test_files_of_others_are_not_replaced(options):
    options["out"].mkdir()
    thesis = options["out"] / "thesis.tex"
    thesis.write_text("years of work")
    with pytest.raises(
        UsageError, match=r"--out: expected .* contains files that no comparison wrote"
    ):
        prepare(CompareOptions(**options))
    assert thesis.read_text() == "years of work"


def test_links_in_a_former_result_are_removed_and_not_followed(options, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    out = former(options["out"])
    (out / "link").symlink_to(elsewhere)
    results_folder.replace(out)
    assert (elsewhere / "kept").exists()
    assert not (out / "link").is_symlink()


def test_a_file_for_the_results_is_refused(options, text):
    with pytest.raises(UsageError, match="is a file, not a folder"):
        prepare(CompareOptions(**options | {"out": text, "data": None}))
    with pytest.raises(UsageError, match="is a file, not a folder"):
        prepare(CompareOptions(**options | {"out": text / "below", "data": None}))


@pytest.mark.parametrize("below", ["data in results", "results in data", "the same"])
def test_results_and_data_that_overlap_are_refused(options, tmp_path, below):
    out = former(tmp_path / "one")
    data = {"data in results": out / "runs", "results in data": tmp_path, "the same": out}[below]
    with pytest.raises(UsageError, match="overlap; give another --out"):
        prepare(CompareOptions(**options | {"out": out, "data": data}))
    assert (out / "runs" / "ddp" / "metrics.jsonl").exists()
