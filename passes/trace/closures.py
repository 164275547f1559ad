"""What a function reaches: its closure, defaults and attributes, and the globals that its code names."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from .expected import has_attributes
from .nodes import PLAIN, Node, Walk, refill
from .places import is_users, is_users_module, is_users_own

CACHE = functools._lru_cache_wrapper
_MUTABLE = (list, dict, set, deque, types.SimpleNamespace)


def remembered_by(function: Any) -> list[Any]:
    """The objects and containers with which a function under `functools.cache` answers again."""
    return [each for each in _answers_of(function) if type(each) in _MUTABLE or has_attributes(each)]


def _answers_of(function: Any) -> list[Any]:
    """All that it remembers.

    With a limit on how many it remembers, they are among what it refers to; without one, in the last dict of these.
    """
    held = [each for each in gc.get_referents(function) if each is not function.__dict__]
    last = [each for each in held if type(each) is dict][-1]
    answers = {id(v): v for v in (*last.values(), *(each for each in held if each is not last))}
    return [answers[i] for i in sorted(answers)]


def visit_function(walk: Walk, value: Any, path: str, name: str) -> None:
    inner: tuple[Any, ...] = (value.__func__,) if isinstance(value, (staticmethod, classmethod)) else ()
    inner = (value.fget, value.fset) if isinstance(value, property) else inner
    if isinstance(value, types.MethodType):
        inner = (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        inner = (value.func, value.args, value.keywords)
    if isinstance(value, CACHE):
        walk.add(Node(value, path, name, "cache", lambda: value.cache_info()[1::2], lambda _: value.cache_clear()))
        inner = (value.__wrapped__,)
        walk.follow_last((answer, path, name) for answer in _answers_of(value))
    walk.follow((f, path, name) for f in inner)
    if not isinstance(value, types.FunctionType) or not is_users(value):
        return
    code = value.__code__
    for variable, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        _visit_cell(walk, cell, variable)
    last = code.co_varnames[: code.co_argcount][-len(value.__defaults__ or ()) :]
    defaults = {**dict(zip(last, value.__defaults__ or (), strict=False)), **(value.__kwdefaults__ or {})}
    walk.follow((v, f"the default {k}", k) for k, v in defaults.items())
    own = value.__dict__
    if own:
        called = value.__name__
        walk.add(Node(value, called, called, "attributes", lambda: dict(own), lambda c: refill(own, c)))
        walk.follow((v, f"{value.__name__}.{k}", k) for k, v in own.items())
    _visit_globals(walk, value)


def _visit_cell(walk: Walk, cell: types.CellType, variable: str) -> None:
    if id(cell) in walk.seen:
        return
    walk.seen[id(cell)] = cell

    def take() -> dict[str, Any]:
        try:
            return {variable: cell.cell_contents}
        except ValueError:  # not bound yet
            return {}

    def give(content: dict[str, Any]) -> None:
        if variable in content:
            cell.cell_contents = content[variable]

    node = walk.add(Node(cell, "the enclosing function's ", variable, "variable", take, give))
    walk.follow((v, f"the enclosing function's {variable}", variable) for v in node.content.values())


def _visit_globals(walk: Walk, function: types.FunctionType) -> None:
    space, names = function.__globals__, sorted(set(_names(function.__code__)))
    modules = [space[n] for n in names if isinstance(space.get(n), types.ModuleType) and is_users_module(space[n])]
    if is_users_own(function.__code__):
        _visit_variables(walk, space, names, "the global ")
        for module in modules:
            _visit_variables(walk, vars(module), names, f"{module.__name__}.")
    else:
        kept = [n for n in names if isinstance(space.get(n), (*PLAIN, CACHE)) and space.get(n) is not None]
        _visit_variables(walk, space, kept, "the global ")


def _visit_variables(walk: Walk, space: dict[str, Any], names: list[str], what: str) -> None:
    def take() -> dict[str, Any]:
        return {n: space[n] for n in names if n in space and not isinstance(space[n], types.ModuleType)}

    def give(content: dict[str, Any]) -> None:
        for name in [n for n in take() if n not in content]:
            del space[name]
        space.update(content)

    node = walk.add(Node(space, what, "", "variable", take, give))
    walk.follow((v, what + k, k) for k, v in node.content.items())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
