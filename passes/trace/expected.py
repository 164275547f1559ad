"""What was found in a place that the forward read, such that a later value there can be compared with it."""

from __future__ import annotations

import ctypes
import enum
import queue
import threading
import types
import weakref
from array import array
from collections import ChainMap, OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, partialmethod
from multiprocessing.sharedctypes import SynchronizedBase
from operator import is_
from typing import Any

import numpy
import torch
from torch import nn

from passes._torch import wrapped_tensors
from passes.printable import describe_kind, shown

from .places import is_users
from .unregistered import Constant


class Missing:
    """Stands for a name that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


def stood_for(value: Any) -> Any:
    """What forward means by `value`: where that is of a class with `runs_plan`, what it `stands_for`."""
    while getattr(type(value), "runs_plan", False):
        value = value.stands_for()
    return value


def unless_none(previous: Any) -> Any:
    """What a stand-in for an instance's own `forward` stands for: None is for an instance that has none."""
    return MISSING if previous is None else previous


def counterparts(then: Any, now: Any) -> dict[int, Any]:
    """A function made anew by the same code, and its closure's cells, by the ids of those of the one before."""
    if not type(then) is type(now) is types.FunctionType:
        return {}
    if then.__code__ is not now.__code__ or then.__globals__ is not now.__globals__:
        return {}
    cells = zip(then.__closure__ or (), now.__closure__ or (), strict=True)
    return {id(then): now, **{id(before): cell for before, cell in cells}}


@dataclass(frozen=True)
class Literal:
    """A number, string, dtype, ...: of this type and value."""

    value: Any


@dataclass(frozen=True, eq=False)
class Same:
    """A class or anything else that is compared by identity; of a function also one made anew that reads the same."""

    value: Any


@dataclass(frozen=True)
class State:
    """Parameter or buffer number `index`."""

    index: int


@dataclass(frozen=True)
class Object:
    """Object number `index`: a module, a config, ..."""

    index: int


@dataclass(frozen=True)
class Contents:
    """A container (or method, partial, array) of this type and with these parts, as `parts_of` takes it apart."""

    kind: type
    parts: tuple[Expected, ...]


@dataclass(frozen=True, eq=False)
class Whole:
    """A container not taken apart, as it is too large, or a large one of literals: of this type, and holding these."""

    kind: type
    items: list[Any]


Expected = Literal | Same | Constant | State | Object | Contents | Whole | None  # None: anything
LITERALS = frozenset({
    int, float, complex, bool, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.layout,
    torch.memory_format, Missing,
})  # fmt: skip
LARGEST = 2000
ON_THE_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
_NOT_OBJECTS = (type, types.ModuleType, types.FunctionType, BaseException, enum.Enum, torch.Generator)
_LOOKED_INTO = (
    "argparse.Namespace", "collections.UserDict", "collections.UserList", "configparser.", "torch.amp.",
    "torch.distributions.", "torch.nn.", "torch.optim.",
)  # fmt: skip


def has_attributes(value: Any) -> bool:
    """Whether attributes of `value` are recorded: modules, configs, objects of the user's and of libraries' classes.

    Of Python's own and torch's those that programs keep their settings in (a learning rate, in an optimizer).
    """
    kind = type(value)
    if isinstance(value, nn.Module):
        return True
    if not kind.__flags__ & ON_THE_HEAP or isinstance(value, _NOT_OBJECTS):
        return False
    return is_users(kind) or f"{kind.__module__}.{kind.__name__}".startswith(_LOOKED_INTO)


def parts_of(value: Any) -> list[Any] | None:
    """What a container consists of; None for what is not one."""
    if (held := bound_to(value)) is not value:
        return [value.__name__, held]
    parts = next((take(value) for kinds, take in _PARTS if isinstance(value, kinds)), None)
    attributes = None if parts is None else attributes_beside(value)
    return [*parts, attributes] if parts is not None and attributes else parts


def attributes_beside(container: Any) -> dict[str, Any] | None:
    """The attributes of a container of a derived class, beside its items."""
    return None if type(container).__module__ in _PLAIN else getattr(container, "__dict__", None)


def items_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        held = held_by(value)
        return [*held, *held.values()]
    return list(value)


def _base_of(sequence: Any) -> Any:
    return next(kind for kind in (list, tuple, deque) if isinstance(sequence, kind))


