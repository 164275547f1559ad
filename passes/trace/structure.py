"""Taking nested inputs and outputs apart into tensors, and putting them together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from passes._torch import pytree

from .expected import LITERALS, MISSING
from .stores import attributes_of
from .templates import LONGEST, Again, Constant, Kept, Opaque, Slot, Template, Tree

MAX_DEPTH = 8


class Bound(dict[str, Any]):
    """The arguments of a call, by name.

    Attributes:
        by_name: those that the call gave by name. What is put around a `forward` may look at these alone.
    """

    def __init__(
        self, arguments: Mapping[str, Any] | Iterable[tuple[str, Any]], by_name: Iterable[str] = ()
    ) -> None:
        super().__init__(arguments)
        self.by_name = frozenset(by_name)


def flatten(value: Any) -> tuple[list[torch.Tensor], Template]:
    """Split `value` into its tensors, each object once, and a template that `unflatten` fills again."""
    value = dict(value) if isinstance(value, Bound) else value
    return (_flat(value) if type(value) is dict else None) or _flatten(value)


def _flatten(value: Any) -> tuple[list[torch.Tensor], Template]:
    taker = Taker()
    return taker.tensors, taker.take(value)


def _flat(arguments: dict[str, Any]) -> tuple[list[torch.Tensor], Template] | None:
    """`_flatten` of tensors, numbers and strings in tuples and dicts; calls that are built alike have one template."""
    positions: dict[int, tuple[int, torch.Tensor]] = {}
    key = _built(arguments, positions, set())
    if key is None:
        return None
    if key not in _templates:
        if len(_templates) >= MOST_TEMPLATES:
            _templates.clear()
            _shared.clear()
        _templates[key] = _flatten(arguments)[1]
        _shared.add(id(_templates[key]))
    return [tensor for _, tensor in positions.values()], _templates[key]


def _built(value: Any, positions: dict[int, tuple[int, torch.Tensor]], dicts: set[int]) -> Any:
    """How a value is built, its tensors by their numbers; None where it holds other things, or a dict twice."""
    if isinstance(value, torch.Tensor):
        return positions.setdefault(id(value), (len(positions), value))[0]
    kind = type(value)
    if kind in LITERALS:
        long = kind in (str, bytes) and len(value) > LONGEST
        return None if long else (kind, repr(value) if kind in (float, complex) else value)
    if kind is dict and id(value) not in dicts and all(type(name) is str for name in value):
        dicts.add(id(value))
        parts = *value, *(_built(part, positions, dicts) for part in value.values())
    elif kind is tuple:
        parts = tuple(_built(part, positions, dicts) for part in value)
    else:
        return None
    return None if None in parts else (kind, len(parts), *parts)


def is_shared(template: Template) -> bool:
    """Whether other calls that are built alike have this very template."""
    return id(template) in _shared


MOST_TEMPLATES = 1000
_templates: dict[Any, Template] = {}
_shared: set[int] = set()  # their ids


class Taker:
    """Takes values apart that are put together again in one go: what is one thing in several places stays one.

    Attributes:
        tensors: those found, each once.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.positions: dict[int, int] = {}
        self.made: dict[int, Again] = {}
        self.count = 0
        self.near: dict[int, int] = {}  # things by their ids: down to which depth a tensor is near enough
        self.far: dict[int, int] = {}  # from which depth on none is
        self.alive: list[Any] = []  # ids of what pytree made for a moment would be given to others

    def take(self, node: Any, depth: int = 0) -> Template:
        """The template of a value; the caller keeps the value alive meanwhile."""
        if isinstance(node, torch.Tensor):
            return self.slot(node)
        if type(node) in LITERALS:
            return Constant(node)
        if id(node) in self.made:
            return self.made[id(node)]
        leaves, spec = one_level(node)
        if not (len(leaves) == 1 and leaves[0] is node):
            self.number(node, is_object=False)
            children = tuple(self.take(leaf, depth + 1) for leaf in leaves)
            besides = attributes_besides(node, leaves, spec)
            return Tree(spec, children, tuple((name, self.take(value, depth + 1)) for name, value in besides.items()))
        attributes = {
            name: v for name, v in _attributes(node, depth).items()
            if self._holds_tensor(v, depth + 1) or self.is_elsewhere(v)
        }  # fmt: skip
        if not attributes:
            return Constant(node)
        self.number(node, is_object=True)
        prototype = _shallow(node)
        for name in attributes:
            object.__setattr__(prototype, name, None)
        return Opaque(prototype, tuple((name, self.take(child, depth + 1)) for name, child in attributes.items()))

    def is_elsewhere(self, value: Any) -> bool:
        """Whether it is found anew in each call."""
        return False

    def slot(self, tensor: torch.Tensor) -> Slot:
        if id(tensor) not in self.positions:
            self.positions[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return Slot(self.positions[id(tensor)])

    def number(self, node: Any, is_object: bool) -> None:
        """Note what `unflatten` makes next; a tuple cannot be changed, and is no more than what it holds."""
        if not isinstance(node, tuple):
            self.made[id(node)] = Again(self.count, is_object)
            self.alive.append(node)
        self.count += 1

    def _holds_tensor(self, value: Any, depth: int) -> bool:
        if isinstance(value, torch.Tensor):
            return True
        if type(value) in LITERALS or self.far.get(id(value), depth + 1) <= depth:
            return False
        if self.near.get(id(value), -1) >= depth:
            return True
        leaves, _ = pytree.tree_flatten(value)
        inside = leaves if depth <= MAX_DEPTH else []
        if len(leaves) == 1 and leaves[0] is value:
            inside = list(_attributes(value, depth).values())
        found = any(self._holds_tensor(each, depth + 1) for each in inside)
        (self.near if found else self.far)[id(value)] = depth
        self.alive.append(value)
        return found


def one_level(value: Any) -> tuple[list[Any], Any]:
    """What a container holds, and how it is built of that; anything else holds itself."""
    own = id(value)  # pytree's own function is a reference cycle, which would keep the value
    return pytree.tree_flatten(value, is_leaf=lambda part: id(part) != own)


def attributes_besides(container: Any, leaves: list[Any], spec: Any) -> dict[str, Any]:
    """The attributes of a container that it would not have when it was made anew of its leaves."""
    if type(container) in (tuple, list, dict) or not (own := attributes_of(container)):
        return {}
    anew = attributes_of(pytree.tree_unflatten(leaves, spec))
    return {name: value for name, value in own.items() if anew.get(name, MISSING) is not value}


def inside(template: Tree | Opaque, value: Any) -> Iterator[tuple[Template, Any]]:
    """What is in a template, with what is there in a value that is built so."""
    if isinstance(template, Tree):
        yield from zip(template.children, one_level(value)[0], strict=True)
    for name, child in template.attributes:
        yield child, attributes_of(value)[name]


def held_objects(value: Any) -> list[Any]:
    """What a call's arguments hold besides tensors, numbers and strings, outside of other objects, in order."""
    found: list[Any] = []
    _hold(dict(value) if isinstance(value, Bound) else value, found, set())
    return found


def _hold(value: Any, found: list[Any], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor) or type(value) in LITERALS or id(value) in seen:
        return
    leaves, spec = one_level(value)
    if len(leaves) == 1 and leaves[0] is value:
        found.append(value)
        return
    if not isinstance(value, tuple):
        seen.add(id(value))
    for part in (*leaves, *attributes_besides(value, leaves, spec).values()):
        _hold(part, found, seen)


def copies_in(template: Template, value: Any) -> Iterator[Any]:
    """The objects that `unflatten` made anew for `value`."""
    if isinstance(template, (Tree, Opaque)):
        yield from [value] * isinstance(template, Opaque)
        for child, part in inside(template, value):
            yield from copies_in(child, part)


def unflatten(template: Template, tensors: Sequence[Any], given: Any = None, made: list[Any] | None = None) -> Any:
    """Fill `template` with `tensors`, and with what is in the call's arguments.

    Args:
        made: what was made for the templates before that the same `Taker` took.
    """
    made = [] if made is None else made
    match template:
        case Slot(index):
            return tensors[index]
        case Kept(place):
            return place.of(given)
        case Again(index):
            return made[index]
        case Constant(value):
            return value
        case Tree(spec, children):
            number = len(made)
            made.append(None)
            result = pytree.tree_unflatten([unflatten(c, tensors, given, made) for c in children], spec)
            made[number] = result = torch.Size(result) if spec.type is torch.Size else result
        case Opaque(prototype):
            result = object.__new__(prototype) if isinstance(prototype, type) else _shallow(prototype)
            made.append(result)
    for name, child in template.attributes:
        object.__setattr__(result, name, unflatten(child, tensors, given, made))
    return result


def _shallow(node: Any) -> Any:
    """Another object with the same attributes; a class's own `__copy__` may want to look into them (UserDict)."""
    if not hasattr(type(node), "__copy__"):
        return copy.copy(node)
    try:
        result = object.__new__(type(node))
    except TypeError:  # derived from one of Python's own
        result = copy.copy(node)
    result.__dict__.update(node.__dict__)
    return result


def _attributes(node: Any, depth: int) -> dict[str, Any]:
    """Those in which tensors are looked for."""
    if depth > MAX_DEPTH or isinstance(node, (type, torch.nn.Module)) or callable(node):
        return {}
    if dataclasses.is_dataclass(node):
        return {f.name: getattr(node, f.name, None) for f in dataclasses.fields(node)}
    return dict(getattr(node, "__dict__", {}))
