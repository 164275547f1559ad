"""Writing files and folders all at once or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from planner.errors import PlannerError


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` as UTF-8: a reader sees the old file or the new one, never half of it.

    Raises:
        PlannerError: the folder does not exist or cannot be written.
    """
    target = Path(path)
    part = _beside(target)
    try:
        with open(part, "xb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        _remove(part)
        raise PlannerError(f"cannot write {target}: {error.strerror or error}") from error
    except BaseException:
        _remove(part)
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
    part = _beside(target.absolute())
    try:
        part.mkdir()
        yield part
        if target.exists():
            target.rmdir()
        os.replace(part, target)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise PlannerError(f"cannot write {target}: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _beside(target: Path) -> Path:
    """A new hidden name in the target's folder, chosen before anything is made so that it can always be removed."""
    return target.parent / f".{target.name}.{uuid.uuid4().hex}.part"


def _remove(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink()
