"""Text from a decoder: of models whose text is known, and by the command."""

import json
from pathlib import Path

import pytest
import torch

import integration.data
from integration.data.tokenizer import ByteTokenizer, train_bpe
from integration.errors import EXIT_USAGE, UsageError
from integration.models import build_model, model_shape
from integration.sampling import TextModel, TextSampling, generate, load_text_model, main
from integration.systems.base import LayerPolicies
from integration.train.checkpoint.checkpoint import FOLDER, load_weights
from integration.train.config import TrainConfig
from integration.train.launch.world import World
from integration.train.model.parallel_model import parallel_model
from integration.train.setup import prepare

TEXT = Path(integration.data.__file__).parent


@pytest.fixture(scope="module")
def untrained():
    model = build_model(model_shape("llama-tiny"), seed=0).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that tokens differ in probability
    return TextModel(model, ByteTokenizer())


def after(decoder, prompt, max_tokens=20, **options):
    how = TextSampling(prompt=prompt, max_tokens=max_tokens, **options)
    (text,) = generate(decoder, how, samples=1, seed=5)
    return text


def test_a_temperature_of_zero_takes_the_most_probable_token(untrained):
    tokens = list(b"def ")
    with torch.no_grad():
        for _ in range(6):
            logits = untrained.model(torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
    expected = untrained.tokenizer.decode(tokens)
    assert after(untrained, "def ", max_tokens=6, temperature=0) == expected
    assert after(untrained, "def ", max_tokens=6, top_k=1) == expected


def test_the_seed_decides_and_torchs_generator_does_not(untrained):
    options = TextSampling(prompt="x", max_tokens=12)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generate(untrained, options, samples=2, seed=7)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert generate(untrained, options, samples=2, seed=7) == first
    assert torch.equal(state, torch.get_rng_state())
    assert generate(untrained, options, samples=2, seed=8) != first
    assert first[0] != first[1]
    assert all(text.startswith("x") for text in first)


def test_all_tokens_can_be_sampled_by_default(untrained):
    """Torch draws the first token from the whole vocabulary, not from transformers' first 50."""
    texts = generate(untrained, TextSampling("x", 1, temperature=100.0), samples=400, seed=0)
    assert len(set(texts)) > 60


class Known:
    """A model that continues with known tokens, however many are asked for."""

    device = torch.device("cpu")
    config = type("Config", (), {"max_position_embeddings": 64})

    def __init__(self, tokens):
        self.tokens, self.prompt = tokens, None

    def generate(self, inputs, **options):
        self.prompt = inputs.tolist()
        return torch.cat([inputs, torch.tensor([self.tokens] * len(inputs))], dim=1)


def test_the_end_of_a_document_ends_the_text():
    model = Known([*b"one", 0, *b"two", 0])
    decoder = TextModel(model, ByteTokenizer())
    assert after(decoder, "a ") == "a one"
    assert model.prompt == [[97, 32]]


def test_without_a_prompt_a_document_begins():
    model = Known([*b"one", 0, 0])
    assert after(TextModel(model, ByteTokenizer()), "") == "one"
    assert model.prompt == [[0]]


def test_more_tokens_than_the_model_has_positions_are_refused():
    decoder = TextModel(Known([0]), ByteTokenizer())
    after(decoder, "abcd", max_tokens=60)
    with pytest.raises(UsageError, match=r"--max-tokens 61: expected at most 60, .* 64 positions"):
        after(decoder, "abcd", max_tokens=61)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, train_runs):
    """Checkpoints of step 2: on one device and sharded, of tokens, and of bytes."""
    root = tmp_path_factory.mktemp("runs")
    run = {"tokenizer": "bpe:300", "data": TEXT, "save_at": 2}
    one = [run | {"out": root / "one"}, {"data": TEXT, "save_at": 2, "out": root / "bytes"}]
    train_runs(1, one, out=root)
    train_runs(2, [run | {"system": "plan", "tp": 2, "out": root / "two"}], out=root)
    return {path.name: path / FOLDER / "step-00000002" for path in root.iterdir()}


