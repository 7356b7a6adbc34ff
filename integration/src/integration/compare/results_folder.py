"""The folder of results: whose it may be, and how it is replaced."""

import shutil
from pathlib import Path

from integration.errors import UsageError
from integration.paths import require_folder

RUNS = "runs"
# Written before anything else, so that an interrupted comparison is recognised too.
MARKER = ".integration-comparison"
_MARKER_TEXT = "Written by python -m integration.compare, which may replace this folder.\n"


def require_replaceable(out: Path, data: Path | None) -> None:
    """Refuse a folder of results that holds anything else; reads only.

    Raises:
        UsageError: ``out`` is a file, cannot be made, holds files that no comparison wrote, or
            overlaps with the training data.
    """
    require_folder(out)
    if data is not None:
        _require_apart(out.resolve(), data.resolve(), f"--out {out}", f"--data {data}")
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise UsageError(
            f"--out {out} holds files that no comparison wrote (it has no {MARKER});"
            " empty it yourself or give another --out"
        )


def replace(out: Path) -> None:
    """Make ``out`` an empty, marked folder; ``require_replaceable`` has looked at it.

    The folder itself stays, since it may be a link, a mount or somebody's working directory.

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
    # Results inside the data would change what the next system trains on; data inside the
    # results would be deleted with them.
    if out == data or out in data.parents or data in out.parents:
        raise UsageError(f"{out_option} and {data_option} overlap; give another --out")
