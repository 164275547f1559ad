"""What holds the items or attributes of a thing, slots included."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, MutableMapping
from functools import lru_cache
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import nn


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


SHARED = (type, enum.Enum, FunctionType, MethodType, ModuleType, nn.Module)  # never made anew


def held_in(value: Any) -> Any:
    """What a thing holds, by attribute or key; None for what is not looked into."""
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, dict):
        return dict(dict.items(value))
    store = None if callable(value) else store_of(value)
    return dict(store) if isinstance(store, MutableMapping) else None