def held_by(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict holds itself: a class derived from it, as transformers has them, may make what it is asked for."""
    kind = type(mapping)
    if kind.__getitem__ is dict.__getitem__ and kind.__iter__ in (dict.__iter__, OrderedDict.__iter__):
        return mapping
    return dict((OrderedDict if isinstance(mapping, OrderedDict) else dict).items(mapping))  # each has its own order


def bound_to(value: Any) -> Any:
    """The object whose method in C `value` is (`settings.get`, `lines.append`); else the value itself."""
    held = value.__self__ if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)) else None
    return value if isinstance(held, (types.ModuleType, type, type(None))) else held


def _in_a_set(value: Any) -> tuple[str, str]:
    return type(value).__name__, repr(value) if type(value) in LITERALS else str(id(value))


def _parts_of_array(value: Any) -> list[Any]:
    """Of an array or a record; what one of Python's objects holds is compared as that object is."""
    array = numpy.asarray(value)
    kind = array.dtype.str if array.dtype.names is None else repr(array.dtype)
    look = array.shape, array.strides, array.flags.writeable
    return [kind, *look, *(array.flat if array.dtype.hasobject else [array.tobytes()])]


def _plain_part(value: Any) -> list[Any]:
    """Of an instance of a class derived from a number or a string."""
    return [next(kind.__repr__(value) for kind in _DERIVED if isinstance(value, kind))]


def _settings_of(variable: ContextVar[Any]) -> list[Any]:
    """What it is set to, unless that is something into which forward may collect things."""
    try:
        value = variable.get()
    except LookupError:
        return []
    return [] if isinstance(value, (list, dict, set, deque, torch.Tensor)) else [value]


_DERIVED = (int, float, complex, str, bytes)
_PARTS: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    ((list, tuple, deque), lambda s: [*_base_of(s).__iter__(s)]),  # whatever a derived class takes for its length
    (dict, items_of),
    ((set, frozenset), lambda s: sorted(s, key=_in_a_set)),
    (types.MethodType, lambda m: [m.__func__, m.__self__]),
    ((partial, partialmethod), lambda p: [p.func, p.args, p.keywords]),
    (types.SimpleNamespace, lambda n: [vars(n)]),
    (slice, lambda s: [s.start, s.stop, s.step]),
    ((numpy.ndarray, numpy.void), _parts_of_array),
    ((bytearray, array, ctypes.Array, ctypes.Structure), lambda a: [bytes(a)]),
    (memoryview, lambda m: [m.tobytes()]),
    (SynchronizedBase, lambda s: [bytes(s.get_obj())]),
    (threading.Event, lambda e: [e.is_set()]),
    (queue.Queue, lambda q: list(q.queue)),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), lambda d: items_of(dict(d))),
    (_DERIVED, _plain_part),
    (types.MappingProxyType, lambda m: items_of(dict(m))),
    (ChainMap, lambda m: list(m.maps)),
    (weakref.ref, lambda r: [r()]),
    (ContextVar, _settings_of),
    (torch.Tensor, lambda t: [t.requires_grad, *wrapped_tensors(t)]),
)
BY_VALUE = (
    set, numpy.ndarray, numpy.void, bytearray, array, ctypes.Array, ctypes.Structure, memoryview, SynchronizedBase,
    threading.Event, queue.Queue, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, types.MappingProxyType,
    ChainMap, weakref.ref, ContextVar,
)  # fmt: skip
_PLAIN = frozenset({
    "builtins", "collections", "types", "numpy", "array", "weakref", "threading", "queue",
    "multiprocessing.sharedctypes",
})  # fmt: skip


def literals_in(expected: Expected) -> list[Any]:
    """The literals of a container."""
    if isinstance(expected, Contents):
        return [part.value for part in expected.parts if isinstance(part, Literal)]
    return expected.items if isinstance(expected, Whole) else []


def made_of(value: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """What a wrapper of tensors is made of now."""
    return value.requires_grad, *map(id, wrapped_tensors(value))


def compared_in(container: Any) -> list[Any]:
    """What `holds_these` compares of a container."""
    return (parts_of(container) or []) if isinstance(container, BY_VALUE) else items_of(container)


def holds_these(container: Any, items: list[Any]) -> bool:
    """Whether a container that held these items, as `compared_in` has them, still does."""
    now = container if type(container) is list else compared_in(container)
    return len(now) == len(items) and (all(map(is_, now, items)) or all(map(same_value, now, items)))


def same_value(a: Any, b: Any) -> bool:
    """Whether two plain values are one for a program that computes with them: 1 is not True, 0.0 is not -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, numpy.generic) or type(a) in (float, complex, range):
        return repr(a) == repr(b)
    return type(a) in LITERALS and bool(a == b)


def apart(now: str, then: str) -> tuple[str, str]:
    """What is there now and what was there, in words that differ."""
    if now != then:
        return now, then
    return f"{now} (another definition, object or content of that name)", "the one before"


def describe(expected: Expected) -> str:
    """What a read expects, in an error message."""
    match expected:
        case Literal(value) | Same(value) | Constant(value=value):
            return shown(value)
        case Contents(kind, parts) if kind in (list, tuple) and len(parts) < _FEW:
            inside = ", ".join(map(describe, parts)) + "," * (kind is tuple and len(parts) == 1)
            return f"({inside})" if kind is tuple else f"[{inside}]"
        case Contents(kind) | Whole(kind):
            return f"{describe_kind(kind)} as it was"
        case State():
            return "the parameter or buffer"
        case Object() | None:
            return "that at planning"


_FEW = 7
