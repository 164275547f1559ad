"""What holds the items or attributes of a thing, slots included."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Protocol

from torch import nn

from .expected import held_by
from .templates import argument_path


class _Attributes(MutableMapping[str, Any]):
    """What an object holds in slots, and in its `__dict__` if it has one."""

    def __init__(self, thing: Any) -> None:
        kind: Any = type(thing)
        self.thing, self.slots, self.others = thing, _slots(kind), getattr(thing, "__dict__", {})

    def __getitem__(self, name: str) -> Any:
        if name not in self.slots:
            return self.others[name]
        try:
            return self.slots[name].__get__(self.thing)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.slots:
            self.slots[name].__set__(self.thing, value)
        else:
            self.others[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self.slots:
            self.slots[name].__delete__(self.thing)
        else:
            del self.others[name]

    def __iter__(self) -> Iterator[str]:
        yield from [name for name in self.slots if name in self]
        yield from self.others

    def __len__(self) -> int:
        return sum(1 for _ in self)


@lru_cache(maxsize=1024)
def _slots(kind: Any) -> dict[str, MemberDescriptorType]:
    classes = [c for c in reversed(kind.__mro__) if "__slots__" in vars(c)]
    return {n: v for c in classes for n, v in vars(c).items() if isinstance(v, MemberDescriptorType)}


def store_of(thing: Any) -> Any:
    """What holds the items or attributes of a thing; None where nothing does."""
    if isinstance(thing, (dict, list, tuple, deque, set)):
        return thing
    kind: Any = type(thing)
    return _Attributes(thing) if _slots(kind) else getattr(thing, "__dict__", None)


def attributes_of(thing: Any) -> Any:
    """What holds the attributes of a thing, of a container those besides its items; empty where it has none."""
    kind: Any = type(thing)
    return _Attributes(thing) if _slots(kind) else getattr(thing, "__dict__", None) or {}


SHARED = (type, enum.Enum, FunctionType, MethodType, ModuleType, nn.Module)  # never made anew


def held_in(value: Any) -> Any:
    """What a thing holds, by attribute or key; None for what is not looked into."""
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, dict):
        return dict(held_by(value))
    store = None if callable(value) else store_of(value)
    return dict(store) if isinstance(store, MutableMapping) else None


MODEL = ""  # where the places of what the model holds begin


@dataclass(frozen=True)
class Place:
    """A way from a call's arguments, or the model: attributes (True) and items (False), by their names and keys."""

    steps: tuple[tuple[bool, Any], ...] = ()

    def of(self, bound: Mapping[str, Any]) -> Any:
        """What is there in these arguments."""
        value: Any = bound
        for is_attribute, key in self.steps:
            value = _attribute(value, key) if is_attribute else value[key]
        return value

    def __str__(self) -> str:
        steps = [step for step in self.steps if step not in ((False, MODEL), (True, "_modules"))]
        return argument_path("".join(f".{key}" if attribute else f"[{key!r}]" for attribute, key in steps))

    @property
    def is_of_model(self) -> bool:
        """Whether it is the way to what the model holds."""
        return self.steps[0] == (False, MODEL)


class Places(Protocol):
    """Tells what is whose (`passes.trace.owned`)."""

    def place(self, value: Any) -> Place | None:
        """Where it is in the model."""

    def is_of_others(self, value: Any) -> bool:
        """Whether others hold it."""


def _attribute(value: Any, name: str) -> Any:
    return vars(value) if name == "__dict__" else store_of(value)[name]
