"""Validates and creates the folders that commands write."""

from pathlib import Path

from integration.errors import UsageError


def require_folder(out: Path) -> None:
    """Refuses an ``--out`` that is a file or a path below one; reads only.

    Raises:
        UsageError: names the file.
    """
    try:
        existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    except OSError as error:
        raise _cannot_write(out, error) from error
    if not existing.is_dir():
        raise UsageError(f"--out {out}: {existing} is a file, not a folder; give another --out")


def require_outside(out: Path, data: Path | None) -> None:
    """Refuses an ``--out`` within the training data, which would change while it is read.

    Raises:
        UsageError: names both paths.
    """
    if data is None:
        return
    inner, outer = out.resolve(), data.resolve()
    if inner == outer or outer in inner.parents:
        raise UsageError(
            f"--out {out} is inside --data {data}, which the run would change; give another --out"
        )


def make_folder(path: Path) -> None:
    """Creates a folder unless it exists.

    Raises:
        UsageError: the file system does not allow it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write {path} ({error.strerror}); give another --out")
