"""What a forward changes in the objects and containers that it is given (a cache of keys and values).

Tracing and planning leave them as they were. A planned step changes them as the plain one does: the new tensors are
outputs of the step, and `deliver` puts them, and what else is new, into their places.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from passes._torch import pytree

from ..errors import Unsupported
from .expected import LITERALS, MISSING
from .nodes import refill, same
from .structure import Constant, Kept, Opaque, Slot, Template, Tree, flatten, slots, take_apart, unflatten

LARGEST = 10_000  # items of a container that are followed
MAX_THINGS = 50_000


@dataclass(frozen=True)
class Place:
    """A way from a call's arguments: attributes (True) and items (False), by their names and keys."""

    steps: tuple[tuple[bool, Any], ...] = ()

    def of(self, bound: Mapping[str, Any]) -> Any:
        """What is there in these arguments."""
        value: Any = bound
        for is_attribute, key in self.steps:
            value = vars(value)[key] if is_attribute else value[key]
        return value

    def __str__(self) -> str:
        first, *rest = self.steps
        return f"{first[1]}" + "".join(f".{key}" if attribute else f"[{key!r}]" for attribute, key in rest)


@dataclass(frozen=True)
class Changed:
    """One thing that forward changes.

    Attributes:
        place: of an object, dict or list.
        key: the attribute or key; None for a list, of which all items count.
        value: what is there afterwards; None where nothing is.
    """

    place: Place
    key: Any
    value: Template | None

    def __str__(self) -> str:
        return str(self.place) if self.key is None else f"{self.place}[{self.key!r}]"


@dataclass(frozen=True)
class Returned:
    """What a forward returns and changes: `tensors` fill the slots of `template`, then those of `changes`."""

    tensors: list[torch.Tensor]
    template: Template
    changes: tuple[Changed, ...] = ()


@dataclass(frozen=True)
class _Thing:
    value: Any
    place: Place
    held: Any


class Given:
    """The objects, dicts and lists that a call's arguments consist of, and what they hold now."""

    def __init__(self, bound: Mapping[str, Any]) -> None:
        self.things: dict[int, _Thing] = {}
        queue: deque[tuple[Any, Place]] = deque((v, Place(((False, k),))) for k, v in bound.items())
        while queue and len(self.things) < MAX_THINGS:
            value, place = queue.popleft()
            if id(value) in self.things:
                continue
            held = _held(value)
            if held is None:
                continue
            self.things[id(value)] = _Thing(value, place, held)
            attribute = not isinstance(value, (dict, list, tuple))
            pairs = held.items() if isinstance(held, dict) else enumerate(held)
            queue.extend((v, Place((*place.steps, (attribute, k)))) for k, v in pairs if type(v) not in LITERALS)

    def returned(self, value: Any) -> Returned:
        """What forward returned, with what it changed.

        Raises:
            Unsupported: it put something there that cannot be made anew in each call.
        """
        tensors: list[torch.Tensor] = []
        positions: dict[int, int] = {}
        template = take_apart(value, tensors, positions)
        changes: list[Changed] = []
        for thing, key, now in self._changes():
            made = None if now is MISSING else self._taken(now, tensors, positions, thing.place)
            changes.append(Changed(thing.place, key, made))
        return Returned(tensors, template, tuple(changes))

    def restore(self) -> None:
        """Undo what was changed."""
        for thing in {id(thing): thing for thing, *_ in self._changes()}.values():
            refill(thing.value if isinstance(thing.value, (dict, list)) else vars(thing.value), thing.held)

    def _changes(self) -> Iterator[tuple[_Thing, Any, Any]]:
        for thing in self.things.values():
            now = _held(thing.value)
            if isinstance(thing.held, dict):
                for key in dict.fromkeys([*thing.held, *now]):
                    if not same(now.get(key, MISSING), thing.held.get(key, MISSING)):
                        yield thing, key, now.get(key, MISSING)
            elif len(now) != len(thing.held) or not all(map(same, now, thing.held)):
                yield thing, None, now

    def _taken(self, value: Any, tensors: list[torch.Tensor], positions: dict[int, int], place: Place) -> Template:
        """How a new value is made: of tensors, of what was there before, of new containers and objects."""
        if isinstance(value, torch.Tensor):
            return take_apart(value, tensors, positions)
        if id(value) in self.things and not isinstance(value, tuple):
            return Kept(self.things[id(value)].place)
        if type(value) in LITERALS or isinstance(value, (*_SHARED, torch.Size)):
            return Constant(value)
        leaves, spec = _one_level(value)
        if not (len(leaves) == 1 and leaves[0] is value):
            return Tree(spec, tuple(self._taken(leaf, tensors, positions, place) for leaf in leaves))
        if not hasattr(value, "__dict__") or callable(value) or isinstance(value, (dict, list, tuple, set, deque)):
            raise Unsupported(
                f"argument changed in forward ({type(value).__name__})", str(place), "a planned step cannot make such "
                "an object anew", "Return it from forward, or make it of tensors, numbers, lists and dicts.",
            )  # fmt: skip
        parts = tuple((name, self._taken(part, tensors, positions, place)) for name, part in vars(value).items())
        return Opaque(object.__new__(type(value)), parts)


