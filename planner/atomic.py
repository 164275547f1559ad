"""Writing files and folders all at once or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import PlannerError


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` as UTF-8: a reader sees the old file or the new one, never half of it.

    Raises:
        PlannerError: the folder does not exist or cannot be written.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as error:
        raise PlannerError(f"cannot write {target}: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except OSError as error:
        _remove(name)
        raise PlannerError(f"cannot write {target}: {error.strerror or error}") from error
    except BaseException:
        _remove(name)
        raise
    return target


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill that becomes `path` when the block ends, and is removed when it fails.

    Raises:
        PlannerError: `path` exists and is not an empty folder, or its parent cannot be written.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PlannerError(f"{target} exists and is not an empty folder: choose another name, or remove it first.")
    try:
        part = Path(tempfile.mkdtemp(dir=target.absolute().parent, prefix=f".{target.name}.", suffix=".part"))
    except OSError as error:
        raise PlannerError(f"cannot write {target}: {error.strerror or error}") from error
    try:
        yield part
        os.chmod(part, 0o777 & ~_umask())
        if target.exists():
            target.rmdir()
        os.replace(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)
