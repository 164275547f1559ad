"""Whose code a file, function or class is: the user's (libraries included), or Python's, torch's, numpy's and ours."""

from __future__ import annotations

import dis
import functools
import linecache
import os
import sys
import sysconfig
import types
import warnings
from typing import Any

from passes._torch import TORCH_FOLDER

_STDLIB = tuple(os.path.join(p, "") for p in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OUR_FOLDERS = tuple(os.path.join(_HERE, name, "") for name in ("passes", "planner", "solvers"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OTHERS = ("numpy", "tqdm")  # their code is trusted: what it draws or asks is told by its callers
_PYTHONS = frozenset(sys.stdlib_module_names) | {"builtins", "torch", "numpy", "passes", "planner", "solvers", "tqdm"}


@functools.lru_cache(maxsize=4096)
def is_users_file(path: str) -> bool:
    """Whether a source file is the user's or one of a library other than torch and numpy."""
    if path.startswith("<") and not linecache.getlines(path):  # made by exec, or frozen
        return False
    if path.startswith((TORCH_FOLDER, *OUR_FOLDERS)):
        return False
    for part in _INSTALLED:
        if part in path:
            return path.rpartition(part)[2].partition(os.sep)[0].removesuffix(".py") not in _OTHERS
    return not path.startswith(_STDLIB)


def is_users_code(frame: types.FrameType) -> bool:
    """Whether a frame's code is the user's; what `exec` made is whose globals it has."""
    if frame.f_code.co_filename not in ("<string>", "<stdin>"):
        return is_users_file(frame.f_code.co_filename)
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _PYTHONS


def is_users(value: Any) -> bool:
    """Whether a class or function is the user's own or a library's."""
    if isinstance(value, types.FunctionType):
        return is_users_file(value.__code__.co_filename)
    return str(getattr(value, "__module__", "")).partition(".")[0] not in _PYTHONS


def is_users_module(module: types.ModuleType) -> bool:
    """Whether a module is the user's own, and not even from an installed package."""
    file = str(getattr(module, "__file__", None) or "")
    return bool(file) and is_users_file(file) and not any(part in file for part in _INSTALLED)


def is_users_own(code: types.CodeType) -> bool:
    """Whether a function of the user's or a library's is not even from an installed package."""
    return not any(part in code.co_filename for part in _INSTALLED)


@functools.lru_cache(maxsize=4096)
def compares_types_of_tensors(code: types.CodeType) -> int:
    """The line on which code compares the exact type of something with a class of tensors (not `isinstance`); or 0."""
    said = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    if _TYPES.isdisjoint(code.co_names) or _TENSORS.isdisjoint(said):
        return 0
    starts, line, asks, before = dict(dis.findlinestarts(code)), 0, False, ""
    for step in dis.get_instructions(code):
        if starts.get(step.offset) not in (None, line):
            line, asks = starts[step.offset] or 0, False
        asks = asks or step.argval in _TYPES
        if asks and before in _TENSORS and step.opname in ("IS_OP", "COMPARE_OP"):
            return line
        before = step.argval if isinstance(step.argval, str) else ""
    return 0


_TYPES, _TENSORS = frozenset({"type", "__class__"}), frozenset({"Tensor", "Parameter", "Buffer"})


def user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost frame of the user's code, at or above `frame`."""
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_level() -> int:
    """The `stacklevel`, for who calls this, of the innermost frame of the user's code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_users_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def say(text: str) -> None:
    """Warn, at the user's line."""
    warnings.warn(text, stacklevel=user_level())


def place(frame: types.FrameType | None) -> str:
    """`file:line: `source`` of a frame."""
    if frame is None:
        return "(place unknown)"
    return place_at(frame.f_code.co_filename, frame.f_lineno)


def place_at(file: str, line: int) -> str:
    """`file:line: `source``."""
    source = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f" `{source}`" if source else "")
