"""Prepares the data of a run, once on each host: fingerprint, tokenizer, and the file of tokens.

Ranks that prepare nothing wait in short collectives, so that preparing a large corpus may take
longer than the timeout of one.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from integration.data.corpus import Corpus, open_corpus
from integration.data.text import TextWindows
from integration.data.tokenizer import (
    BYTES,
    FileTokenizer,
    bpe_size,
    read_tokenizer,
    train_bpe,
)
from integration.data.tokens import ByteStream, TokenFile, write_tokens
from integration.errors import UsageError

TOKENIZER_FILE = "tokenizer.json"
_FOLDER = "data"
_SECONDS_BETWEEN_COLLECTIVES = 5.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Tokenization:
    """How a text becomes tokens.

    Attributes:
        tokenizer: value of ``--tokenizer``.
        folder: run folder, where the tokenizer and the tokens are written; None: for bytes only.
        resumed: run folder with the tokenizer of the checkpoint that the run resumes; None: the run
            starts from the beginning.
        first_on_host: whether this rank prepares what ranks of its host share.
    """

    tokenizer: str = BYTES
    folder: Path | None = None
    resumed: Path | None = None
    first_on_host: bool = True


def prepare_text(
    path: Path | None, sequence_length: int, how: Tokenization, *, document_positions: bool = False
) -> TextWindows:
    """Returns the windows of a text; all ranks call it.

    Args:
        path: file or folder of text; None: the standard library's sources.
        sequence_length: tokens of a window.
        how: how text becomes tokens.
        document_positions: whether samples have the positions of tokens in their documents.

    Raises:
        UsageError: the text or the tokenizer cannot be read, or the hosts have other texts.
    """
    corpus = open_corpus(path)
    fingerprints = on_some_ranks(lambda: corpus.fingerprint, enabled=how.first_on_host)
    if len(set(fingerprints)) > 1:
        raise UsageError(
            f"--data: expected the same text on all hosts, got {len(set(fingerprints))} different"
            f" ones from {corpus.source}; copy one to all of them"
        )
    windows = partial(
        TextWindows,
        sequence_length=sequence_length,
        source=corpus.source,
        size=corpus.size,
        fingerprint=fingerprints[0],
        document_positions=document_positions,
    )
    if how.tokenizer == BYTES:
        return windows(ByteStream(corpus))
    assert how.folder is not None
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    (text,) = on_some_ranks(lambda: _tokenizer(corpus, how).json, enabled=is_first)
    tokenizer = FileTokenizer(text, how.tokenizer)
    key = hashlib.sha256(f"{fingerprints[0]} {tokenizer.fingerprint}".encode()).hexdigest()[:16]
    file = how.folder / _FOLDER / f"tokens-{key}.bin"

    def write_missing() -> None:
        if not file.exists():
            write_tokens(corpus, tokenizer, file)

    on_some_ranks(write_missing, enabled=how.first_on_host)
    write_missing()  # where ranks of a host are not known to share a file system
    tokens = TokenFile(file, tokenizer.vocabulary, tokenizer.end)
    return windows(tokens, tokenizer=tokenizer.fingerprint)


def _tokenizer(corpus: Corpus, how: Tokenization) -> FileTokenizer:
    """Reads or trains the tokenizer, and writes it into the run folder."""
    size = bpe_size(how.tokenizer)
    saved = None if how.resumed is None else how.resumed / TOKENIZER_FILE
    if saved is not None and saved.exists():
        tokenizer = read_tokenizer(saved)
        _require_option(tokenizer, how.tokenizer, saved)
    elif size is None:
        tokenizer = read_tokenizer(Path(how.tokenizer))
    else:
        tokenizer = train_bpe((block.text for block in corpus.blocks()), size)
    assert how.folder is not None
    file = how.folder / TOKENIZER_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(tokenizer.json, encoding="utf-8")
    os.replace(partial, file)
    return tokenizer


def _require_option(tokenizer: FileTokenizer, option: str, saved: Path) -> None:
    """Refuses an option that is not the tokenizer of the checkpoint.

    Raises:
        UsageError: names the option and the file of that tokenizer.
    """
    size = bpe_size(option)
    if size is None:
        is_same = read_tokenizer(Path(option)).fingerprint == tokenizer.fingerprint
    else:
        is_same = size == tokenizer.vocabulary
    if not is_same:
        raise UsageError(
            f"--tokenizer {option}: expected the tokenizer of {saved}, of {tokenizer.vocabulary}"
            " tokens, with which the checkpoint was trained, got another one; give that, or"
            " another --out"
        )


def on_some_ranks(work: Callable[[], Result], *, enabled: bool) -> list[Result]:
    """Does some work on the enabled ranks, while the others wait; all ranks call it.

    Returns:
        The results, which are sent as objects, in the order of the ranks; on all ranks.

    Raises:
        UsageError: of the first rank whose work raised one.
        RuntimeError: the work raised something else on another rank.
    """
    if not dist.is_initialized():
        return [work()]
    with ThreadPoolExecutor(1, "data") as pool:
        future = pool.submit(work) if enabled else None
        waiting = [True]
        while any(waiting):
            if future is not None:
                wait([future], timeout=_SECONDS_BETWEEN_COLLECTIVES)
            waiting = [True] * dist.get_world_size()
            dist.all_gather_object(waiting, future is not None and not future.done())
    outcome = _outcome(future)
    outcomes = [outcome] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    error = None if future is None else future.exception()
    if error is not None:
        raise error
    for rank, each in enumerate(outcomes):
        if each.sentence is not None:
            kind = UsageError if each.is_usage else RuntimeError
            raise kind(each.sentence if each.is_usage else f"rank {rank}: {each.sentence}")
    return [result for each in outcomes for result in each.results]


@dataclass(frozen=True)
class _Outcome:
    """The outcome of work on one rank.

    Attributes:
        results: the result; empty without one.
        sentence: message of the error; None without one.
        is_usage: whether that is a `UsageError`.
    """

    results: tuple[Any, ...] = ()
    sentence: str | None = None
    is_usage: bool = False


def _outcome(future: Future[Any] | None) -> _Outcome:
    if future is None:
        return _Outcome()
    error = future.exception()
    if error is None:
        return _Outcome((future.result(),))
    return _Outcome(sentence=str(error), is_usage=isinstance(error, UsageError))
