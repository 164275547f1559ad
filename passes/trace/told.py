"""What a graph traced with symbols says about each node of the same graph at any sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes._torch import FakeTensor, pytree, symbolic

from .capture import Traced
from .notation import At, Departed, Items, Look, Size, look_of, written

aten = torch.ops.aten


@dataclass(frozen=True)
class Told:
    """What a node of the graph is: its arguments, and how its values look; None where no size decides."""

    arguments: Any
    looks: Any


@dataclass(frozen=True)
class _Node:
    index: int


@dataclass(frozen=True)
class _Value:
    look: Look
    offset: Any
    nbytes: Any


def tell(module: fx.GraphModule, traced: Traced) -> tuple[Told, ...]:
    """What each node is, the ones that compute sizes left out, in the order of the graph traced at one size."""
    numbers: dict[fx.Node, Any] = {}
    result: list[Told] = []
    expected = list(traced.pristine.nodes)
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if symbolic(value):
            numbers[node] = written(value, look_of)
            continue
        if isinstance(value, (bool, int)) and node.op == "call_function":
            numbers[node] = value
            continue
        like = expected[len(result)] if len(result) < len(expected) else None
        arguments = list(node.args), node.kwargs
        if (whole := _whole(node)) and like is not None and like.target is aten.alias.default:
            arguments = [node.args[0]], {}
        elif whole and not (like is not None and _whole(like) == whole):
            numbers[node] = numbers[node.args[int(node.target is aten.slice_scatter.default)]]
            continue
        elif like is None or (node.op, node.target) != (like.op, like.target):
            raise Departed(f"{node.name} is not traced without symbols")
        numbers[node] = _Node(len(result))
        if node.op == "get_attr" and not _same_constant(module, traced.graph_module, node, like):
            raise Departed(f"{node.name} is another constant")
        result.append(Told(_tell_arguments(arguments, numbers), _tell_value(value)))
    if len(result) < len(expected):
        raise Departed("there are more ops without symbols")
    return tuple(result)


def _whole(node: fx.Node) -> tuple[Any, ...]:
    """The op and the dimension of a slice of all there is, which torch leaves out where it knows the size.

    The gradient of one is another, and so is what is written to one. Empty for any other node.
    """
    dims: dict[Any, int] = {aten.slice.Tensor: 1, aten.slice_backward.default: 2, aten.slice_scatter.default: 2}
    at = dims.get(node.target)
    if at is None or node.kwargs or tuple(node.args[at + 1 :]) not in ((0, _END), (0, _END, 1)):
        return ()
    return node.target, node.args[at]


_END = 2**63 - 1


def _tell_arguments(value: Any, numbers: Mapping[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, slice):
        return Items(slice, tuple(_tell_arguments(part, numbers) for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return Items(dict, tuple((key, _tell_arguments(part, numbers)) for key, part in value.items()))
    if isinstance(value, (tuple, list)):
        kind = tuple if isinstance(value, tuple) else list
        return Items(kind, tuple(_tell_arguments(part, numbers) for part in value))
    return written(value, look_of) if symbolic(value) else value


def _tell_value(value: Any) -> Any:
    """How a node's value looks; None where no size decides."""
    told = _tell_tensors(value)
    return told if _sized(told) else None


def _tell_tensors(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        offset, nbytes = (written(n, look_of) for n in (value.storage_offset(), value.untyped_storage().nbytes()))
        return _Value(look_of(value), offset, nbytes)
    if isinstance(value, (tuple, list)):
        return Items(tuple if isinstance(value, tuple) else list, tuple(map(_tell_tensors, value)))
    return value


def _sized(told: Any) -> bool:
    match told:
        case Size():
            return True
        case Items(_, parts):
            return any(map(_sized, parts))
        case _Value(look, offset, nbytes):
            return any(map(_sized, (look.shape, look.strides, offset, nbytes)))
    return False


def at_sizes(told: Any, at: At, nodes: Sequence[fx.Node], mode: Any) -> Any:
    match told:
        case Size():
            return at.number(told)
        case _Node(index):
            return nodes[index]
        case _Value(look, offset, nbytes):
            meta = torch.empty(0, dtype=look.dtype, device="meta")
            memory = torch.UntypedStorage(at.number(nbytes), device="meta")
            meta.set_(memory, at.number(offset), at.numbers(look.shape), at.numbers(look.strides))
            return FakeTensor(mode, meta, look.device)
        case Items(kind, parts):
            if kind is dict:
                return {key: at_sizes(part, at, nodes, mode) for key, part in parts}
            found = [at_sizes(part, at, nodes, mode) for part in parts]
            return slice(*found) if kind is slice else kind(found)
    return told


def check_same(graph: fx.Graph, traced: Traced, like: Traced) -> None:
    """The graph is the one traced, node by node."""
    said = [(t.outputs, t.mutated, t.num_outputs, t.notes, t.repeated, t.input_names) for t in (traced, like)]
    if said[0] != said[1]:
        raise Departed("two traces differ")
    for node, told in zip(traced.pristine.nodes, graph.nodes, strict=True):
        if difference := differs(node, told):
            raise Departed(f"{node.name} differs: {difference}")
        if node.op == "get_attr" and not _same_constant(traced.graph_module, like.graph_module, node, told):
            raise Departed(f"{node.name} is another constant")


def differs(a: fx.Node, b: fx.Node) -> str:
    """What is not the same about two nodes of two graphs, in words; "" where nothing is."""
    if (a.op, a.target, a.name) != (b.op, b.target, b.name):
        return f"{a.format_node()} and {b.format_node()}"
    if repr((a.args, a.kwargs)) != repr((b.args, b.kwargs)):
        return f"the arguments {a.args} {a.kwargs} and {b.args} {b.kwargs}"
    looks = [repr(pytree.tree_map(_describe, node.meta.get("val"))) for node in (a, b)]
    return "" if looks[0] == looks[1] else f"the values {looks[0]} and {looks[1]}"


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (
        type(value), tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device,
        value.requires_grad, value.untyped_storage().nbytes(),
    )  # fmt: skip


def _same_constant(a: fx.GraphModule, b: fx.GraphModule, one: fx.Node, other: fx.Node) -> bool:
    first, second = getattr(a, str(one.target)), getattr(b, str(other.target))
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return first is second
    return first is second or (first.dtype == second.dtype and torch.equal(first, second))
