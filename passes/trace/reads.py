"""What a forward read while it was traced: the places, what was found there, and whether that still holds.

A step was traced for one state of Python: attributes of modules and configs, containers, functions, globals. `Reads`
is the part of it that was looked at, without the model's own objects in it: these are numbered, so that a copy of the
model, or one with a layer replaced by an equal one, is recognised. `Reads.match` finds the objects of a model
and hands back `Matched`, which tells before each call in microseconds whether anything has changed.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import is_, itemgetter
from typing import Any

import numpy
import torch
from torch import nn

from .arguments import StateEntry


class Missing:
    """Stands for a name that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


@dataclass(frozen=True)
class Literal:
    """A number, string, dtype, ...: of this type and value."""

    value: Any


@dataclass(frozen=True, eq=False)
class Same:
    """A function, class or anything else that is compared by identity."""

    value: Any


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that is neither parameter, buffer nor input; `live` when the graph holds this very object."""

    value: torch.Tensor


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
    """A container too large to be taken apart: of this type, and holding these very objects."""

    kind: type
    items: list[Any]


Expected = Literal | Same | Constant | State | Object | Contents | Whole | None  # None: anything
LITERALS = frozenset({
    int, float, complex, bool, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.layout,
    torch.memory_format, Missing,
})  # fmt: skip
LARGEST = 2000


def parts_of(value: Any) -> list[Any] | None:
    """What a container consists of; None for what is not one."""
    parts = next((take(value) for kinds, take in _PARTS if isinstance(value, kinds)), None)
    attributes = None if parts is None or type(value).__module__ in _PLAIN else getattr(value, "__dict__", None)
    return [*parts, attributes] if parts is not None and attributes else parts


def items_of(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _in_a_set(value: Any) -> tuple[str, str]:
    return type(value).__name__, repr(value) if type(value) in LITERALS else str(id(value))


_PARTS: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    ((list, tuple, deque), list),
    (dict, items_of),
    ((set, frozenset), lambda s: sorted(s, key=_in_a_set)),
    (types.MethodType, lambda m: [m.__func__, m.__self__]),
    (partial, lambda p: [p.func, p.args, p.keywords]),
    (types.SimpleNamespace, lambda n: [vars(n)]),
    (slice, lambda s: [s.start, s.stop, s.step]),
    (numpy.ndarray, lambda a: [a.dtype.str, a.shape, a.tobytes()]),
)
_PLAIN = frozenset({"builtins", "collections", "functools", "types", "numpy"})


Getter = Callable[[str, Any], Any]


def by_attribute(holder: Any) -> Getter:
    return partial(getattr, holder)


def of_instance(holder: Any) -> Getter:
    own: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    return own.get


def names_of(holder: Any) -> Getter:
    """A getter of the names that there are (`forward`, which `plan.apply` sets, is read by itself)."""
    own: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    return lambda *_: tuple(sorted(own.keys() - {"forward"}))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GET_HOOKS = itemgetter(*HOOKS)


def of_hooks(holder: nn.Module) -> Getter:
    own: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    return lambda *_: _GET_HOOKS(own)


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


REGISTERED: dict[str, Callable[[nn.Module], Getter]] = {
    "_parameters": of_parameters, "_buffers": of_buffers, "_modules": of_children,
}  # fmt: skip


@dataclass(frozen=True)
class Read:
    """One name that was looked up.

    Attributes:
        holder: an `Object`, or the class, function, cell or dict of globals that has it.
        getter: how the name is looked up there.
        label: the holder in words, where it is not an `Object`.
    """

    holder: Any
    getter: Callable[[Any], Getter]
    name: str
    expected: Expected
    label: str = ""


@dataclass(frozen=True)
class Known:
    """An object of the model: its type, where it was found, and whether that is a path of submodules."""

    kind: type
    path: str
    is_submodule: bool


class Differs(Exception):
    """What was read is no longer there: where, what is there now, what was there."""

    def __init__(self, where: str, now: str, then: str) -> None:
        super().__init__(where, now, then)
        self.where, self.now, self.then = where, now, then


@dataclass(frozen=True)
class Reads:
    """Everything that a trace read.

    Attributes:
        objects: the model first; then its submodules and what else was reached.
        by_object: the reads of each object; `fixed` are those of classes, functions and globals.
        live: ids of the tensors that the graph holds itself, whose changes in place are therefore seen.
    """

    entries: tuple[StateEntry, ...]
    objects: tuple[Known, ...]
    by_object: dict[int, list[Read]]
    fixed: tuple[Read, ...]
    loss: Expected
    live: frozenset[int]

    def match(self, model: nn.Module, loss_fn: Any) -> Matched:
        """Find the objects of `model` that stand for those of the trace.

        Raises:
            Differs: something that was read has changed.
        """
        return _Matching(self, model).run(model, loss_fn)


class Matched:
    """The reads of one model, laid out so that a check is a few passes in C."""

    def __init__(self) -> None:
        self.getters: list[Getter] = []
        self.names: list[str] = []
        self.found: list[Any] = []
        self.objects: list[Any] = []
        self.kinds: list[type] = []
        self.modules: list[dict[str, Any]] = []  # the attributes of each module, for its hooks
        self.hooks: list[tuple[Any, ...]] = []
        self.empty: list[Any] = []
        self.contents: list[tuple[Any, list[Any]]] = []
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.computed: list[tuple[Getter, str, Any]] = []
        self.state_getters: list[tuple[Getter, str]] = []
        self.ties: list[int] = []

    def state(self) -> list[torch.Tensor] | None:
        """The parameters and buffers of the next call, or None where what was read has changed."""
        return self.tensors() if self._holds() else None

    def _holds(self) -> bool:
        found = [get(name, MISSING) for get, name in zip(self.getters, self.names, strict=True)]
        if not all(map(is_, found, self.found)):
            if not all(map(same_value, found, self.found)):
                return False
            self.found = found
        return (
            list(map(_GET_HOOKS, self.modules)) == self.hooks
            and all(map(is_, map(type, self.objects), self.kinds))
            and not any(self.empty)
            and all(_holds_these(container, items) for container, items in self.contents)
            and all(tensor._version == version for tensor, version in self.versions)
            and all(same_value(get(name, MISSING), value) for get, name, value in self.computed)
        )

    def tensors(self) -> list[torch.Tensor] | None:
        """One tensor per entry; None where one is gone, untied or tied."""
        found = [get(name, None) for get, name in self.state_getters]
        tensors: list[Any] = []
        for i, tensor in zip(self.ties, found, strict=True):
            if i == len(tensors):
                tensors.append(tensor)
            elif tensors[i] is not tensor:
                return None
        distinct = len(set(map(id, tensors))) == len(tensors)
        return tensors if distinct and not any(map(is_, tensors, repeat(None))) else None


def _holds_these(container: Any, items: list[Any]) -> bool:
    if isinstance(container, (set, numpy.ndarray)):
        now = parts_of(container) or []
        return len(now) == len(items) and all(map(same_value, now, items))
    now = items_of(container)
    return len(now) == len(items) and all(map(is_, now, items))


def same_value(a: Any, b: Any) -> bool:
    """Whether two plain values are one for a program that computes with them: 1 is not True, 0.0 is not -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, numpy.generic) or type(a) in (float, complex):
        return repr(a) == repr(b)
    return type(a) in LITERALS and bool(a == b)


