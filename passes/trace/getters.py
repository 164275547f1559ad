"""How a name is looked up where a forward looked it up: in attributes, tables of modules, classes, globals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy
from torch import nn

from passes._torch import is_compiled

from .closures import remembered_by
from .expected import LITERALS, stood_for
from .settings import where_held

Getter = Callable[[str, Any], Any]


def by_attribute(holder: Any) -> Getter:
    return partial(getattr, holder)


def by_path(holder: Any) -> Getter:
    """A getter of attributes of attributes, by their dotted names."""

    def get(name: str, default: Any) -> Any:
        value = holder
        for part in name.split("."):
            value = getattr(value, part, default)
        return value

    return get


def by_plain_attribute(holder: Any) -> Getter:
    """A getter of the numbers and strings that an object whose attributes cannot be recorded answers with."""

    def get(name: str, default: Any) -> Any:
        try:
            value = getattr(holder, name, default)
        except Exception:  # noqa: BLE001 - a property of whatever object that is
            return default
        return value if type(value) in LITERALS or isinstance(value, numpy.generic) else default

    return get


def of_instance(holder: Any) -> Getter:
    own: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    return own.get


NAMES = ""  # stands for the name of a read of the names that there are


def names_of(holder: Any) -> Getter:
    """A getter of the names that there are (`forward`, which `plan.apply` sets, is read by itself)."""
    own: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    return lambda *_: tuple(sorted(own.keys() - {"forward"}))


def names_among(names: frozenset[str]) -> Callable[[Any], Getter]:
    """A getter of which of these names a `threading.local` has in this thread."""
    return lambda holder: lambda *_: tuple(sorted(names & vars(holder).keys()))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_IN = itemgetter(*HOOKS)


def of_hooks(holder: nn.Module) -> Getter:
    own: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    return lambda *_: HOOKS_IN(own)


def of_compiled(holder: nn.Module) -> Getter:
    """A getter of whether a module's `compile()` was called."""
    return lambda *_: is_compiled(holder)


def of_call(holder: Callable[[], Any]) -> Getter:
    """A getter of what a function without arguments answers."""
    return lambda *_: holder()


def of_remembered(holder: Any) -> Getter:
    """A getter of what a function under `functools.cache` answers again and forward may change."""
    return lambda *_: remembered_by(holder)


def of_class(holder: type) -> Getter:
    return vars(holder).get


def of_globals(holder: dict[str, Any]) -> Getter:
    return holder.get


def _table(holder: nn.Module, name: str) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(holder, name)
    return found


def of_parameters(holder: nn.Module) -> Getter:
    return _table(holder, "_parameters").get


def of_buffers(holder: nn.Module) -> Getter:
    return _table(holder, "_buffers").get


def of_children(holder: nn.Module) -> Getter:
    return _table(holder, "_modules").get


def of_stood_for(getter: Getter) -> Getter:
    """The same getter, of a place where something stands that runs a plan: of what that stands for."""
    return lambda name, default: stood_for(getter(name, default))


REGISTERED: dict[str, Callable[[nn.Module], Getter]] = {
    "_parameters": of_parameters, "_buffers": of_buffers, "_modules": of_children,
}  # fmt: skip


def kind_within(keys: tuple[Any, ...], holder: nn.Module) -> Callable[[str, Any], type]:
    """A getter of the class of what a module has as an attribute, or of what is in that, by its keys."""
    own: dict[str, Any] = object.__getattribute__(holder, "__dict__")

    def get(name: str, default: Any) -> type:
        value = own.get(name, default)
        for key in keys:
            there = value.get(key, default) if isinstance(value, dict) else default
            value = value[key] if isinstance(value, list) and key < len(value) else there
        return type(value)

    return get


def held_together(places: Iterable[tuple[str, str]], model: nn.Module) -> Callable[[str, Any], bool]:
    """A getter of whether modules at these paths have one object as these attributes."""
    found = [(where_held(model, path, name), name) for path, name in places]

    def get(*_: Any) -> bool:
        first, *others = [own.get(name) for own, name in found]
        return all(other is first for other in others)

    return get