@pytest.mark.ranks
def test_a_sharded_checkpoint_writes_the_text_of_one_device(checkpoints, tmp_path, capsys):
    printed = {}
    for name in ("one", "two", "bytes"):
        arguments = ["--prompt", "class ", "--max-tokens", "30", "--seed", "3", "--samples", "2"]
        assert main([str(checkpoints[name]), *arguments]) == 0
        printed[name], line = capsys.readouterr()
        assert line == "sampled: 2 texts of step-00000002\n"
        out = tmp_path / "new" / "sample.txt"
        assert main([str(checkpoints[name]), *arguments, "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"{line.strip()}: {out}\n"
        assert out.read_bytes().decode() == printed[name]
    assert main([str(checkpoints["bytes"]), *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"\n{'-' * 72}\n".join(found["texts"]) + "\n" == printed["bytes"]
    assert (found["seed"], found["out"], len(found["texts"])) == (3, None, 2)
    assert printed["one"] == printed["two"] != printed["bytes"]
    assert printed["one"].count("class ") >= 2
    trained = load_text_model(checkpoints["one"]).model.state_dict()["lm_head.weight"]
    fresh = build_model(model_shape("llama-tiny").with_vocabulary(300), seed=0).state_dict()
    assert not torch.equal(trained, fresh["lm_head.weight"])


@pytest.mark.ranks
def test_a_recipe_gives_the_loss_that_the_trainer_evaluates_with_it(checkpoints, capsys):
    path, tokens = checkpoints["bytes"], torch.arange(64).view(2, 32)
    policies = LayerPolicies(precision="float8-rowwise", precision_exclude="lm_head")
    sampled = load_text_model(path, policies=policies).model
    config = TrainConfig(
        model="llama-tiny", precision=policies.precision, precision_exclude="lm_head"
    )
    setup = prepare(config, 1)
    trained = parallel_model(setup, World(0, 1)).model.eval()
    load_weights(path, trained.state_dict())
    with torch.no_grad():
        expected = setup.system.evaluate(trained, {"input_ids": tokens, "labels": tokens})
        found = sampled(input_ids=tokens, labels=tokens).loss
        without = load_text_model(path).model(input_ids=tokens, labels=tokens).loss
    assert found.equal(expected)
    assert not found.equal(without)
    for arguments, message in (
        (["--precision-exclude", "lm_head"], "expected --precision with a recipe"),
        (["--precision", "mxfp8", "--precision-exclude", "("], "expected a regular expression"),
        (["--precision", "float8-block"], "the nearest that fits is"),
    ):
        assert main([str(path), *arguments]) == EXIT_USAGE
        assert message in capsys.readouterr().err


@pytest.mark.ranks
def test_another_tokenizer_than_that_of_the_run_is_refused(checkpoints, tmp_path, capsys):
    moved = tmp_path / "step-00000002"
    moved.symlink_to(checkpoints["one"])
    own = checkpoints["one"].parent.parent / "tokenizer.json"
    assert load_text_model(moved, own).tokenizer.vocabulary == 300
    other = tmp_path / "other.json"
    other.write_text(train_bpe(["abc" * 9], 259).json)
    for name, arguments, message in (
        ("one", ["--tokenizer", str(other)], "expected the tokenizer that"),
        ("one", ["--tokenizer", "nowhere"], "nowhere, which cannot be read"),
        ("bytes", ["--tokenizer", str(own)], "expected none, as tokens of"),
        ("one", ["--out", str(tmp_path)], "expected a name that ends in .txt"),
        ("one", ["--max-tokens", "3000"], "--max-tokens 3000: expected at most 2047"),
    ):
        assert main([str(checkpoints[name]), *arguments]) == EXIT_USAGE
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.err.count("\n") == 1
        assert printed.out == ""