@contextmanager
def left_alone(bound: Mapping[str, Any]) -> Iterator[Given]:
    """Undo at the end what the block changes in what a call is given."""
    given = Given(bound)
    try:
        yield given
    finally:
        given.restore()


Before = list[tuple[Place, Any]]


def held_before(changes: Sequence[Changed], bound: Mapping[str, Any]) -> Before:
    """What things without tensors that forward will change hold now; those with tensors are made anew for a replay."""
    places = {str(change.place): change.place for change in changes}.values()
    held = [(place, _held(place.of(bound))) for place in places]
    return [(place, content) for place, content in held if not flatten(content)[0]]


def put_back(before: Before, bound: Mapping[str, Any]) -> None:
    """Let other arguments of the same kind be as those were."""
    for place, content in before:
        thing = place.of(bound)
        refill(thing if isinstance(thing, (dict, list)) else vars(thing), content)


def deliver(changes: Sequence[Changed], tensors: Sequence[Any], bound: Mapping[str, Any]) -> None:
    """Change a call's arguments as forward does.

    Args:
        tensors: the step's outputs.
    """
    targets = [change.place.of(bound) for change in changes]
    values: list[Any] = [None if c.value is None else unflatten(c.value, tensors, bound) for c in changes]
    for change, target, value in zip(changes, targets, values, strict=True):
        held = target if isinstance(target, (dict, list)) else vars(target)
        if change.key is None:
            held[:] = value
        elif change.value is None:
            held.pop(change.key)
        else:
            held[change.key] = value


def changed_slots(changes: Sequence[Changed]) -> list[tuple[str, int]]:
    """As `slots`, of what forward changes."""
    return [(f"{c}{path}", i) for c in changes if c.value is not None for path, i in slots(c.value)]


def all_outputs(value: Any, changes: Sequence[Changed], bound: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of `Returned`, of a call that returned `value` and changed its arguments."""
    tensors = flatten(value)[0]
    found = dict(enumerate(tensors))
    for change in changes:
        if change.value is not None:
            thing = change.place.of(bound)
            held = thing if isinstance(thing, (dict, list)) else vars(thing)
            _fill(change.value, held if change.key is None else held[change.key], found)
    return [found[i] for i in range(len(found))]


def _fill(template: Template, value: Any, found: dict[int, torch.Tensor]) -> None:
    match template:
        case Slot(index):
            found[index] = value
        case Tree(_, children):
            for child, leaf in zip(children, _one_level(value)[0], strict=True):
                _fill(child, leaf, found)
        case Opaque(_, attributes):
            for name, child in attributes:
                _fill(child, vars(value)[name], found)


def _one_level(value: Any) -> tuple[list[Any], Any]:
    """What a container holds, and how it is built of that; anything else holds itself."""
    own = id(value)  # pytree's own function is a reference cycle, which would keep the value
    return pytree.tree_flatten(value, is_leaf=lambda part: id(part) != own)


_SHARED = (type, enum.Enum, FunctionType, MethodType, ModuleType, nn.Module)  # never made anew


def _held(value: Any) -> Any:
    """What a thing holds, by attribute or key; None for what is not looked into."""
    if type(value) in LITERALS or isinstance(value, (torch.Tensor, *_SHARED)):
        return None
    if isinstance(value, (list, tuple)):
        return list(value) if len(value) <= LARGEST else None
    if isinstance(value, dict):
        return dict(dict.items(value)) if len(value) <= LARGEST else None
    own = getattr(value, "__dict__", None)
    return dict(own) if isinstance(own, dict) and not callable(value) else None
