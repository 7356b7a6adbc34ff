"""``--attn-mask-type block-causal``: attention within the documents of packed sequences."""

import numpy as np
import pytest
import torch

from integration.data import POSITIONS, TextWindows
from integration.data.text import positions_in_documents
from integration.errors import UsageError
from integration.models import build_model, model_shape
from integration.train.config import TrainConfig
from integration.train.validation import validate

# torch says so of every mesh without a CUDA device.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete")

LENGTH, END = 48, 0
DOCUMENTS = {"attn_mask_type": "block-causal"}


def words(generator, count):
    """A text that a model learns: words in an order that depends on the one before."""
    known = ["alpha", "beta", "gamma", "delta", "epsilon"]
    place, found = int(torch.randint(5, (), generator=generator)), []
    for _ in range(count):
        place = (place * 2 + int(torch.randint(2, (), generator=generator))) % 5
        found.append(known[place])
    return " ".join(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents of 1 to 9 words: a window has parts of several, and most are of one or two."""
    path, generator = tmp_path_factory.mktemp("documents"), torch.Generator().manual_seed(0)
    for number in range(400):
        count = int(torch.randint(1, 10, (), generator=generator))
        (path / f"{number:03d}.txt").write_text(words(generator, count))
    return path


class Stream:
    """Tokens at hand."""

    unit, end = "tokens", END

    def __init__(self, tokens):
        self._tokens = np.array(tokens)

    def __len__(self):
        return len(self._tokens)

    def read(self, start, stop):
        return self._tokens[start:stop].copy()


def test_positions_restart_behind_the_end_of_a_document_and_with_a_window():
    tokens = torch.tensor([5, 6, END, 7, END, END, 8, 9])
    assert positions_in_documents(tokens, END).tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    stream = Stream([1, 2, END, 3, 4, END, 5, 6])
    windows = TextWindows(stream, 4, source="", size=8, fingerprint="", document_positions=True)
    first, second = (windows.sample(slot, 0) for slot in (0, 1))
    assert first[POSITIONS].tolist() == [0, 1, 2, 0]
    assert second[POSITIONS].tolist() == [0, 1, 0, 1]  # the first goes on with a document
    assert torch.equal(second["labels"], second["input_ids"])  # no label is masked
    plain = TextWindows(stream, 4, source="", size=8, fingerprint="")
    assert plain.sample(0, 0).keys() == {"input_ids", "labels"}


@pytest.mark.parametrize("name", ["llama-tiny", "gemma3-tiny", "gpt-oss-tiny", "mixtral-tiny"])
def test_a_document_has_the_logits_that_it_has_alone(name):
    """On one device; gemma3 and gpt-oss have windows of 16 tokens."""
    torch.manual_seed(0)
    lengths = (3, 25, 20)
    tokens = torch.randint(1, 256, (LENGTH,))
    tokens[[2, 27, 47]] = END
    model = build_model(model_shape(name), seed=0).eval()
    with torch.no_grad():
        packed = model(
            input_ids=tokens[None], position_ids=positions_in_documents(tokens, END)[None]
        ).logits[0]
        for part, logits in zip(tokens.split(lengths), packed.split(lengths), strict=True):
            torch.testing.assert_close(model(input_ids=part[None]).logits[0], logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"system": "dtensor-tp"},
            r"'dtensor-tp' does not support --attn-mask-type block-causal; use .*single, .*plan",
        ),
        (
            {"system": "plan", "plan": "json:loads", "tp": 2},
            r"--attn-mask-type block-causal: expected a plan of the zoo, .*got --plan json:loads",
        ),
        (
            {"system": "plan", "tp": 2, "compile": "aot_eager"},
            r"--compile aot_eager: expected --attn-mask-type causal under plan, .*got --attn-mask",
        ),
        (
            {"system": "plan", "tp": 2, "fingerprint": True, "dropout": 0.1},
            r"--fingerprint: expected --attn-mask-type causal with --dropout under plan, .*got",
        ),
        (
            {"system": "plan", "tp": 2, "dropout": 0.1, "device": "sim"},
            r"--dropout 0.1: expected --device cpu with --attn-mask-type block-causal, .*got",
        ),
    ],
    ids=str,
)
def test_what_knows_no_documents_refuses_them(options, message):
    options = {"model": "llama-tiny", "ranks": 2} | options
    with pytest.raises(UsageError, match=message):
        validate(TrainConfig(**options | DOCUMENTS))


def test_sequences_within_documents_are_of_any_length():
    options = {"system": "plan", "model": "llama-tiny", "cp": 2, "ranks": 2, "sequence_length": 49}
    validate(TrainConfig(**options | DOCUMENTS))
    message = r"--cp 2: expected --sequence-length to be a multiple"
    with pytest.raises(UsageError, match=message):
        validate(TrainConfig(**options))
    in_stages = {"ranks": 4, "pp_degree": 2, "micro_batch": 2}
    with pytest.raises(UsageError, match=message):  # which send each other their parts unpadded
        validate(TrainConfig(**options | DOCUMENTS | in_stages))


COMMON = {"sequence_length": LENGTH, "global_batch": 8, "clip_grad_norm": 1.0, "init": "sharded"}
SP = {"tp": 2, "sp": True}
CP, FSDP, HSDP = {"cp": 2}, {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}
STATIC = {"static": True}
# By the number of ranks and the model: the options of runs of a plan, or of another system.
FAST = {
    "llama-tiny": [
        {"system": "fsdp"}, FSDP, CP | STATIC, SP | STATIC, {"cp": 2, "cp_method": "ulysses"},
    ],
    "qwen3-tiny": [CP, FSDP | STATIC],
    "mixtral-tiny": [CP | {"ep": 2}, {"dp_replicate": 2, "ep": 2} | STATIC],
}  # fmt: skip
OF_TWO = {
    "llama-tiny": [
        *({"system": name} for name in ("ddp", "fsdp1", "fsdp2", "fsdp")),
        *({"dp_shard": 2, "static": static} for static in (False, True)),
        *({"dp_replicate": 2, "static": static} for static in (False, True)),
        *({"tp": 2, "loss_parallel": True, "static": static} for static in (False, True)),
        *(
            {"cp": 2, "cp_method": method, "static": static}
            for method in ("ring", "all-gather", "ulysses")
            for static in (False, True)
        ),
        {"dp_shard": 2, "zero3": True},
        CP | {"activation_checkpointing": "full"},
        FSDP | {"activation_checkpointing": "full"} | STATIC,
    ],
    "qwen3-tiny": [FSDP, SP, CP | STATIC],
    "gemma3-tiny": [FSDP, SP | STATIC, CP, CP | STATIC],
    "mixtral-tiny": [FSDP | {"ep": 2}, SP | {"ep": 2}, CP | {"ep": 2} | STATIC, CP],
    "qwen3-moe-tiny": [FSDP | {"ep": 2} | STATIC, CP | {"ep": 2}],
    "gpt-oss-tiny": [FSDP, SP, SP | STATIC, FSDP | {"ep": 2} | STATIC, CP, CP | {"ep": 2} | STATIC],
    "deepseek-v3-tiny": [FSDP, SP | STATIC, CP, CP | STATIC],
}
OF_FOUR = {
    "llama-tiny": [
        FSDP | CP, CP | SP | {"loss_parallel": True}, FSDP | SP | STATIC, {"cp": 4} | STATIC,
        FSDP | CP | STATIC, HSDP, HSDP | STATIC,
    ],
    "qwen3-tiny": [FSDP | CP, CP | SP | STATIC],
    "mixtral-tiny": [
        FSDP | CP | {"ep": 4}, FSDP | CP | {"ep": 2} | STATIC, CP | SP | {"ep": 2},
        *({"dp_shard": 4, "ep": 2, "static": static} for static in (False, True)),
    ],
    "gpt-oss-tiny": [CP | SP, CP | SP | STATIC],
}  # fmt: skip


def check(ranks, model, products, steps, train_runs, folder, out, **common):
    """Compares with one device, whose mask is transformers'."""
    tolerance = model_shape(model).tolerance
    shared = COMMON | {"model": model, "data": folder} | DOCUMENTS | common
    alone = shared | {"init": "whole"}
    runs = [{"system": "plan"} | shared | product for product in products]
    for run in runs:
        data = run.get("dp_shard", 1) * run.get("dp_replicate", 1)
        run["micro_batch"] = 4 // (data if run["system"] == "plan" else 2)
        if run["system"] != "plan":  # whose draws on shards are one device's
            run["init"] = "whole"
    expected, crossing = train_runs(
        1,
        [alone | {"micro_batch": 4}, alone | {"micro_batch": 4, "attn_mask_type": "causal"}],
        out=out / "one",
        steps=steps,
    )
    assert max(abs(a - b) for a, b in zip(expected, crossing, strict=True)) > 100 * tolerance
    found = []
    for first in range(0, len(runs), 4):  # a call of some has minutes
        some = runs[first : first + 4]
        found += train_runs(ranks, some, out=out / "all", steps=steps)
    for run, losses in zip(products, found, strict=True):
        assert losses == pytest.approx(expected, rel=0, abs=tolerance), run


@pytest.mark.ranks
@pytest.mark.parametrize(
    "model",
    [name if name == "llama-tiny" else pytest.param(name, marks=pytest.mark.slow) for name in FAST],
)
def test_losses_are_those_of_one_device(model, train_runs, folder, tmp_path):
    check(2, model, FAST[model], 4, train_runs, folder, tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "model"), [(2, model) for model in OF_TWO] + [(4, model) for model in OF_FOUR]
)
def test_products_train_as_one_device(ranks, model, train_runs, folder, tmp_path):
    products = (OF_TWO if ranks == 2 else OF_FOUR)[model]
    check(ranks, model, products, 20, train_runs, folder, tmp_path)


