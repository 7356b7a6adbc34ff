"""Atomic checkpoints in the format of torch's distributed checkpoint (DCP).

Note [complete checkpoints]
    DCP writes to ``checkpoints/.step-N.partial``. When every rank has finished, rank 0 writes
    ``manifest.json``, which lists every file with its size and checksum, and renames the folder to
    ``step-N``: a checkpoint exists from the rename on. A folder whose files do not match its
    manifest was damaged afterwards, and is refused before anything is loaded. The manifest has its
    own checksum. Ranks compute checksums while they write, and each verifies some of the files.
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

from integration.device import CPU, Device
from integration.errors import UsageError
from integration.train.checkpoint.checksum import checksum, file_checksum
from integration.train.launch.world import World
from integration.train.model.loss_scale import LossScale

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
_OWN_CHECKSUM = "checksum"
# Flat keys are parameter names, which load into any system, whatever its parameter groups.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Identity:
    """The properties that a checkpoint and the run that loads it must have in common."""

    model: dict[str, Any]
    data_fingerprint: str
    sequence_length: int
    global_batch: int
    seed: int
    optimizer: str = "adamw"  # the default of older checkpoints, which do not name it
    tokenizer: str | None = None  # its SHA-256; None: bytes, or no text
    eval_samples: int = 0


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete checkpoint.

    Attributes:
        step: number of completed steps.
        world_size: number of ranks that wrote it.
        files: size in bytes by file name.
        checksums: checksum by file name; empty in older checkpoints, which have none.
        device: type of the ranks' devices.
        equal_generators: whether the random generators of all ranks had the same state, as they
            have where dist-rng draws one device's numbers.
        loss_scale: of the next step; None but with fp16.
    """

    step: int
    world_size: int
    identity: Identity
    files: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"  # the default of older checkpoints, which do not name it
    equal_generators: bool = False  # not known of older checkpoints
    loss_scale: LossScale | None = None


def folder_name(step: int) -> str:
    """Returns the name of a step's checkpoint; names sort as steps do."""
    return f"step-{step:08d}"


class CheckpointDraft:
    """A checkpoint that is being written, and does not exist until ``commit``.

    Attributes:
        partial: folder that DCP writes to.
        final: folder after ``commit``.
    """

    def __init__(
        self,
        run: Path,
        step: int,
        identity: Identity,
        world: World,
        device: Device = CPU,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.step = step
        self.final = run / FOLDER / folder_name(step)
        self.partial = self.final.with_name(f".{self.final.name}.partial")
        self._identity, self._world, self._device = identity, world, device
        self._equal_generators, self._loss_scale = False, loss_scale

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Removes a killed run's partial folder and returns the state; all ranks call it."""
        if self._world.is_main and self.partial.exists():
            shutil.rmtree(self.partial)
        digests: list[str] = [""] * self._world.size
        states = self._device.random_state()
        text = b"".join(state.numpy().tobytes() for state in states.values())
        dist.all_gather_object(digests, checksum(text))  # a barrier as well
        self._equal_generators = len(set(digests)) == 1
        return _training_state(model, optimizer) | {"rng": _random_state(self._world, self._device)}

    def commit(self, checksums: Mapping[str, str]) -> None:
        """Completes the checkpoint that all ranks have written; rank 0 calls it.

        Args:
            checksums: checksums of all files, by name.
        """
        sizes = {path.name: path.stat().st_size for path in sorted(self.partial.iterdir())}
        ordered = {name: checksums[name] for name in sizes}
        manifest = Manifest(
            self.step, self._world.size, self._identity, sizes, ordered, self._device.type,
            self._equal_generators, self._loss_scale,
        )  # fmt: skip
        _write_durably(self.partial / MANIFEST, manifest_text(manifest))
        _sync_folder(self.partial)
        _replace_folder(self.partial, self.final)
        _sync_folder(self.final.parent)

    def discard(self) -> None:
        """Removes a checkpoint that could not be written; rank 0 calls it."""
        shutil.rmtree(self.partial, ignore_errors=True)


def manifest_text(manifest: Manifest) -> str:
    """Returns the content of a manifest's file: JSON with a checksum of the other values."""
    return _with_checksum(asdict(manifest))


def _with_checksum(values: Mapping[str, Any]) -> str:
    own = checksum(json.dumps(values, indent=2).encode())
    return json.dumps({**values, _OWN_CHECKSUM: own}, indent=2)


# Returns a sentence on the damage to a checkpoint's files; None: they are undamaged.
Verification = Callable[[Path, Manifest], str | None]


def unverified(path: Path, manifest: Manifest) -> None:
    """Verifies no checksums; sizes and the manifest are always verified."""
    del path, manifest


def verify(path: Path, manifest: Manifest) -> str | None:
    """Verifies the checksums of all files in this process."""
    return _find_damage(path, manifest, list(manifest.checksums))


def verify_together(world: World) -> Verification:
    """Returns a verification in which each rank reads some of the files; all ranks call it."""

    def verification(path: Path, manifest: Manifest) -> str | None:
        own = list(manifest.checksums)[world.rank :: world.size]
        found: list[str | None] = [None] * world.size
        dist.all_gather_object(found, _find_damage(path, manifest, own))
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
                f"checkpoint {path} is damaged: {name}: expected checksum"
                f" {manifest.checksums[name]}, got {found}"
            )
    return None


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    device: Device = CPU,
    verified: bool = False,
) -> None:
    """Loads a complete checkpoint into the model, the optimizer and the random generators.

    The state of the generators, of the host and the device, is restored if the device is that which
    saved, and either the number of ranks too, or all ranks had the same state, as where dist-rng
    draws one device's numbers; otherwise they keep the run's seed.

    Args:
        path: the checkpoint.
        model: the model as its system has wrapped it.
        optimizer: optimizer of its parameters.
        world: this rank and the world size.
        device: of the ranks.
        verified: whether its checksums have been verified; otherwise this verifies them.

    Raises:
        UsageError: a file is missing or damaged.
    """
    manifest = read_manifest(path, unverified if verified else verify_together(world))
    state = _training_state(model, optimizer)
    source = _rank_of_generators(manifest, world, device)
    if source is not None:
        state["rng"] = {
            _rng_key(source, kind): generator for kind, generator in device.random_state().items()
        }
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_OPTIONS,
    )
    if source is not None:
        device.set_random_state(
            {kind: state["rng"][_rng_key(source, kind)] for kind in device.random_state()}
        )


