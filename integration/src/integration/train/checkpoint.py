"""Checkpoints that are complete or absent, in torch's distributed checkpoint (DCP) format.

Note [complete]
    DCP writes into ``checkpoints/.step-N.partial``. When every rank is done, rank 0 adds
    ``manifest.json``, which names every file with its size and checksum, and renames the
    folder to ``step-N``: the rename is the moment a checkpoint exists. A folder whose files
    do not have the sizes and checksums of its manifest was damaged later, and is refused
    before anything is read from it. The manifest has a checksum of its own. Ranks compute
    checksums while they write, and divide the files among them to verify them.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from integration.errors import UsageError
from integration.train.checksum import checksum, file_checksum
from integration.train.world import World

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
_OWN_CHECKSUM = "checksum"
# Flat keys are parameter names: they load into any system, whatever its optimizer's groups.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must share with the run that loads it, or the losses mean nothing."""

    model: dict[str, Any]
    data_fingerprint: str
    sequence_length: int
    global_batch: int
    seed: int
    optimizer: str = "adamw"  # what checkpoints without a name of it are of


@dataclass(frozen=True)
class Manifest:
    """The description that makes a folder a checkpoint.

    Attributes:
        step: steps completed.
        world_size: ranks that wrote it.
        files: size in bytes by file name.
        checksums: by file name; none in checkpoints that were written before there were any.
    """

    step: int
    world_size: int
    identity: Identity
    files: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


def folder_name(step: int) -> str:
    """Returns the name of a step's checkpoint; names sort as steps do."""
    return f"step-{step:08d}"


class CheckpointDraft:
    """A checkpoint that is being written: absent until ``commit``.

    Attributes:
        partial: the folder that DCP writes to.
        final: the folder that it becomes.
    """

    def __init__(self, run: Path, step: int, identity: Identity, world: World) -> None:
        self.step = step
        self.final = run / FOLDER / folder_name(step)
        self.partial = self.final.with_name(f".{self.final.name}.partial")
        self._identity, self._world = identity, world

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Clears what a killed run left, and returns the state to write; all ranks call it."""
        if self._world.is_main and self.partial.exists():
            shutil.rmtree(self.partial)
        dist.barrier()
        rng = {f"rank{self._world.rank}": torch.get_rng_state()}
        return _training_state(model, optimizer) | {"rng": rng}

    def commit(self, checksums: Mapping[str, str]) -> None:
        """Makes a checkpoint of what all ranks have written; rank 0 calls it.

        Args:
            checksums: of all files, by name.
        """
        sizes = {path.name: path.stat().st_size for path in sorted(self.partial.iterdir())}
        ordered = {name: checksums[name] for name in sizes}
        manifest = Manifest(self.step, self._world.size, self._identity, sizes, ordered)
        _write_durably(self.partial / MANIFEST, manifest_text(manifest))
        _sync_folder(self.partial)
        _replace_folder(self.partial, self.final)
        _sync_folder(self.final.parent)

    def discard(self) -> None:
        """Removes what there is of one that could not be written; rank 0 calls it."""
        shutil.rmtree(self.partial, ignore_errors=True)


def manifest_text(manifest: Manifest) -> str:
    """Returns the content of a manifest's file: JSON that ends with a checksum of all before."""
    values = asdict(manifest)
    own = checksum(json.dumps(values, indent=2).encode())
    return json.dumps(values | {_OWN_CHECKSUM: own}, indent=2)


# Returns what is wrong with the files of a complete checkpoint, as a sentence; None: nothing.
Verification = Callable[[Path, Manifest], str | None]


def unverified(path: Path, manifest: Manifest) -> None:
    """Verifies no more than sizes and the manifest, which is all that a quick look needs."""
    del path, manifest


def verify(path: Path, manifest: Manifest) -> str | None:
    """Returns which file of a checkpoint does not have its checksum; this process reads all."""
    return _find_damage(path, manifest, list(manifest.checksums))


def verify_together(world: World) -> Verification:
    """Returns a verification in which each rank reads a part of the files; all ranks call it."""

    def verification(path: Path, manifest: Manifest) -> str | None:
        mine = list(manifest.checksums)[world.rank :: world.size]
        found: list[str | None] = [None] * world.size
        dist.all_gather_object(found, _find_damage(path, manifest, mine))
        return next((sentence for sentence in found if sentence is not None), None)

    return verification


def _find_damage(path: Path, manifest: Manifest, names: Sequence[str]) -> str | None:
    for name in names:
        try:
            found = file_checksum(path / name)
        except OSError as error:
            return f"checkpoint {path} is damaged: {name} cannot be read ({error.strerror})"
        if found != manifest.checksums[name]:
            return (
                f"checkpoint {path} is damaged: {name} has checksum {found} instead of"
                f" {manifest.checksums[name]}"
            )
    return None


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    verified: bool = False,
) -> None:
    """Reads a complete checkpoint into the model, the optimizer and the generator.

    The random generator continues where it stood when as many ranks load as have saved;
    otherwise it keeps the run's seed.

    Args:
        path: of the checkpoint.
        model: as its system wraps it.
        optimizer: of its parameters.
        world: this rank's place.
        verified: whether its checksums have been verified; otherwise they are here.

    Raises:
        UsageError: a file is missing or damaged.
    """
    manifest = read_manifest(path, unverified if verified else verify_together(world))
    state = _training_state(model, optimizer)
    rng_key = f"rank{world.rank}"
    same_world = manifest.world_size == world.size
    if same_world:
        state["rng"] = {rng_key: torch.get_rng_state()}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_OPTIONS,
    )
    if same_world:
        torch.set_rng_state(state["rng"][rng_key])


