"""Folders with the names that accelerate's example scripts pass to the Hub's loaders.

``from_pretrained``, ``load_dataset`` and ``evaluate.load`` look for a folder in the working
directory before they ask the Hub. The models are tiny and have random weights, the texts are of
random words, so that the scripts train in seconds and without a network.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

__all__ = ["write", "write_images"]

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "en", "io", "ul")]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>")
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
METRIC = '''
"""The metric of GLUE's MRPC: accuracy and F1."""

import datasets
import evaluate
import numpy as np


class Glue(evaluate.Metric):
    def _info(self):
        features = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="", citation="", features=datasets.Features(features)
        )

    def _compute(self, predictions, references):
        predicted, expected = np.asarray(predictions), np.asarray(references)
        both = int((predicted & expected).sum())
        ones = max(int(predicted.sum() + expected.sum()), 1)
        return {"accuracy": float((predicted == expected).mean()), "f1": 2 * both / ones}
'''


def write(folder: Path) -> None:
    """Writes the folders of the models, data sets and the metric.

    ``equal_lengths`` below has another MRPC, whose sentences have one number of words.

    Args:
        folder: the working directory of the scripts.
    """
    source = random.Random(0)
    torch.manual_seed(0)
    _model(folder / "bert-base-cased", BertModel(_config(BertConfig)))
    tied = _config(LlamaConfig, tie_word_embeddings=True)
    _model(folder / "HuggingFaceTB" / "SmolLM-360M", LlamaForCausalLM(tied))
    llama = LlamaForCausalLM(_config(LlamaConfig))
    _model(folder / "NousResearch" / "Hermes-3-Llama-3.1-8B", llama)
    mrpc = {
        "train": [*_pairs(96, source)],
        "validation": [*_pairs(48, source)],
        "test": [*_pairs(8, source)],
    }
    _data_set(folder / "nyu-mll" / "glue", "mrpc", mrpc)
    other = random.Random(1)
    one_length = {split: _pairs(len(rows), other, shortest=12) for split, rows in mrpc.items()}
    _data_set(folder / "equal_lengths" / "nyu-mll" / "glue", "mrpc", one_length)
    # Most lines of WikiText are empty, too; the script takes the first 500.
    lines = {"train": _texts(32, source, 500), "validation": _texts(8, source)}
    _data_set(folder / "Salesforce" / "wikitext", "wikitext-2-v1", lines)
    stories = {"train": _texts(256, source)}
    _data_set(folder / "roneneldan" / "TinyStories", "default", stories)
    metric = folder / "glue" / "glue.py"
    metric.parent.mkdir(parents=True)
    metric.write_text(METRIC.lstrip())


def write_images(folder: Path, cache: Path) -> None:
    """Writes pictures of two breeds of pets, and the ResNet that timm would download.

    timm asks the Hub's cache for weights, and not the working directory.

    Args:
        folder: the working directory of the scripts; the pictures are in its ``images``.
        cache: ``HF_HUB_CACHE``.
    """
    from PIL import Image
    from safetensors.torch import save_file
    from timm import create_model

    torch.manual_seed(0)
    (folder / "images").mkdir()
    for number in range(10):
        pixels = torch.randint(256, (48, 64, 3), dtype=torch.uint8)
        pixels[..., number % 2] //= 2  # the breeds differ in a color
        file = folder / "images" / f"{('beagle', 'persian')[number % 2]}_{number}.jpg"
        Image.fromarray(pixels.numpy()).save(file)
    model = create_model("resnet50d", pretrained=False)
    hub = cache / f"models--{model.pretrained_cfg['hf_hub_id'].replace('/', '--')}"
    commit = "0" * 40
    for part in (hub / "refs", hub / "snapshots" / commit):
        part.mkdir(parents=True)
    (hub / "refs" / "main").write_text(commit)
    save_file(model.state_dict(), hub / "snapshots" / commit / "model.safetensors")


def _config(kind: Any, **options: Any) -> Any:
    size = len(WORDS) + len(SPECIAL)
    return kind(vocab_size=size, num_attention_heads=4, **TINY, **options)


def _model(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _data_set(folder: Path, config: str, splits: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Writes a file of each split and the README that names them, as data sets of the Hub have."""
    files = []
    for split, rows in splits.items():
        file = folder / config / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(f"  - split: {split}\n    path: {config}/{split}.jsonl\n")
    head = f"configs:\n- config_name: {config}\n  data_files:\n"
    (folder / "README.md").write_text("---\n" + head + "".join(files) + "---\n")


def _sentence(source: random.Random, words: Sequence[str] = WORDS, shortest: int = 6) -> str:
    return " ".join(source.choices(words, k=source.randint(shortest, 12)))


def _pairs(count: int, source: random.Random, shortest: int = 6) -> Iterable[Mapping[str, Any]]:
    """Yields two sentences and whether the words of both are of one half of the vocabulary."""
    for number in range(count):
        label = source.randint(0, 1)
        halves = WORDS[::2], WORDS[1::2]
        first, second = (_sentence(source, halves[half], shortest) for half in (0, 1 - label))
        yield {"sentence1": first, "sentence2": second, "label": label, "idx": number}


def _texts(
    count: int, source: random.Random, lines: int | None = None
) -> Iterable[Mapping[str, Any]]:
    """Yields lines of which the first are text and the rest empty."""
    for number in range(count if lines is None else lines):
        yield {"text": _sentence(source) if number < count else ""}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    if all(map(importlib.util.find_spec, ("timm", "torchvision"))):
        write_images(Path(sys.argv[1]), Path(sys.argv[2]))
