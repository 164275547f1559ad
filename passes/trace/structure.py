"""Taking nested inputs and outputs apart into tensors, and putting them together again."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from passes._torch import pytree

from .expected import LITERALS

MAX_DEPTH = 8
LONGEST = 60


@dataclass(frozen=True)
class Slot:
    """A place for tensor number `index`."""

    index: int


@dataclass(frozen=True)
class Constant:
    """A value that is the same at every call."""

    value: Any


@dataclass(frozen=True)
class Tree:
    """A registered pytree container (tuple, dict, `ModelOutput`, ...)."""

    spec: Any
    children: tuple[Template, ...]


@dataclass(frozen=True)
class Opaque:
    """Any other object that holds tensors in attributes (a dataclass, HF's `DynamicCache`, ...).

    `prototype` is a shallow copy without those attributes, or the class where all are listed; rebuilding copies it
    again, or makes one without calling `__init__`, and sets them.
    """

    prototype: Any
    attributes: tuple[tuple[str, Template], ...]


@dataclass(frozen=True)
class Kept(Constant):
    """What is in the call's own arguments, at the `Place` that is the value."""


@dataclass(frozen=True)
class Again:
    """What a list, dict or object before this place is, too: number `index` of the trees and objects, in order."""

    index: int
    is_object: bool


Template = Slot | Constant | Tree | Opaque | Again


class Bound(dict[str, Any]):
    """The arguments of a call, by name.

    Attributes:
        by_name: those that the call gave by name. What is put around a `forward` may look at these alone.
    """

    def __init__(self, arguments: Mapping[str, Any], by_name: Iterable[str] = ()) -> None:
        super().__init__(arguments)
        self.by_name = frozenset(by_name)


def flatten(value: Any) -> tuple[list[torch.Tensor], Template]:
    """Split `value` into its tensors, each object once, and a template that `unflatten` fills again."""
    taker = Taker()
    return taker.tensors, taker.take(dict(value) if isinstance(value, Bound) else value)


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
            return Tree(spec, tuple(self.take(leaf, depth + 1) for leaf in leaves))
        attributes = {name: v for name, v in _attributes(node, depth).items() if self._holds_tensor(v, depth + 1)}
        if not attributes:
            return Constant(node)
        self.number(node, is_object=True)
        prototype = _shallow(node)
        for name in attributes:
            object.__setattr__(prototype, name, None)
        return Opaque(prototype, tuple((name, self.take(child, depth + 1)) for name, child in attributes.items()))

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


def held_objects(value: Any) -> list[Any]:
    """What a call's arguments hold besides tensors, numbers and strings, outside of other objects, in order."""
    found: list[Any] = []
    _hold(dict(value) if isinstance(value, Bound) else value, found, set())
    return found


def _hold(value: Any, found: list[Any], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor) or type(value) in LITERALS or id(value) in seen:
        return
    leaves, _ = one_level(value)
    if len(leaves) == 1 and leaves[0] is value:
        found.append(value)
        return
    if not isinstance(value, tuple):
        seen.add(id(value))
    for leaf in leaves:
        _hold(leaf, found, seen)


def object_paths(template: Template, path: str = "") -> list[str]:
    """Where they are."""
    match template:
        case Constant(value) if type(value) not in LITERALS:
            return [path]
        case Tree(_, children):
            names = child_names(template)
            return [p for i, c in enumerate(children) for p in object_paths(c, path + names.get(i, f"[{i}]"))]
        case Opaque() | Again(_, True):
            return [path]
    return []


def copies_in(template: Template, value: Any) -> Iterator[Any]:
    """The objects that `unflatten` made anew for `value`."""
    match template:
        case Tree(_, children):
            for child, leaf in zip(children, one_level(value)[0], strict=True):
                yield from copies_in(child, leaf)
        case Opaque(_, attributes):
            yield value
            for name, child in attributes:
                yield from copies_in(child, getattr(value, name))


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
            made[number] = pytree.tree_unflatten([unflatten(c, tensors, given, made) for c in children], spec)
            return made[number]
        case Opaque(prototype, attributes):
            result = object.__new__(prototype) if isinstance(prototype, type) else _shallow(prototype)
            made.append(result)
            for name, child in attributes:
                object.__setattr__(result, name, unflatten(child, tensors, given, made))
            return result


def _shallow(node: Any) -> Any:
    """Another object with the same attributes; a class's own `__copy__` may want to look into them (UserDict)."""
    if not hasattr(type(node), "__copy__"):
        return copy.copy(node)
    result = object.__new__(type(node))
    result.__dict__.update(node.__dict__)
    return result


def slots(template: Template) -> list[tuple[str, int]]:
    """`(path, tensor index)` of every slot, in order; a path reads like `.loss` or `[0]`."""
    match template:
        case Slot(index):
            return [("", index)]
        case Constant(_) | Again():
            return []
        case Tree(_, children):
            names = child_names(template)
            return [(names.get(i, f"[{i}]") + path, index) for i, c in enumerate(children) for path, index in slots(c)]
        case Opaque(_, attributes):
            return [(f".{name}{path}", index) for name, child in attributes for path, index in slots(child)]


def outline(template: Template) -> dict[str, str]:
    """What stands in every place of a call's arguments, in words; places are named by `argument_path`."""
    return {argument_path(path): text for path, text in _outline(template, "", {})}


def argument_path(path: str) -> str:
    """A path into the bound arguments as the user writes it: `batch.mask` for `['batch'].mask`."""
    return re.sub(r"^\['(\w+)'\]", r"\1", path)


def _outline(template: Template, path: str, first: dict[int, str]) -> Iterator[tuple[str, str]]:
    match template:
        case Slot(index):
            same = first.setdefault(index, path)
            yield path, "a tensor" if same == path else f"the same tensor as {argument_path(same)}"
        case Again():
            yield path, "what another place holds, too"
        case Constant(value):
            text = repr(value)
            yield path, text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
        case Tree(_, children):
            names = child_names(template)
            for i, child in enumerate(children):
                yield from _outline(child, path + names.get(i, f"[{i}]"), first)
        case Opaque(_, attributes):
            for name, child in attributes:
                yield from _outline(child, f"{path}.{name}", first)


def constants(template: Template) -> list[Any]:
    """The values that are the same at every call."""
    match template:
        case Slot() | Again():
            return []
        case Constant(value):
            return [value]
        case Tree(_, children):
            return [value for child in children for value in constants(child)]
        case Opaque(_, attributes):
            return [value for _, child in attributes for value in constants(child)]


def shared(template: Template) -> list[Any]:
    """What all that is rebuilt has in common: constants, and what objects with tensors hold besides them."""
    match template:
        case Tree(_, children):
            return [value for child in children for value in shared(child)]
        case Opaque(prototype, attributes):
            return [prototype, *(value for _, child in attributes for value in shared(child))]
    return constants(template)


def child_names(tree: Tree) -> dict[int, str]:
    """The path of each child of a container, by the child's number; empty if its type names none."""
    # tree_unflatten hands the numbers back under their keys, whatever the container is.
    return _names_in(pytree.tree_unflatten(list(range(len(tree.children))), tree.spec))


def _names_in(filled: Any) -> dict[int, str]:
    if isinstance(filled, int):
        return {filled: ""}
    try:
        keyed, _ = pytree.tree_flatten_with_path(filled)
    except ValueError:  # a registered container without `flatten_with_keys_fn` (diffusers' outputs)
        items = filled.items() if isinstance(filled, dict) else ()
        return {i: f".{name}{path}" for name, child in items for i, path in _names_in(child).items()}
    return {leaf: pytree.keystr(path) for path, leaf in keyed}


def _attributes(node: Any, depth: int) -> dict[str, Any]:
    """Those in which tensors are looked for."""
    if depth > MAX_DEPTH or isinstance(node, (type, torch.nn.Module)) or callable(node):
        return {}
    if dataclasses.is_dataclass(node):
        return {f.name: getattr(node, f.name, None) for f in dataclasses.fields(node)}
    return dict(getattr(node, "__dict__", {}))
