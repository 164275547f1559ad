"""Writing files and folders all at once or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import Any

from passes.printable import brief
from planner.errors import PlannerError

STALE_SECONDS = 3600
KEPT_CHARACTERS = 40  # of a name: with what is added, at most 255 bytes, which file systems allow


def as_path(path: Any, error: type[PlannerError] = PlannerError) -> Path:
    """`path` as the file system can be asked for it.

    Raises:
        PlannerError: (or `error`) it is empty, holds a NUL, or is not text that the file system has a form for.
    """
    try:
        text = os.fsdecode(os.fspath(path))
        usable = bool(text) and "\0" not in text and bool(os.fsencode(text))
    except (TypeError, UnicodeError):
        usable = False
    if not usable:
        raise error(f"{brief(repr(path))} is not a path: pass the name of a file or folder.")
    return Path(text)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` as UTF-8: a reader sees the old file or the new one, never half of it.

    What has no UTF-8 (a lone surrogate) is escaped.

    Raises:
        PlannerError: the folder does not exist, or the file cannot be written.
    """
    target = as_path(path)
    content = text.encode("utf-8", "backslashreplace")
    with _told(target):
        if _is_device(target):  # nothing to replace: /dev/stdout
            target.write_bytes(content)
            return target
        _sweep(target)
        part = _beside(target)
        try:
            with open(part, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        finally:
            _remove(part)
    return target


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill that becomes `path` when the block ends, and is removed when it fails.

    Raises:
        PlannerError: `path` exists and is not an empty folder, or its parent cannot be written.
    """
    target = as_path(path)
    with _told(target):
        if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            raise PlannerError(
                f"{brief(target)} exists and is not an empty folder: choose another name, or remove it first."
            )
        _sweep(target.absolute())
        part = _beside(target.absolute())
        try:
            part.mkdir()
            yield part
            if target.exists():
                target.rmdir()
            os.replace(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _told(target: Path) -> Iterator[None]:
    """What the system refuses, as a sentence."""
    try:
        yield
    except OSError as error:
        raise PlannerError(f"cannot write {brief(target)}: {brief(error.strerror or error)}") from error


def _is_device(target: Path) -> bool:
    """Whether `target` is a character device; whatever else is there must be a file, which can be replaced."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise PlannerError(f"cannot write {brief(target)}: it is a folder")
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        raise PlannerError(f"cannot write {brief(target)}: it is neither a file nor a folder")
    return stat.S_ISCHR(mode)


def _beside(target: Path) -> Path:
    """A new hidden name in the target's folder, chosen before anything is made so that it can always be removed."""
    return target.parent / f".{target.name[:KEPT_CHARACTERS]}.{uuid.uuid4().hex}.part"


def _sweep(target: Path) -> None:
    """Remove what a killed process began to write in this place, an hour ago or longer."""
    start = f".{target.name[:KEPT_CHARACTERS]}."
    for part in target.parent.glob(f"{escape(start)}*.part"):
        if not re.fullmatch(r"[0-9a-f]{32}\.part", part.name[len(start) :]):
            continue
        with contextlib.suppress(OSError):
            if time.time() - part.lstat().st_mtime > STALE_SECONDS:
                shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink()


def _remove(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink()
