"""Images from a DiT: of models whose images are known, and by the command."""

import json

import pytest
import torch
from matplotlib.image import imread

from integration.data.digits import CLASSES
from integration.errors import EXIT_USAGE, UsageError
from integration.models import build_model, model_shape
from integration.models.dit import signal_rate
from integration.sampling import Sampling, digits_in_turn, load_dit, main, sample
from integration.train.checkpoint.checkpoint import FOLDER, MANIFEST

DIGITS = digits_in_turn(2)
IMAGES = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1


class Towards:
    """Predicts the noise that would have made a noisy image of known images."""

    def __init__(self, images, without_class):
        self.images, self.without_class = images, without_class
        self.times = []

    def __call__(self, noisy, time, classes):
        self.times.append(time.unique().tolist())
        signal = signal_rate(time.double()).view(-1, 1, 1, 1)
        images = torch.cat([self.without_class, self.images])
        assert classes.tolist() == [CLASSES] * 20 + DIGITS.tolist()
        return ((noisy - signal * images) / (1 - signal**2).sqrt()).float()


class Untrained:
    """A DiT whose last layer is open; it notes which classes it was asked for."""

    def __init__(self):
        self.model = build_model(model_shape("dit-tiny"), seed=0).model.eval()
        torch.manual_seed(2)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)

    def __call__(self, noisy, time, classes):
        return self.model(noisy, time, classes)


@pytest.mark.parametrize("steps", [1, 7, 50, 999])
def test_predictions_that_lead_to_an_image_lead_to_it(steps):
    model = Towards(IMAGES, IMAGES)
    images = sample(model, DIGITS, Sampling(steps=steps))
    torch.testing.assert_close(images, IMAGES, rtol=0, atol=1e-3 if steps == 1 else 1e-4)
    (times,) = zip(*model.times, strict=True)
    assert len(times) == len(set(times)) == steps
    assert times[0] == 999
    assert list(times) == sorted(times, reverse=True)
    assert times[-1] > 0


@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 1.5])
def test_guidance_goes_from_no_class_through_the_class_and_beyond(guidance):
    others = IMAGES.flip(0) / 4
    model = Towards(IMAGES / 4, others)
    images = sample(model, DIGITS, Sampling(guidance=guidance))
    wanted = others + guidance * (IMAGES / 4 - others)
    torch.testing.assert_close(images, wanted, rtol=0, atol=1e-4)


def test_guidance_one_is_the_model_with_its_class_bit_for_bit():
    model = Untrained()

    def conditional(noisy, time, classes):
        half = len(noisy) // 2
        noise = model(noisy, time, classes)[half:]
        return torch.cat([torch.full_like(noise, 1e3), noise])

    guided = sample(model, DIGITS, Sampling(steps=5, guidance=1.0))
    assert torch.equal(guided, sample(conditional, DIGITS, Sampling(steps=5, guidance=1.0)))
    assert not torch.equal(guided, sample(model, DIGITS, Sampling(steps=5, guidance=2.0)))


def test_a_step_is_equation_12_of_ddim():
    """Two steps by hand, in fp64, from the noise that the seed draws."""
    model = Untrained()
    images = sample(model, DIGITS, Sampling(steps=2, guidance=1.0, seed=4))
    noisy = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(4)).double()
    for time, following in ((999, 500), (500, 0)):
        times = torch.full((20,), time)
        noise = model(noisy.float(), times, DIGITS).double().detach()
        signal, next_signal = signal_rate(torch.tensor([time, following]).double())
        image = ((noisy - (1 - signal**2).sqrt() * noise) / signal).clamp(-1, 1)
        noise = (noisy - signal * image) / (1 - signal**2).sqrt()
        noisy = next_signal * image + (1 - next_signal**2).sqrt() * noise
    torch.testing.assert_close(images.double(), noisy, rtol=0, atol=1e-4)
    assert images.abs().max() <= 1


def test_the_seed_decides_and_torchs_generator_does_not():
    model = Untrained()
    torch.manual_seed(1)
    first = sample(model, DIGITS, Sampling(steps=3, seed=5))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first, sample(model, DIGITS, Sampling(steps=3, seed=5)))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, sample(model, DIGITS, Sampling(steps=3, seed=6)))
    assert not first.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "sampling steps: expected 1 to 999, .* got 0"),
        ({"steps": 1000}, "sampling steps: expected 1 to 999, .* got 1000"),
        ({"guidance": -1.0}, "guidance: expected a finite number of at least 0, got -1.0"),
        ({"guidance": float("nan")}, "guidance: .* got nan"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
    ],
    ids=["no steps", "too many", "negative", "nan", "seed"],
)
def test_numbers_that_do_not_do_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        Sampling(**change)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, train_runs):
    """Checkpoints of step 2: of a DiT on one device and sharded, and of a language model."""
    root = tmp_path_factory.mktemp("runs")
    dit = {"model": "dit-tiny", "save_at": 2}
    train_runs(1, [dit | {"out": root / "one"}, {"save_at": 2, "out": root / "text"}], out=root)
    sharded = {"system": "plan", "dp_shard": 2, "out": root / "two"}
    train_runs(2, [dit | sharded], out=root)
    return {path.name: path / FOLDER / "step-00000002" for path in root.iterdir()}