def load_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Reads a complete checkpoint's weights into tensors by name, in this process alone.

    Raises:
        UsageError: a file is missing or damaged.
    """
    read_manifest(path, verify)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load")
        dcp.load({"model": weights}, checkpoint_id=path, no_dist=True)


def read_manifest(path: Path, verification: Verification = unverified) -> Manifest:
    """Returns the manifest of the checkpoint at ``path`` after checking that all of it is there.

    Args:
        path: of the checkpoint.
        verification: of the files' contents.

    Raises:
        UsageError: there is no checkpoint, or a file is missing, has another size or is damaged.
    """
    try:
        return _complete_manifest(path, verification)
    except _IncompleteError as error:
        raise UsageError(f"{error}; name another one, or use --resume auto") from error


class _IncompleteError(Exception):
    """Says of a folder why it is no complete checkpoint."""


def _complete_manifest(path: Path, verification: Verification) -> Manifest:
    try:
        text = (path / MANIFEST).read_bytes().decode()
        values = json.loads(text)
        own = values.pop(_OWN_CHECKSUM, None)
        values["identity"] = Identity(**values["identity"])
        manifest = Manifest(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _IncompleteError(
            f"{path} is not a complete checkpoint: its {MANIFEST} cannot be read"
        ) from error
    # Older ones have neither checksum.
    if (own is not None or "checksums" in values) and text != manifest_text(manifest):
        raise _IncompleteError(
            f"checkpoint {path} is damaged: {MANIFEST} does not have its own checksum"
        )
    for name, size in manifest.files.items():
        found = (path / name).stat().st_size if (path / name).exists() else 0
        if found != size:
            raise _IncompleteError(
                f"checkpoint {path} is truncated: {name} has {found} bytes instead of {size}"
            )
    damage = verification(path, manifest)
    if damage is not None:
        raise _IncompleteError(damage)
    return manifest


def is_complete(path: Path) -> bool:
    """Returns whether a folder is a checkpoint with all its files."""
    try:
        _complete_manifest(path, unverified)
    except _IncompleteError:
        return False
    return True


def require_same(manifest: Manifest, identity: Identity, path: Path) -> None:
    """Refuses a checkpoint that was written for another model, other data or other batches.

    Raises:
        UsageError: naming the first thing that differs, with both values.
    """
    saved, wanted = _flat(manifest.identity), _flat(identity)
    for key in sorted(saved.keys() | wanted.keys()):
        if saved.get(key) != wanted.get(key):
            raise UsageError(
                f"checkpoint {path} belongs to another run: its {key} is {saved.get(key)!r},"
                f" this run's is {wanted.get(key)!r}; give another --out or --resume,"
                " or the options it was made with"
            )


@dataclass(frozen=True)
class CheckpointSearch:
    """What a search for checkpoints came to.

    Attributes:
        path: the newest complete checkpoint, if there is one.
        passed_over: a sentence for each newer folder that is not complete.
    """

    path: Path | None
    passed_over: tuple[str, ...]


def newest_complete(folder: Path, verification: Verification = unverified) -> CheckpointSearch:
    """Returns a run folder's newest complete checkpoint, and why newer ones were passed over.

    Args:
        folder: of the run.
        verification: of the contents of each that is looked at.
    """
    passed_over: list[str] = []
    for path in _candidates(folder / FOLDER):
        try:
            _complete_manifest(path, verification)
        except _IncompleteError as error:
            passed_over.append(str(error))
        else:
            return CheckpointSearch(path, tuple(passed_over))
    return CheckpointSearch(None, tuple(passed_over))


def _candidates(folder: Path) -> list[Path]:
    """Folders that may be checkpoints, the newest first."""
    # A run that was killed while it replaced a checkpoint has left that under its other name.
    replaced = [
        path for path in folder.glob(".step-*.replaced") if not (folder / path.stem[1:]).exists()
    ]
    return sorted([*folder.glob("step-*"), *replaced], key=lambda p: p.name.lstrip("."))[::-1]


def _training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}


def _flat(identity: Identity) -> dict[str, Any]:
    values = asdict(identity)
    model: dict[str, Any] = values.pop("model")
    return values | {f"model.{key}": value for key, value in model.items()}


def _replace_folder(source: Path, target: Path) -> None:
    # A folder of that name is either damaged or of a run that was resumed before it.
    previous = target.with_name(f".{target.name}.replaced")
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    os.rename(source, target)
    shutil.rmtree(previous, ignore_errors=True)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Have the names in a folder survive a power failure; their files were synced before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