class _Matching:
    """Walks from the model along the reads."""

    def __init__(self, reads: Reads, model: nn.Module) -> None:
        self.reads, self.modules = reads, dict(model.named_modules(remove_duplicate=False))
        self.matched = Matched()
        self.objects: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.pending: list[int] = []
        self.open: set[tuple[int, int]] = set()

    def run(self, model: nn.Module, loss_fn: Any) -> Matched:
        self._state()
        if not self.agrees(Object(0), model):
            raise Differs("the model", describe_kind(type(model)), describe_kind(self.reads.objects[0].kind))
        self._follow()
        if not self.agrees(self.reads.loss, loss_fn):
            raise Differs("loss_fn", show(loss_fn), describe(self.reads.loss))
        for read in self.reads.fixed:
            self._check(read, read.getter(read.holder), read.label)
        self._follow()
        for number in self.reads.by_object:
            self._unreached(number)
            self._follow()
        return self.matched

    def _unreached(self, number: int) -> None:
        """A submodule that no read led to (Python came to it some other way) is looked up at its path."""
        known = self.reads.objects[number]
        if number in self.objects or not known.is_submodule:
            return
        module = self.modules.get(known.path, MISSING)
        if not self.agrees(Object(number), module):
            raise Differs(known.path, show(module), describe_kind(known.kind))

    def _state(self) -> None:
        matched = self.matched
        for i, entry in enumerate(self.reads.entries):
            for name in (entry.name, *entry.aliases):
                path, _, leaf = name.rpartition(".")
                module = self.modules.get(path)
                if module is None:
                    raise Differs(name, "nothing", "a parameter or buffer")
                matched.state_getters.append((REGISTERED[entry.registry](module), leaf))
                matched.ties.append(i)
        tensors = matched.tensors()
        if tensors is None:
            raise Differs(*self._differing_state())
        self.tensors: list[torch.Tensor] = tensors

    def _differing_state(self) -> tuple[str, str, str]:
        found = [get(name, None) for get, name in self.matched.state_getters]
        names = [name for e in self.reads.entries for name in (e.name, *e.aliases)]
        first: dict[int, int] = {}
        for position, (i, tensor, name) in enumerate(zip(self.matched.ties, found, names, strict=True)):
            other = first.setdefault(id(tensor), position)
            if tensor is None:
                return name, "nothing", "a parameter or buffer"
            if self.matched.ties[other] != i:
                return name, f"the same tensor as {names[other]}", "one of its own"
            if other == position and i in self.matched.ties[:position]:
                return name, "one of its own", f"the same tensor as {self.reads.entries[i].name}"
        return "(state)", "other parameters or buffers", "those at planning"

    def _bind(self, number: int, value: Any) -> None:
        self.objects[number] = value
        self.numbers[id(value)] = number
        self.matched.objects.append(value)
        self.matched.kinds.append(type(value))
        self.pending.append(number)

    def _follow(self) -> None:
        while self.pending:
            number = self.pending.pop()
            for read in self.reads.by_object.get(number, ()):
                getter = self._getter(read, self.objects[number])
                self._check(read, getter, read.label)

    def _getter(self, read: Read, holder: Any) -> Getter:
        try:
            return read.getter(holder)
        except AttributeError:
            return lambda name, default: default

    def _check(self, read: Read, getter: Getter, label: str) -> None:
        value = getter(read.name, MISSING)
        matched = self.matched
        if isinstance(read.expected, State) and read.getter in (of_parameters, of_buffers):
            pass  # looked up with the state
        elif read.getter is of_hooks:
            matched.modules.append(object.__getattribute__(self.objects[read.holder.index], "__dict__"))
            matched.hooks.append(value)
        elif read.getter is names_of or (read.getter is by_attribute and isinstance(read.holder, Object)):
            matched.computed.append((getter, read.name, value))
        else:
            matched.getters.append(getter)
            matched.names.append(read.name)
            matched.found.append(value)
        if getattr(type(value), "runs_plan", False):
            value = MISSING if value.previous is None else value.previous
        if not self.agrees(read.expected, value):
            now, then = (f"{read.name}={text}" for text in (show(value), describe(read.expected)))
            raise Differs("(read by forward)", f"{label} with {now}", then)

    def agrees(self, expected: Expected, value: Any) -> bool:
        """Whether `value` can stand for what was found there while tracing."""
        return expected is None or _AGREES[type(expected)](self, expected, value)

    def _same_whole(self, expected: Whole, value: Any) -> bool:
        self.matched.contents.append((value, expected.items))
        return type(value) is expected.kind and _holds_these(value, expected.items)

    def _same_object(self, expected: Object, value: Any) -> bool:
        index = expected.index
        if index in self.objects:
            return value is self.objects[index]
        if type(value) is not self.reads.objects[index].kind or id(value) in self.numbers:
            return False
        self._bind(index, value)
        return True

    def _same_parts(self, expected: Contents, value: Any) -> bool:
        if type(value) is not expected.kind:
            return False
        if (id(value), id(expected)) in self.open:
            return True  # a container that holds itself
        self.open.add((id(value), id(expected)))
        now = parts_of(value) or []
        if isinstance(value, (list, dict, set, deque, numpy.ndarray)):
            by_value = isinstance(value, (set, numpy.ndarray))
            if by_value or len(value):
                self.matched.contents.append((value, now if by_value else items_of(value)))
            else:
                self.matched.empty.append(value)
        return len(now) == len(expected.parts) and all(map(self.agrees, expected.parts, now))

    def _same_tensor(self, expected: Constant, value: Any) -> bool:
        then = expected.value
        if value is then and id(then) in self.reads.live:
            return True
        self.matched.versions += [(t, t._version) for t in (value, then) if isinstance(t, torch.Tensor)]
        return value is then or (
            type(value) is type(then)
            and value.dtype is then.dtype
            and value.device == then.device
            and value.stride() == then.stride()
            and torch.equal(value, then)
        )