@pytest.mark.ranks
def test_a_sharded_checkpoint_is_the_model_of_one_device(checkpoints):
    one, two = (load_dit(checkpoints[name]) for name in ("one", "two"))
    assert not one.training
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(weight, two.state_dict()[name], rtol=0, atol=1e-5)
    drawn = [sample(model, DIGITS, Sampling(steps=5)) for model in (one, two)]
    torch.testing.assert_close(*drawn, rtol=0, atol=1e-3)
    fresh = build_model(model_shape("dit-tiny"), seed=0).model.state_dict()
    assert not torch.equal(fresh["final_layer.linear.weight"], one.final_layer.linear.weight)


@pytest.mark.ranks
def test_the_command_draws_a_row_per_sample(checkpoints, tmp_path, capsys):
    sizes = {}
    for samples in (1, 3):
        out = tmp_path / "new" / f"{samples}.png"
        given = [str(checkpoints["two"]), "--out", str(out), "--samples", str(samples)]
        assert main([*given, "--steps", "4", "--guidance", "1.5", "--seed", "3"]) == 0
        sizes[samples] = imread(out).shape
        again = out.read_bytes()
        assert main([*given, "--steps", "4", "--guidance", "1.5", "--seed", "3"]) == 0
        assert out.read_bytes() == again
        capsys.readouterr()
        assert main([*given, "--steps", "4", "--guidance", "1.5", "--seed", "4", "--json"]) == 0
        assert out.read_bytes() != again
        printed = capsys.readouterr()
        assert json.loads(printed.out) == {
            "checkpoint": str(checkpoints["two"]),
            "seed": 4,
            "out": str(out),
            "images": 10 * samples,
            "texts": [],
        }
        assert printed.err == f"sampled: {10 * samples} images of step-00000002: {out}\n"
    assert sizes[1][1] == sizes[3][1]
    assert sizes[3][0] > 2 * sizes[1][0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("checkpoint", "options", "message"),
    [
        ("text", [], "--out: expected a name that ends in .txt, got picture.png"),
        ("text", ["--guidance", "3"], "--guidance 3.0: expected a checkpoint of a DiT"),
        ("one", ["--prompt", "1"], "--prompt 1: expected a checkpoint of a decoder"),
        ("one", ["--max-tokens", "0"], "max tokens: expected at least 1, got 0"),
        ("one", ["--temperature", "-1"], "temperature: expected a finite number"),
        ("one", ["--top-k", "-1"], "top k: expected at least 0, got -1"),
        ("nowhere", [], "is not a complete checkpoint"),
        ("one", ["--samples", "0"], "--samples: expected at least 1, got 0"),
        ("one", ["--steps", "1000"], "sampling steps: expected 1 to 999"),
        ("one", ["--precision", "float8-block"], "--precision float8-block: "),
        (
            "one",
            ["--out", "picture.gif"],
            "--out: expected a name that ends in .png, got picture.gif",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    checkpoints, tmp_path, capsys, monkeypatch, checkpoint, options, message
):
    monkeypatch.chdir(tmp_path)
    path = checkpoints.get(checkpoint, tmp_path / checkpoint)
    assert main([str(path), "--out", "picture.png", *options]) == EXIT_USAGE
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_folders_and_files_in_the_way_and_damage_are_refused(checkpoints, tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    for out, message in (
        (tmp_path / "folder.png", "--out: expected a file, got the folder"),
        (tmp_path / "file" / "picture.png", "is a file, not a folder"),
    ):
        assert main([str(checkpoints["one"]), "--out", str(out)]) == EXIT_USAGE
        assert message in capsys.readouterr().err
    damaged = tmp_path / "step-00000002"
    damaged.mkdir()
    (damaged / MANIFEST).write_bytes((checkpoints["one"] / MANIFEST).read_bytes())
    assert main([str(damaged), "--out", str(tmp_path / "picture.png")]) == EXIT_USAGE
    assert "is truncated" in capsys.readouterr().err
