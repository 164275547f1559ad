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

    `prototype` is a shallow copy without those attributes; rebuilding copies it again and sets them.
    """

    prototype: Any
    attributes: tuple[tuple[str, Template], ...]


@dataclass(frozen=True)
class Kept(Constant):
    """What is in the call's own arguments, at the `Place` that is the value."""


Template = Slot | Constant | Tree | Opaque


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
    tensors: list[torch.Tensor] = []
    return tensors, take_apart(dict(value) if isinstance(value, Bound) else value, tensors, {})


def take_apart(value: Any, tensors: list[torch.Tensor], positions: dict[int, int]) -> Template:
    """As `flatten`; its tensors are added to those that `positions` has by their ids."""
    return _take_apart(value, tensors, positions, 0)


# A function of the module, not a closure: one that calls itself is a reference cycle, and would keep the tensors alive
# until the garbage collector runs.
def _take_apart(node: Any, tensors: list[torch.Tensor], positions: dict[int, int], depth: int) -> Template:
    if isinstance(node, torch.Tensor):
        if id(node) not in positions:
            positions[id(node)] = len(tensors)
            tensors.append(node)
        return Slot(positions[id(node)])
    if type(node) in LITERALS:
        return Constant(node)
    leaves, spec = pytree.tree_flatten(node)
    if not (len(leaves) == 1 and leaves[0] is node):
        return Tree(spec, tuple(_take_apart(leaf, tensors, positions, depth + 1) for leaf in leaves))
    attributes = _tensor_attributes(node, depth)
    if not attributes:
        return Constant(node)
    prototype = _shallow(node)
    for name in attributes:
        object.__setattr__(prototype, name, None)
    children = ((name, _take_apart(child, tensors, positions, depth + 1)) for name, child in attributes.items())
    return Opaque(prototype, tuple(children))


def held_objects(value: Any) -> list[Any]:
    """What a call's arguments hold besides tensors, numbers and strings, outside of other objects, in order."""
    leaves = pytree.tree_leaves(dict(value) if isinstance(value, Bound) else value)
    return [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and type(leaf) not in LITERALS]


def object_paths(template: Template, path: str = "") -> list[str]:
    """Where they are."""
    match template:
        case Constant(value) if type(value) not in LITERALS:
            return [path]
        case Tree(_, children):
            names = child_names(template)
            return [p for i, c in enumerate(children) for p in object_paths(c, path + names.get(i, f"[{i}]"))]
        case Opaque():
            return [path]
    return []


def copies_in(template: Template, value: Any) -> Iterator[Any]:
    """The objects that `unflatten` made anew for `value`."""
    match template:
        case Tree(_, children):
            for child, leaf in zip(children, pytree.tree_leaves(value), strict=True):
                yield from copies_in(child, leaf)
        case Opaque(_, attributes):
            yield value
            for name, child in attributes:
                yield from copies_in(child, getattr(value, name))


def unflatten(template: Template, tensors: Sequence[Any], given: Any = None) -> Any:
    """Fill `template` with `tensors`, and with what is in the call's arguments."""
    match template:
        case Slot(index):
            return tensors[index]
        case Kept(place):
            return place.of(given)
        case Constant(value):
            return value
        case Tree(spec, children):
            return pytree.tree_unflatten([unflatten(child, tensors, given) for child in children], spec)
        case Opaque(prototype, attributes):
            result = _shallow(prototype)
            for name, child in attributes:
                object.__setattr__(result, name, unflatten(child, tensors, given))
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
        case Constant(_):
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
        case Slot(_):
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


def _tensor_attributes(node: Any, depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH or isinstance(node, (type, torch.nn.Module)) or callable(node):
        return {}
    if dataclasses.is_dataclass(node):
        values = {f.name: getattr(node, f.name, None) for f in dataclasses.fields(node)}
    else:
        values = dict(getattr(node, "__dict__", {}))
    return {name: value for name, value in values.items() if _holds_tensor(value, depth + 1)}


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    leaves, _ = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return bool(_tensor_attributes(value, depth))
    return depth <= MAX_DEPTH and any(_holds_tensor(leaf, depth + 1) for leaf in leaves)
