"""alias: which storage every node's value lives in.

A view costs nothing and keeps its base alive, so liveness is kept per storage. Whether an op returns a view is
read off its schema (`Tensor(a)`), never guessed from names; the few ops whose schema hides it are in a table.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes._torch import WAIT_FOR_COLLECTIVE, HigherOrderOperator, OpOverload, dense_parts, pytree

from .errors import Unsupported
from .ops import FUNCTIONAL

aten = torch.ops.aten

# Ops that return views of their first argument although their schema does not say so.
HIDDEN_VIEWS = frozenset(
    {aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default, aten.unsafe_split.Tensor,
     aten.unsafe_split_with_sizes.default, WAIT_FOR_COLLECTIVE}
)  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """One storage: written by `node` (output `index` of it), or resident throughout when `static`."""

    node: fx.Node
    index: int
    bytes: int
    static: bool


@dataclass(frozen=True)
class Aliases:
    """`of[node]`: the storage of the node's value; for a node that returns several tensors, one each (or None)."""

    of: dict[fx.Node, Storage | tuple[Storage | None, ...] | None]

    def storages(self, node: fx.Node) -> tuple[Storage, ...]:
        """Every storage that the node's value touches."""
        found = self.of.get(node)
        if found is None:
            return ()
        if isinstance(found, Storage):
            return (found,)
        return tuple(dict.fromkeys(s for s in found if s is not None))


def alias(graph: fx.Graph) -> Aliases:
    """Group the values of a joint graph by storage.

    Raises:
        Unsupported: a node writes to its arguments, or calls something whose aliasing is unknown.
    """
    result = Aliases({})
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            result.of[node] = Storage(node, 0, _storage_bytes(node.meta.get("val")), static=True)
        elif node.op == "call_function":
            result.of[node] = _of_call(node, result)
    return result


def is_view(node: fx.Node) -> bool:
    """Whether the node only returns views of its arguments (`getitem` on a view's list included)."""
    if node.op != "call_function" or node.target in FUNCTIONAL:
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return aliased_argument(node) is not None


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments into which a call of an op writes."""
    for i, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (t for t in pytree.tree_leaves(written) if isinstance(t, torch.Tensor))


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def is_compute(node: fx.Node) -> bool:
    """Whether the node runs a kernel that writes memory of its own."""
    return node.op == "call_function" and node.target is not operator.getitem and not is_view(node)


def device_of(node: fx.Node) -> torch.device:
    """Where the node's value lives; the CPU for a node without tensors."""
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def _of_call(node: fx.Node, known: Aliases) -> Storage | tuple[Storage | None, ...] | None:
    value = node.meta.get("val")
    if node.target is operator.getitem:
        parent, index = node.args
        assert isinstance(parent, fx.Node) and isinstance(index, int)
        found = known.of.get(parent)
        return found[index] if isinstance(found, tuple) else found
    source = aliased_argument(node)
    if source is not None:
        found = known.of[source]
        if isinstance(value, (list, tuple)):
            base = found if isinstance(found, Storage) else None
            return tuple(base for _ in value)
        return found
    if isinstance(value, torch.Tensor):
        return Storage(node, 0, _storage_bytes(value), static=False)
    if isinstance(value, (list, tuple)):
        wanted = output_mask(node, len(value))
        return tuple(
            Storage(node, i, _storage_bytes(v), static=False) if isinstance(v, torch.Tensor) and wanted[i] else None
            for i, v in enumerate(value)
        )
    return None


def output_mask(node: fx.Node, count: int) -> tuple[bool, ...]:
    """Which results a backward kernel computes; some shape rules show a tensor for the others too."""
    schema = getattr(node.target, "_schema", None)
    for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
        if argument.name == "output_mask" and isinstance(value, (list, tuple)) and len(value) == count:
            return tuple(bool(v) for v in value)
    return (True,) * count


def aliased_argument(node: fx.Node) -> fx.Node | None:
    """The argument that the node's result is a view of, or None."""
    target = node.target
    if isinstance(target, HigherOrderOperator) or not isinstance(target, OpOverload):
        if target is operator.getitem or not isinstance(target, HigherOrderOperator):
            return None
        raise Unsupported(
            f"higher-order op {target}", node.name, "its memory and randomness cannot be seen from outside",
            "Write it as ordinary ops (flex_attention -> scaled_dot_product_attention), or keep it out of the model.",
        )  # fmt: skip
    if target in HIDDEN_VIEWS:
        return _first_node(node.args)
    position, name, writes = _aliased(target)
    if writes:
        raise Unsupported(
            f"in-place op {target}", node.name, "it survived functionalization, so its order is part of its meaning",
            "Use the out-of-place form.",
        )  # fmt: skip
    if position is None:
        return None
    value: Any = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return _first_node((value,))


@functools.cache
def _aliased(target: OpOverload) -> tuple[int | None, str, bool]:
    """The argument that an op's result is a view of, by position and name, and whether the op writes to any.

    `Tensor(a)` in, `Tensor(a)` out; a list of views shows only on the argument: `Tensor(a -> *)`.
    """
    arguments = target._schema.arguments
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    found = ((i, a.name, writes) for i, a in enumerate(arguments) if a.alias_info is not None)
    return next(found, (None, "", writes))


def _first_node(args: Any) -> fx.Node | None:
    return next(_nodes(args), None)


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)


def _storage_bytes(value: Any) -> int:
    parts = dense_parts(value) if isinstance(value, torch.Tensor) else ()
    return sum(int(part.untyped_storage().nbytes()) for part in parts)