_AGREES: dict[type, Callable[[_Matching, Any, Any], bool]] = {
    Literal: lambda _, expected, value: same_value(value, expected.value),
    Same: lambda _, expected, value: value is expected.value,
    State: lambda matching, expected, value: value is matching.tensors[expected.index],
    Constant: _Matching._same_tensor,
    Object: _Matching._same_object,
    Whole: _Matching._same_whole,
    Contents: _Matching._same_parts,
}


def show(value: Any) -> str:
    """A value in an error message."""
    if isinstance(value, (nn.Module, torch.Tensor)) or type(value).__repr__ is object.__repr__:
        return describe_kind(type(value))
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value.__qualname__
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the user's own code
        return describe_kind(type(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_LONGEST = 80


def describe_kind(kind: type) -> str:
    return f"{'an' if kind.__name__[:1] in 'AEIOUaeiou' else 'a'} {kind.__name__}"


def describe(expected: Expected) -> str:
    """What a read expects, in an error message."""
    match expected:
        case Literal(value) | Same(value) | Constant(value):
            return show(value)
        case Contents(kind, parts) if kind in (list, tuple) and len(parts) < _FEW:
            return f"{kind.__name__}({', '.join(map(describe, parts))})"
        case Contents(kind) | Whole(kind):
            return f"{describe_kind(kind)} as it was"
        case State():
            return "the parameter or buffer"
        case Object() | None:
            return "that at planning"


_FEW = 7
