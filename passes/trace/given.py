"""What a forward changes in the objects and containers that it is given (a cache of keys and values).

Tracing and planning leave them as they were. A planned step changes them as the plain one does: the new tensors are
outputs of the step, and `deliver` puts them, and what else is new, into their places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ..errors import Unsupported
from .answers import Asked
from .expected import LITERALS, MISSING
from .nodes import refill, same
from .stores import MODEL, SHARED, Place, Places, held_in, store_of
from .structure import Taker, flatten, inside, one_level, unflatten
from .templates import Constant, Kept, Opaque, Slot, Template, Tree, slots

CONTAINERS = (dict, list, tuple, deque)
MAX_THINGS = 50_000
ARGUMENT = "the argument "


@dataclass(frozen=True)
class Changed:
    """One thing that forward changes.

    Attributes:
        place: of an object or container.
        key: the attribute or key; None for a list, deque or set, or a dict in another order, of which all items count.
        value: what is there afterwards; None where nothing is.
    """

    place: Place
    key: Any
    value: Template | None

    def __str__(self) -> str:
        return str(self.place if self.key is None else Place((*self.place.steps, (False, self.key))))


@dataclass(frozen=True)
class Returned:
    """What a forward returns and changes: `tensors` fill the slots of `template`, then those of `changes`."""

    tensors: list[torch.Tensor]
    template: Template
    changes: tuple[Changed, ...] = ()
    answers: Sequence[tuple[Asked, torch.Tensor]] = ()  # of the sample, and what was asked about


@dataclass(frozen=True)
class _Thing:
    value: Any
    place: Place
    held: Any


class Given:
    """The objects and containers that a call's arguments consist of, and what they hold now."""

    def __init__(self, bound: Mapping[str, Any]) -> None:
        self.things: dict[int, _Thing] = {}
        queue: deque[tuple[Any, Place]] = deque((v, Place(((False, k),))) for k, v in bound.items())
        while queue and len(self.things) < MAX_THINGS:
            value, place = queue.popleft()
            if id(value) in self.things or type(value) in LITERALS or isinstance(value, (torch.Tensor, *SHARED)):
                continue
            held = held_in(value)
            self.things[id(value)] = _Thing(value, place, held)
            attribute = not isinstance(value, CONTAINERS)
            if not attribute and getattr(value, "__dict__", None) is not None:
                queue.append((vars(value), Place((*place.steps, (True, "__dict__")))))
            pairs = held.items() if isinstance(held, dict) else enumerate(held if isinstance(held, list) else ())
            queue.extend((v, Place((*place.steps, (attribute, k)))) for k, v in pairs if type(v) not in LITERALS)

    def returned(self, value: Any, written: Collection[tuple[Place, str]], owned: Places) -> Returned:
        """What forward returned, with what it changed.

        Args:
            written: attributes that it set without having read them.
            owned: what is the model's.

        Raises:
            Unsupported: it put something there that cannot be made anew in each call.
        """
        taker = _Taker(self.things, owned)
        template = taker.take(value)
        changes: list[Changed] = []
        for thing, key, now in self._changes(written):
            taker.place = thing.place
            changes.append(Changed(thing.place, key, None if now is MISSING else taker.take(now)))
        return Returned(taker.tensors, template, tuple(changes))

    def places(self, attributes: Iterable[tuple[int, str]]) -> set[tuple[Place, str]]:
        """Where attributes are of things that are known by their ids."""
        return {(self.things[number].place, name) for number, name in attributes if number in self.things}

    def changed(self) -> dict[str, int]:
        """The places that hold something else by now, and what that is by its id."""
        now = ((thing.place, now if key is None else [now]) for thing, key, now in self._changes())
        return {ARGUMENT + str(place): hash(tuple(map(id, items))) for place, items in now}

    def restore(self) -> None:
        """Undo what was changed."""
        for thing in {id(thing): thing for thing, *_ in self._changes()}.values():
            refill(store_of(thing.value), thing.held)

    def _changes(self, written: Collection[tuple[Place, str]] = ()) -> Iterator[tuple[_Thing, Any, Any]]:
        for thing in self.things.values():
            now, then = held_in(thing.value), thing.held
            if isinstance(then, dict):
                kept = [key for key in then if key in now]
                if isinstance(thing.value, dict) and list(now) != [*kept, *(key for key in now if key not in then)]:
                    yield thing, None, now  # in another order
                    continue
                for key in dict.fromkeys([*then, *now]):
                    if not same(now.get(key, MISSING), then.get(key, MISSING)) or (thing.place, key) in written:
                        yield thing, key, now.get(key, MISSING)
            elif isinstance(then, set):
                if now != then:
                    yield thing, None, _plain_items(now, thing.place)
            elif then is not None and (len(now) != len(then) or not all(map(same, now, then))):
                yield thing, None, now


