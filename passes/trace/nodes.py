"""One mutable thing that a forward could change: what it held, whether it differs now, and how it is put back."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from passes._torch import outside_tracing

from .expected import held_by

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


class Missing:
    """What stands in a place that does not exist."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


@dataclass
class Node:
    """One mutable thing: how it is reached, and what it held.

    Attributes:
        path: as the user writes it (`self.block.seen`).
        name: the attribute, global or variable that holds it, by which code refers to it.
        kind: "attributes", "items", "generator", "tensor", "array", "iterator", "variable", ...
        of_hook: whether modules' hooks alone reach it.
    """

    owner: Any
    path: str
    name: str
    kind: str
    take: Callable[[], Any]
    give: Callable[[Any], None]
    content: Any = field(init=False)
    of_hook: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.content = self.take()

    def refresh(self) -> None:
        """A tensor's version counts on when its data is put back; a cache that was cleared stays empty."""
        if self.kind in ("tensor", "cache"):
            self.content = self.take()


@dataclass(frozen=True)
class Change:
    """One place whose value differs from the snapshot's; `key` is where the node holds it (`MISSING`: it is all)."""

    node: Node
    path: str
    name: str
    before: Any
    after: Any
    key: Any = MISSING


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the same data."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def refill(container: Any, content: Any) -> None:
    """Give a container its content back; at no moment, not even for an interrupt, is what it held and holds missing.

    By the methods of Python's own type: a class derived from it (`Counter`) may add up, or do otherwise.
    """
    kinds = (k for k in (list, bytearray, deque, OrderedDict, dict, set) if isinstance(container, k))
    kind: Any = next(kinds, type(container))
    if kind in (list, bytearray):
        kind.__setitem__(container, slice(None), content)
        return
    if kind is deque:
        kind.extend(container, content)
        while kind.__len__(container) > len(content):
            kind.popleft(container)
        return
    if kind is set:
        set.update(container, content)
        set.intersection_update(container, content)
        return
    for key, value in content.items():
        kind.__setitem__(container, key, value)
    held = held_by(container) if isinstance(container, dict) else container
    for extra in [k for k in held if k not in content]:
        kind.__delitem__(container, extra)
    if isinstance(container, dict) and list(held_by(container)) != list(content):
        for key in content:
            kind.__setitem__(container, key, kind.pop(container, key))


def identical(now: Any, before: Any) -> bool:
    """The same object, or an equal plain value."""
    return now is before or (type(now) is type(before) and isinstance(now, PLAIN) and (now == before or now != now))


def same(now: Any, before: Any) -> bool:
    """As `identical`; a tuple by its items, a fresh bound method by what it binds."""
    if identical(now, before):
        return True
    if isinstance(now, types.MethodType) and type(before) is type(now):
        return now == before
    return type(now) is type(before) is tuple and len(now) == len(before) and all(map(same, now, before))


def alike(now: Any, before: Any, depth: int = 0) -> bool:
    """Whether two values are built equally; tensors count as equal where their shapes and types are."""
    if same(now, before) or depth > 6:
        return True
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return now.shape == before.shape and now.dtype == before.dtype
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        return list(now) == list(before) and all(alike(now[k], before[k], depth + 1) for k in now)
    if isinstance(now, (list, tuple, deque)):
        return len(now) == len(before) and all(alike(a, b, depth + 1) for a, b in zip(now, before, strict=True))
    if isinstance(now, (set, frozenset)):
        return len(now) == len(before)
    held, was = getattr(now, "__dict__", None), getattr(before, "__dict__", None)
    return held is not None and was is not None and alike(dict(held), dict(was), depth + 1)


def tensors_of(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """The tensors of a tensor, or of a container and those in it, which may hold themselves."""
    if isinstance(value, torch.Tensor) or depth > 6:
        return [value] if isinstance(value, torch.Tensor) else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return [tensor for part in parts for tensor in tensors_of(part, depth + 1)]


def changed(change: Change) -> bool:
    """Whether the place of this change differs from the snapshot now."""
    with outside_tracing():
        found = node_changes(change.node, same)
        return any(c.path == change.path or change.node.kind == "names" for c in found)


def put(change: Change, value: Any) -> None:
    """Leave a value in the place of this change."""
    content = value
    if change.key is not MISSING:
        content = change.node.take()
        content[change.key] = value
        if value is MISSING:
            del content[change.key]
    change.node.give(content)


def node_changes(node: Node, alike: Callable[[Any, Any], bool]) -> Iterator[Change]:
    """How one node differs from what was taken of it; what torch keeps for itself counts where all is put back."""
    now, before = node.take(), node.content
    ignored = () if alike is identical else kept_by_torch(node.owner)
    if isinstance(before, dict) and node.kind in ("attributes", "variable", "items", "names"):
        for key in dict.fromkeys([*before, *now]):
            a, b = now.get(key, MISSING), before.get(key, MISSING)
            if key not in ignored and not (identical if node.kind == "names" else alike)(a, b):
                yield change_of(node, key, b, a)
        if node.kind == "items" and now.keys() == before.keys() and list(now) != list(before):
            yield Change(node, node.path, node.name, before, now)
    elif isinstance(before, list) and isinstance(now, list):
        if len(now) != len(before) or not all(map(alike, now, before)):
            yield Change(node, node.path, node.name, before, now)
    elif not _equal(now, before):
        yield Change(node, node.path, node.name, before, now)


def change_of(node: Node, key: Any, before: Any, after: Any) -> Change:
    """The change of what a node holds at a key."""
    if node.name in ("_modules", "_parameters", "_buffers"):
        return Change(node, f"{node.path.rpartition('.')[0]}.{key}", str(key), before, after, key)
    if node.kind == "items":
        return Change(node, f"{node.path}[{key!r}]", node.name, before, after, key)
    path = f"{node.path}{key}" if node.kind == "variable" else f"{node.path}.{key}"
    return Change(node, path, str(key), before, after, key)


def kept_by_torch(owner: Any) -> tuple[str, ...]:
    """Attributes that a module or context of torch's sets for itself."""
    if isinstance(owner, torch.autocast):  # what was so before the block
        return ("prev", "prev_fastdtype", "prev_cache_enabled")
    own = isinstance(owner, nn.RNNBase)  # its list of its weights
    return ("_flat_weights", "_flat_weight_refs") if own else ()


def _equal(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_equal(now[k], before[k]) for k in now)
    if type(now).__module__ == "numpy" and hasattr(now, "tobytes"):
        return now.dtype == before.dtype and now.shape == before.shape and now.tobytes() == before.tobytes()
    if isinstance(now, (tuple, list)):
        return len(now) == len(before) and all(map(_equal, now, before))
    return bool(now == before)


class Walk(Protocol):
    """What collects the nodes."""

    seen: dict[int, Any]
    met_again: dict[int, list[tuple[str, str]]]  # by ids, the paths and names by which it was to be visited once more
    registered: frozenset[int]  # ids of the model's own modules and parameters

    def add(self, node: Node) -> Node:
        """Keep a node."""

    def follow(self, values: Iterable[tuple[Any, str, str]]) -> None:
        """Visit further values, each with its path and the name that code has for it."""

    def follow_last(self, values: Iterable[tuple[Any, str, str]]) -> None:
        """Visit these after all others, and not many of them: they may be of any size."""

    def follow_hooks(self, values: Iterable[tuple[Any, str, str]]) -> None:
        """Visit these after all others."""
