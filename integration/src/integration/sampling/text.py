"""Samples text from a decoder, token by token, with transformers' ``generate``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from integration.data import TOKENIZER_FILE
from integration.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, read_tokenizer
from integration.errors import UsageError
from integration.models import build_model, shape_from
from integration.systems.base import LayerPolicies
from integration.train.checkpoint import checkpoint
from integration.train.model.precision import use_precision

_NO_POLICIES = LayerPolicies()


@dataclass(frozen=True)
class TextSampling:
    """Options of text.

    Raises:
        UsageError: an option is outside its range.
    """

    prompt: str = ""
    """Text to continue; empty: the beginning of a document."""
    max_tokens: int = 200
    """Tokens to generate at most; the end of a document ends them, too."""
    temperature: float = 1.0
    """Divides the logits before sampling; 0 takes the most probable token."""
    top_k: int = 0
    """Samples from this many most probable tokens; 0: from all."""
    tokenizer: Path | None = None
    """The checkpoint's tokenizer.json; by default that of its run folder."""

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.max_tokens < 1:
            raise UsageError(f"max tokens: expected at least 1, got {self.max_tokens}; give more")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(
                f"temperature: expected a finite number of at least 0, got {self.temperature};"
                " give another number"
            )
        if self.top_k < 0:
            raise UsageError(f"top k: expected at least 0, got {self.top_k}; give 0 or more")


@dataclass(frozen=True)
class TextModel:
    """A decoder in eval mode, with its tokenizer."""

    model: nn.Module
    tokenizer: Tokenizer


def load_text_model(
    path: Path,
    tokenizer: Path | None = None,
    policies: LayerPolicies = _NO_POLICIES,
    device: str = "cpu",
) -> TextModel:
    """Loads the decoder of a checkpoint of any system and number of ranks, on the CPU.

    Args:
        path: the checkpoint.
        tokenizer: its tokenizer.json; None: that of its run folder, or bytes.
        policies: with the recipe of its products.
        device: type of the device on which it will run.

    Raises:
        UsageError: the checkpoint is incomplete, its model generates no text, the tokenizer is not
            the one that it was trained with, or the recipe does not fit.
    """
    identity = checkpoint.read_manifest(path).identity
    shape = shape_from(identity.model)
    found = _tokenizer(path, identity.tokenizer, tokenizer)
    model = build_model(shape, seed=0)
    if not hasattr(model, "generate"):
        raise UsageError(
            f"checkpoint {path}: expected a decoder, got a {shape.family} model, which generates no"
            " text; give a checkpoint of a decoder"
        )
    use_precision(model, policies, device)
    checkpoint.load_weights(path, model.state_dict())
    return TextModel(model.eval(), found)


def _tokenizer(path: Path, fingerprint: str | None, given: Path | None) -> Tokenizer:
    """Returns the tokenizer of a checkpoint whose run had one with this fingerprint."""
    if fingerprint is None:
        if given is not None:
            raise UsageError(
                f"--tokenizer {given}: expected none, as tokens of {path} are bytes; leave it out"
            )
        return ByteTokenizer()
    file = given or path.resolve().parent.parent / TOKENIZER_FILE
    tokenizer: FileTokenizer = read_tokenizer(file)
    if tokenizer.fingerprint != fingerprint:
        raise UsageError(
            f"--tokenizer {file}: expected the tokenizer that {path} was trained with, of SHA-256"
            f" {fingerprint}, got {tokenizer.fingerprint}; give that file"
        )
    return tokenizer


class _TokenCounter:
    """Counts steps of transformers' ``generate``, as its streamer; the first has the prompt."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress, self._done = progress, 0

    def put(self, tokens: Tensor) -> None:
        self._progress(self._done)
        self._done += 1

    def end(self) -> None:
        """Takes the end of the texts, of which nothing is shown."""


@torch.no_grad()
def generate(
    decoder: TextModel,
    options: TextSampling,
    *,
    samples: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Returns texts that begin with the prompt.

    Torch's generator of the CPU is seeded, and restored afterwards.

    Args:
        decoder: the model and its tokenizer.
        options: the prompt and how to sample.
        samples: number of texts.
        seed: of the tokens.
        progress: called with the number of tokens that each text has so far.

    Raises:
        UsageError: the prompt and the new tokens are longer than the model's positions.
    """
    # Imported on use, as it takes seconds.
    from transformers import GenerationConfig

    model: Any = decoder.model
    tokenizer = decoder.tokenizer
    prompt = tokenizer.encode([options.prompt])[0] or [tokenizer.end]
    longest = model.config.max_position_embeddings
    if len(prompt) + options.max_tokens > longest:
        raise UsageError(
            f"--max-tokens {options.max_tokens}: expected at most {longest - len(prompt)}, as the"
            f" model has {longest} positions and the prompt {len(prompt)} tokens; give fewer"
        )
    how: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        how = {"do_sample": True, "temperature": options.temperature, "top_k": options.top_k}
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=options.max_tokens,
        eos_token_id=tokenizer.end,
        pad_token_id=tokenizer.end,
        use_cache=True,
        **how,
    )
    inputs = torch.tensor([prompt] * samples, device=model.device)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        found = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=config,
            streamer=None if progress is None else _TokenCounter(progress),
        )
    return [_text(row, len(prompt), options.prompt, tokenizer) for row in found.tolist()]


def _text(tokens: list[int], prompt_tokens: int, prompt: str, tokenizer: Tokenizer) -> str:
    """Returns the text up to the end of the document."""
    end = len(tokens)
    if tokenizer.end in tokens[prompt_tokens:]:
        end = tokens.index(tokenizer.end, prompt_tokens)
    return tokenizer.decode(tokens[0 if prompt else prompt_tokens : end])
