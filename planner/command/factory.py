"""Finding the user's model: `package.module:factory` or `path/to/file.py:factory`, which returns `(model, sample)`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from solvers.errors import PlannerError

ELSEWHERE = ("site-packages", "importlib", "<frozen")
FORMS = "write package.module:factory or path/to/file.py:factory, a function that returns (model, sample)"


def load_factory(spec: str) -> Callable[..., Any]:
    """The function that `spec` names; modules are also looked for in the current folder.

    Raises:
        PlannerError: there is no such module or function, or importing it failed; says where.
    """
    place, colon, name = spec.rpartition(":")
    if not (place and colon and name):
        raise PlannerError(f"{spec!r} names no factory: {FORMS}.")
    module = _run(lambda: _import(place), f"importing {place}")
    factory = getattr(module, name, None)
    if not callable(factory):
        raise PlannerError(f"{place} has no function {name!r}: {FORMS}.")
    return factory


def make(factory: Callable[..., Any], *args: Any) -> tuple[nn.Module, Any]:
    """Call a factory and check what it returns.

    Raises:
        PlannerError: it failed, or returned something other than `(model, sample)`.
    """
    name = getattr(factory, "__name__", "the factory")
    call = f"{name}({', '.join(map(repr, args))})"
    _check_call(factory, args, call)
    result = _run(lambda: factory(*args), call)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        got = f"({', '.join(type(r).__name__ for r in result)})" if isinstance(result, tuple) else type(result).__name__
        raise PlannerError(f"{name} returned {got}: return a tuple (model, sample), the model a torch.nn.Module.")
    return result


def _check_call(factory: Callable[..., Any], args: tuple[Any, ...], call: str) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        what = "with a batch size" if args else "without arguments"
        raise PlannerError(f"the factory is called {what}, as {call}: {error}.") from error


def _import(place: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise PlannerError(f"{place}: no such file. In general, {FORMS}.")
    if str(path.parent.absolute()) not in sys.path:
        sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _run(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        own = [f for f in frames if not any(part in f.filename for part in ELSEWHERE)]
        where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
        hint = f". It is looked for from this folder; {FORMS}." if isinstance(error, ModuleNotFoundError) else ""
        raise PlannerError(f"{what} failed{where}: {type(error).__name__}: {error}{hint}") from error
