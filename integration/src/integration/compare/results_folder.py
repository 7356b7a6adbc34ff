"""Checks and replaces the folder of results."""

import shutil
from pathlib import Path

from integration.errors import UsageError
from integration.train.folders import require_folder

RUNS = "runs"
# Written first, so that the folder of an interrupted comparison is recognised too.
MARKER = ".integration-comparison"
_MARKER_TEXT = "Written by python -m integration.compare, which may replace this folder.\n"


def require_replaceable(out: Path, data: Path | None) -> None:
    """Refuses a folder that contains anything but the results of a comparison; reads only.

    Raises:
        UsageError: ``out`` is a file, cannot be created, contains files that no comparison wrote,
            or overlaps with the training data.
    """
    require_folder(out)
    if data is not None:
        _require_apart(out.resolve(), data.resolve(), f"--out {out}", f"--data {data}")
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise UsageError(
            f"--out: expected a new folder or one with {MARKER}, got {out}, which contains files"
            " that no comparison wrote; empty it, or give another --out"
        )


def replace(out: Path) -> None:
    """Empties ``out``, which ``require_replaceable`` has accepted, or creates it, with its marker.

    The folder itself is not removed, as it may be a link, a mount or a working directory.

    Raises:
        UsageError: the file system does not allow it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        marker = out / MARKER
        marker.write_text(_MARKER_TEXT)
        for path in out.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != marker:
                path.unlink()
        (out / RUNS).mkdir()
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
        raise UsageError(f"cannot write --out {out} ({reason}); give another --out") from error


def _require_apart(out: Path, data: Path, out_option: str, data_option: str) -> None:
    # Results inside the data would change the data of the next system; data inside the results
    # would be deleted.
    if out == data or out in data.parents or data in out.parents:
        raise UsageError(f"{out_option} and {data_option} overlap; give another --out")
