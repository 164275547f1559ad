"""JSON read strictly: bounded in size and depth, no duplicate keys, no floats, nothing but what JSON allows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from planner.errors import PlanFileError

MAX_BYTES = 64 << 20
MAX_DEPTH = 16
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


def read_json(path: Path) -> Any:
    """Parse the file at `path`.

    Raises:
        PlanFileError: it cannot be read, is no UTF-8, too large, too deep, cut off, or no strict JSON.
    """
    text = _text(path)
    _check_depth(text, path)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_refuse)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{path}: no valid plan file: {error}", path=str(path), field="json") from error


def canonical(data: Any) -> bytes:
    """The one byte string of a JSON value, whatever its layout was."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PlanFileError(f"{path}: {error.strerror or error}", path=str(path), field="path") from error
    if len(raw) > MAX_BYTES:
        raise PlanFileError(f"{path}: larger than {MAX_BYTES >> 20} MiB, no plan is", path=str(path), field="size")
    if not raw.endswith(b"\n"):
        raise PlanFileError(f"{path}: cut off after {len(raw)} bytes", path=str(path), field="size")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{path}: byte {error.start} is no UTF-8 text", path=str(path), field="json") from error


def _check_depth(text: str, path: Path) -> None:
    depth = 0
    for match in _TOKENS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            raise PlanFileError(f"{path}: nested deeper than {MAX_DEPTH} levels", path=str(path), field="depth")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} appears twice in one object")
        result[key] = value
    return result


def _refuse(literal: str) -> Any:
    raise ValueError(f"the number {literal} has no place in a plan file: all of its numbers are integers")
