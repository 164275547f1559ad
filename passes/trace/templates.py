"""Nested inputs and outputs without their tensors: the templates, and what stands where in one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from passes._torch import pytree
from passes.printable import shown

from .expected import LITERALS

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
    """A registered pytree container (tuple, dict, `ModelOutput`, ...).

    `attributes` are what it holds besides, of which torch's pytree knows nothing.
    """

    spec: Any
    children: tuple[Template, ...]
    attributes: tuple[tuple[str, Template], ...] = ()


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


def object_paths(template: Template, path: str = "") -> list[str]:
    """Where what `structure.held_objects` finds stands."""
    match template:
        case Constant(value) if type(value) not in LITERALS:
            return [path]
        case Tree():
            return [p for name, child in parts(template) for p in object_paths(child, path + name)]
        case Opaque() | Again(_, True):
            return [path]
    return []


def slots(template: Template) -> list[tuple[str, int]]:
    """`(path, tensor index)` of every slot, in order; a path reads like `.loss` or `[0]`."""
    match template:
        case Slot(index):
            return [("", index)]
        case Tree() | Opaque():
            return [(name + path, index) for name, child in parts(template) for path, index in slots(child)]
    return []


def parts(template: Tree | Opaque) -> list[tuple[str, Template]]:
    """What is in it, each with its path there: `[0]`, `['mask']`, `.loss`."""
    found = [(f".{name}", child) for name, child in template.attributes]
    if isinstance(template, Opaque):
        return found
    names = child_names(template)
    return [*((names.get(i, f"[{i}]"), child) for i, child in enumerate(template.children)), *found]


def outline(template: Template) -> dict[str, str]:
    """What stands in every place of a call's arguments, in words; places are named by `argument_path`."""
    return {argument_path(path): text for path, text in _outline(template, "", {})}


def argument_path(path: str) -> str:
    """A path into the bound arguments as the user writes it: `batch.mask` for `['batch'].mask`.

    What is of the model (`carried`) is told as `self.block.hidden`.
    """
    path = re.sub(r"^\['self'\]\['([\w.]+)'\]", r"self.\1", path)
    return re.sub(r"^\['(\w+)'\]", r"\1", path)


def _outline(template: Template, path: str, first: dict[int, str]) -> Iterator[tuple[str, str]]:
    match template:
        case Slot(index):
            same = first.setdefault(index, path)
            yield path, "a tensor" if same == path else f"the same tensor as {argument_path(same)}"
        case Again():
            yield path, "what another place holds, too"
        case Constant(value):
            yield path, shown(value, LONGEST)
        case Tree() | Opaque():
            for name, child in parts(template):
                yield from _outline(child, path + name, first)


def constants(template: Template) -> list[Any]:
    """The values that are the same at every call."""
    match template:
        case Constant(value):
            return [value]
        case Tree() | Opaque():
            return [value for _, child in parts(template) for value in constants(child)]
    return []


def shared(template: Template) -> list[Any]:
    """What all that is rebuilt has in common: constants, and what objects with tensors hold besides them."""
    if not isinstance(template, (Tree, Opaque)):
        return constants(template)
    own = [template.prototype] if isinstance(template, Opaque) else []
    return [*own, *(value for _, child in parts(template) for value in shared(child))]


def child_names(tree: Tree) -> dict[int, str]:
    """The path of each child of a container, by the child's number; empty if its type names none."""
    # tree_unflatten hands the numbers back under their keys, whatever the container is.
    try:
        filled = pytree.tree_unflatten(list(range(len(tree.children))), tree.spec)
    except Exception:  # noqa: BLE001 - its constructor takes no numbers (a PackedSequence)
        return {i: f".{name}" for i, name in enumerate(getattr(tree.spec.context, "_fields", ()))}
    return _names_in(filled)


def _names_in(filled: Any) -> dict[int, str]:
    if isinstance(filled, int):
        return {filled: ""}
    try:
        keyed, _ = pytree.tree_flatten_with_path(filled)
    except ValueError:  # a registered container without `flatten_with_keys_fn` (diffusers' outputs)
        items = filled.items() if isinstance(filled, dict) else ()
        return {i: f".{name}{path}" for name, child in items for i, path in _names_in(child).items()}
    return {leaf: pytree.keystr(path) for path, leaf in keyed}
