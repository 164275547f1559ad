"""JSON read strictly: bounded in size, depth, text and numbers, no duplicate keys, nothing but what JSON allows."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from passes.printable import brief
from planner.errors import PlanFileError

from .atomic import as_path

MAX_BYTES = 16 << 20
MAX_DEPTH = 16
MAX_CHARACTERS = 100_000
MAX_INTEGER = 2**63 - 1


def read_json(path: str | os.PathLike[str]) -> Any:
    """Parse the file at `path`.

    Raises:
        PlanFileError: it cannot be read, is not UTF-8, is too large or too deep, is cut off, or is not strict JSON.
    """
    place = as_path(path, PlanFileError)
    text = _text(place)
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_refuse)
    except RecursionError as error:
        raise _error(place, "depth", f"nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise _error(place, "json", f"not a valid plan file: {brief(error)}") from error
    if fault := _fault(data, 1):
        raise _error(place, *fault)
    return data


def canonical(data: Any) -> bytes:
    """The one byte string of a JSON value, whatever its layout was."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _text(path: Path) -> str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _error(path, "path", "not a file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _error(path, "path", error.strerror or str(error)) from error
    if len(raw) > MAX_BYTES:
        raise _error(path, "size", f"larger than {MAX_BYTES >> 20} MiB, which no plan is")
    if not raw.endswith(b"\n"):
        raise _error(path, "size", f"cut off after {len(raw)} bytes, or its last newline was taken away")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _error(path, "json", f"byte {error.start} is not UTF-8 text") from error


def _fault(value: Any, depth: int) -> tuple[str, str] | None:
    """What is beyond a limit in a parsed value: the field of the error, and the message."""
    if isinstance(value, str):
        if len(value) > MAX_CHARACTERS:
            return "text", f"holds a text of {len(value):,} characters; the limit is {MAX_CHARACTERS:,}"
        return None if value.isascii() or _is_unicode(value) else ("text", f"{brief(value)!r} is not Unicode text")
    if isinstance(value, int):
        return None if abs(value) <= MAX_INTEGER else ("number", f"holds a number beyond {MAX_INTEGER:,}")
    if isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            return "depth", f"nested deeper than {MAX_DEPTH} levels"
        inside = (*value, *value.values()) if isinstance(value, dict) else value
        return next((fault for item in inside if (fault := _fault(item, depth + 1))), None)
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _error(path: Path, field: str, message: str) -> PlanFileError:
    return PlanFileError(f"{brief(path)}: {message}", path=str(path), field=field)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {brief(key)!r} appears twice in one object")
        result[key] = value
    return result


def _refuse(literal: str) -> Any:
    raise ValueError(f"the number {brief(literal)} has no place in a plan file: all of its numbers are integers")