PP, RECOMPUTED = {"pp_degree": 2, "pp_microbatches": 2}, {"activation_checkpointing": "full"}
ZB, ZBV = {"pp_schedule": "InterleavedZeroBubble"}, {"pp_schedule": "ZBVZeroBubble"}
OF_STAGES = {
    2: [
        PP | {"system": "single"}, PP | {"pp_schedule": "Interleaved1F1B", "system": "single"}, PP,
        PP | STATIC, PP | ZB | {"system": "single"}, PP | ZBV | RECOMPUTED,
    ],
    4: [
        PP | {"system": "fsdp"}, PP | FSDP, PP | FSDP | STATIC, PP | CP, PP | CP | STATIC,
        PP | SP | RECOMPUTED, PP | CP | ZBV | STATIC, PP | CP | ZB | RECOMPUTED,
    ],
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", OF_STAGES)
def test_stages_get_the_documents_of_their_microbatches(ranks, train_runs, folder, tmp_path):
    check(ranks, "llama-tiny", OF_STAGES[ranks], 3, train_runs, folder, tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_sequences_of_any_length_train_as_one_device(train_runs, folder, tmp_path):
    """They are padded to be sharded."""
    products = [CP, CP | STATIC, {"cp": 2, "cp_method": "ulysses"}]
    check(2, "llama-tiny", products, 20, train_runs, folder, tmp_path, sequence_length=49)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:280"])
def test_dropout_and_tokens_of_a_tokenizer(tokenizer, train_runs, folder, tmp_path):
    dropout = {"dropout": 0.1, "tokenizer": tokenizer}
    products = [product | {"random": "dist-rng"} for product in (CP, CP | STATIC, FSDP, SP)]
    check(2, "llama-tiny", products, 20, train_runs, folder, tmp_path, **dropout)