class _Taker(Taker):
    """Takes apart what forward returned, then (at a `place`) what it put into its arguments: each call has its own."""

    def __init__(self, things: Mapping[int, _Thing], owned: Places) -> None:
        super().__init__()
        self.things, self.owned, self.place = things, owned, cast(Place | None, None)

    def is_elsewhere(self, value: Any) -> bool:
        """In the arguments, or in the model."""
        return not isinstance(value, tuple) and (id(value) in self.things or self.owned.place(value) is not None)

    def take(self, node: Any, depth: int = 0) -> Template:
        """As what was there before, of new containers and objects."""
        if isinstance(node, torch.Tensor):
            return self.slot(node)
        if id(node) in self.things and not isinstance(node, tuple):
            return Kept(self.things[id(node)].place)
        if (place := self.owned.place(node)) is not None:
            return Kept(place)
        if self.owned.is_of_others(node) and not self._holds_tensor(node, depth):
            return Constant(node)
        if self.place is None or id(node) in self.made:
            return super().take(node, depth)
        if type(node) in LITERALS or isinstance(node, (*SHARED, torch.Size)):
            return Constant(node)
        leaves, _ = one_level(node)
        if not (len(leaves) == 1 and leaves[0] is node):
            return super().take(node, depth)
        attributes = held_in(node)
        if not isinstance(attributes, dict) or isinstance(node, dict) or not _can_be_made(type(node)):
            raise _cannot_be_made(node, self.place)
        self.number(node, is_object=True)
        return Opaque(type(node), tuple((name, self.take(part, depth + 1)) for name, part in attributes.items()))


def _can_be_made(kind: type) -> bool:
    try:
        object.__new__(kind)
    except TypeError:  # derived from one of Python's own
        return False
    return True


def _cannot_be_made(value: Any, place: Place) -> Unsupported:
    return Unsupported(
        f"argument changed in forward ({type(value).__name__})", str(place), "a planned step cannot make such "
        "an object anew", "Return it from forward, or make it of tensors, numbers, lists and dicts.",
    )  # fmt: skip


def _plain_items(items: set[Any], place: Place) -> list[Any]:
    """Of a set, which has no order by which others could be found again."""
    for item in items:
        if type(item) not in LITERALS:
            raise _cannot_be_made(item, place)
    return list(items)


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
    """What things without tensors that forward will change hold now; those with tensors are made anew for a replay.

    Of other things in them nothing is kept, lest what forward puts there lives on: `MISSING` stands for these.
    """
    held = [(p, held_in(p.of(bound))) for p in {str(change.place): change.place for change in changes}.values()]
    return [(place, _plain_part(content)) for place, content in held if not flatten(content)[0]]


def _plain_part(content: Any) -> Any:
    def plain(value: Any) -> Any:
        return value if type(value) in LITERALS or isinstance(value, SHARED) else MISSING

    if isinstance(content, dict):
        return {key: plain(value) for key, value in content.items()}
    return content if isinstance(content, set) else list(map(plain, content))


def put_back(before: Before, bound: Mapping[str, Any]) -> None:
    """Let other arguments of the same kind be as those were."""
    for place, then in before:
        thing = place.of(bound)
        now, content = held_in(thing), then
        if isinstance(then, dict):
            content = {key: now.get(key) if value is MISSING else value for key, value in then.items()}
        elif isinstance(then, list):
            content = [now[i] if value is MISSING else value for i, value in enumerate(then)]
        refill(store_of(thing), content)


def deliver(
    changes: Sequence[Changed], tensors: Sequence[Any], bound: Mapping[str, Any], output: Template, model: nn.Module
) -> Any:
    """Change a call's arguments as forward does; what forward returns.

    Args:
        tensors: the step's outputs.
        output: how what is returned is made of them.
    """
    targets = targets_of(changes, bound)
    made, given = list[Any](), {**bound, MODEL: model}
    returned = unflatten(output, tensors, given, made)
    values = [None if c.value is None else unflatten(c.value, tensors, given, made) for c in changes]
    for change, target, value in zip(changes, targets, values, strict=True):
        store = store_of(target)
        if change.key is None:
            refill(store, value)
        elif change.value is None:
            store.pop(change.key, None)
        else:
            store[change.key] = value
    return returned


def targets_of(changes: Sequence[Changed], bound: Mapping[str, Any]) -> list[Any]:
    """What forward changes, found before it does."""
    return [change.place.of(bound) for change in changes]


def changed_slots(changes: Sequence[Changed]) -> list[tuple[str, int]]:
    """As `slots`, of what forward changes."""
    return [(f"{c}{path}", i) for c in changes if c.value is not None for path, i in slots(c.value)]


def all_outputs(
    value: Any, output: Template, changes: Sequence[Changed], targets: Sequence[Any],
    others: Iterable[tuple[Template, Any]] = (),
) -> list[torch.Tensor]:  # fmt: skip
    """The tensors of `Returned`, of a call that returned `value`, changed its arguments, and left `others`."""
    values = [(output, value), *others]
    for change, target in zip(changes, targets, strict=True):
        if change.value is not None:
            store = store_of(target)
            held = store if isinstance(store, MutableMapping) else list(store)
            values.append((change.value, held if change.key is None else held[change.key]))
    return [tensor for _, tensor in sorted(filled(values).items())]


def filled(values: Iterable[tuple[Template, Any]]) -> dict[int, torch.Tensor]:
    """The tensors of values, by their numbers in the templates."""
    return {i: tensor for template, value in values for i, tensor in _filled(template, value)}


def _filled(template: Template, value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    match template:
        case Slot(index):
            yield index, value
        case Tree() | Opaque():
            for child, part in inside(template, value):
                yield from _filled(child, part)