def _rank_of_generators(manifest: Manifest, world: World, device: Device) -> int | None:
    """Returns the rank whose generators this one continues; None: it keeps its own."""
    if manifest.device != device.type:
        return None
    if manifest.world_size == world.size:
        return world.rank
    return 0 if manifest.equal_generators else None


def load_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Loads a complete checkpoint's weights into tensors by name, in this process only.

    Raises:
        UsageError: a file is missing or damaged.
    """
    read_manifest(path, verify)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load")
        dcp.load({"model": weights}, checkpoint_id=path, no_dist=True)


def read_manifest(path: Path, verification: Verification = unverified) -> Manifest:
    """Returns the manifest of a checkpoint after checking that it is complete.

    Args:
        path: the checkpoint.
        verification: verification of the files' contents.

    Raises:
        UsageError: there is no checkpoint, or a file is missing, has another size or is damaged.
    """
    try:
        return _complete_manifest(path, verification)
    except _IncompleteError as error:
        raise UsageError(f"{error}; give another checkpoint, or use --resume auto") from error


class _IncompleteError(Exception):
    """The folder is not a complete checkpoint; the message says why."""


def _complete_manifest(path: Path, verification: Verification) -> Manifest:
    try:
        text = (path / MANIFEST).read_bytes().decode()
        values = json.loads(text)
        own = values.pop(_OWN_CHECKSUM, None)
        expected = _with_checksum(values)
        values["identity"] = Identity(**values["identity"])
        if (scale := values.get("loss_scale")) is not None:
            values["loss_scale"] = LossScale(**scale)
        manifest = Manifest(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _IncompleteError(
            f"{path} is not a complete checkpoint: its {MANIFEST} cannot be read"
        ) from error
    # Older manifests have no checksums.
    if (own is not None or "checksums" in values) and text != expected:
        raise _IncompleteError(
            f"checkpoint {path} is damaged: {MANIFEST} does not have its own checksum"
        )
    for name, size in manifest.files.items():
        found = (path / name).stat().st_size if (path / name).exists() else 0
        if found != size:
            raise _IncompleteError(
                f"checkpoint {path} is truncated: {name}: expected {size} bytes, got {found}"
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
    """Refuses a checkpoint of another model, other data or other batches.

    Raises:
        UsageError: names the first property that differs, with both values.
    """
    saved, expected = _flat(manifest.identity), _flat(identity)
    for key in sorted(saved.keys() | expected.keys()):
        if saved.get(key) != expected.get(key):
            raise UsageError(
                f"checkpoint {path} belongs to another run: {key}: expected"
                f" {expected.get(key)!r}, as in this run, got {saved.get(key)!r}; give another"
                " --out or --resume, or the options of that run"
            )


@dataclass(frozen=True)
class CheckpointSearch:
    """The result of a search for checkpoints.

    Attributes:
        path: the newest complete checkpoint, if any.
        skipped: a sentence for each newer folder that is incomplete.
    """

    path: Path | None
    skipped: tuple[str, ...]


def newest_complete(folder: Path, verification: Verification = unverified) -> CheckpointSearch:
    """Finds the newest complete checkpoint of a run, and why newer ones are skipped.

    Args:
        folder: the run folder.
        verification: verification of the contents of each candidate.
    """
    skipped: list[str] = []
    for path in _candidates(folder / FOLDER):
        try:
            _complete_manifest(path, verification)
        except _IncompleteError as error:
            skipped.append(str(error))
        else:
            return CheckpointSearch(path, tuple(skipped))
    return CheckpointSearch(None, tuple(skipped))


def _candidates(folder: Path) -> list[Path]:
    """Returns folders that may be checkpoints, the newest first."""
    # A run that was killed while it replaced a checkpoint leaves the old one under this name.
    replaced = [
        path for path in folder.glob(".step-*.replaced") if not (folder / path.stem[1:]).exists()
    ]
    return sorted([*folder.glob("step-*"), *replaced], key=lambda p: p.name.lstrip("."))[::-1]


def _training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}


def _random_state(world: World, device: Device) -> dict[str, torch.Tensor]:
    return {_rng_key(world.rank, kind): state for kind, state in device.random_state().items()}


def _rng_key(rank: int, kind: str) -> str:
    return f"rank{rank}" if kind == "cpu" else f"rank{rank}.{kind}"


def _flat(identity: Identity) -> dict[str, Any]:
    values = asdict(identity)
    model: dict[str, Any] = values.pop("model")
    return values | {f"model.{key}": value for key, value in model.items()}


def _replace_folder(source: Path, target: Path) -> None:
    # An existing folder is damaged, or of a run that was resumed from an earlier step.
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
    """Syncs the names in a folder, whose files have been synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
