"""Finding a small program in a graph, and putting a fused op or an op's parts in its place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import fx

from passes.alias import is_compute

from .fused import Fused, values_of
from .meaning import Argument, Call, Item, Like, Of
from .normal_form import SAME, orders, same_node


@dataclass(frozen=True)
class Match:
    """Where a program was found.

    Attributes:
        bound: what stands for each of its arguments.
        nodes: the calls that it consists of, each after the one that reads it.
    """

    bound: dict[int, Any] = field(default_factory=dict)
    nodes: tuple[fx.Node, ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(self.bound[position] for position in sorted(self.bound))


def matches(fused: Fused, root: fx.Node) -> Iterator[Match]:
    """The ways in which `root` computes what the fused op means, on arguments that its kernel takes."""
    for found in _matches(fused.program, root, Match(), fused.either_order):
        if fused.takes(*values_of(found.arguments)):
            yield found


def _matches(pattern: Any, value: Any, found: Match, either: bool) -> Iterator[Match]:
    if isinstance(pattern, Argument):
        known = found.bound.get(pattern.position, value)
        if same_node(known) is same_node(value):
            yield Match({pattern.position: value, **found.bound}, found.nodes)
    elif isinstance(pattern, Call):
        node = same_node(value)
        if isinstance(node, fx.Node) and node.target is pattern.target and not node.kwargs:
            started = Match(found.bound, found.nodes if node in found.nodes else (*found.nodes, node))
            for args in orders(node, values_of(node.args), either):
                yield from _match_all(pattern.args, args, started, either)
    elif isinstance(pattern, Of):
        source = found.bound.get(pattern.value.position)
        if isinstance(source, fx.Node) and pattern.read(source.meta["val"]) == value:
            yield found
    elif type(pattern) is type(value) and pattern == value:
        yield found


def _match_all(patterns: tuple[Any, ...], values: tuple[Any, ...], found: Match, either: bool) -> Iterator[Match]:
    if len(patterns) != len(values):
        return
    if not patterns:
        yield found
        return
    for first in _matches(patterns[0], values[0], found, either):
        yield from _match_all(patterns[1:], values[1:], first, either)


def only_reads(nodes: tuple[fx.Node, ...], arguments: tuple[Any, ...], readers: tuple[fx.Node, ...]) -> bool:
    """Whether nobody but `readers` reads `nodes`, nor does what is to take their place."""
    read = {same_node(a) for a in arguments}
    return not any(n in read or not set(readers_of(n)) <= set(readers) for n in nodes)


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a value."""
    for user in node.users:
        yield from readers_of(user) if user.target in SAME else (user,)


def adjacent(nodes: tuple[fx.Node, ...]) -> bool:
    """Whether no other kernel runs between the nodes, given from last to first."""
    return all(next(computes_after(before), None) is after for after, before in pairwise(nodes))


def computes_after(node: fx.Node) -> Iterator[fx.Node]:
    """The kernels after a node, in order."""
    while (node := node.next).op != "root":
        if is_compute(node):
            yield node


def computes_before(node: fx.Node) -> Iterator[fx.Node]:
    """The kernels before a node, latest first."""
    while (node := node.prev).op != "root":
        if is_compute(node):
            yield node


def substitute(fused: Fused, root: fx.Node, arguments: tuple[Any, ...]) -> fx.Node:
    """Put a call of the fused op in the place of `root`."""
    if fused.keeps_name:
        root.target, root.args = fused.op, arguments
        return root
    with root.graph.inserting_before(root):
        new = root.graph.create_node("call_function", fused.op, arguments, name=fused.name)
    new.meta = dict(root.meta)
    root.replace_all_uses_with(new)
    root.graph.erase_node(root)
    return new


def erase_unread(node: fx.Node) -> None:
    """Erase a node that nobody reads any more, save as the same value."""
    for user in list(node.users):
        erase_unread(user)
    node.graph.erase_node(node)


def take_apart(
    node: fx.Node, parts: tuple[Any, ...], name: Callable[[Call], str], like: Callable[[Any], Any] = lambda n: n
) -> None:
    """Put the calls that an op's results come from in its place.

    Args:
        parts: the results, with the node's own arguments as leaves.
        name: of the node for a call.
        like: a node laid out as the given one, for an argument of which nothing else is read.
    """
    graph, made = node.graph, dict[Any, fx.Node]()
    values = dict(zip(parts, node.meta["val"], strict=True))

    def create(part: Call) -> fx.Node:
        new = graph.create_node("call_function", part.target, tuple(map(build, part.args)), name=name(part))
        count = len(part.target._schema.returns)
        value = tuple(values.get(part[i]) for i in range(count)) if count > 1 else values[part]
        new.meta = {**node.meta, "val": value}
        return new

    def build(part: Any) -> Any:
        if isinstance(part, Like):
            return like(part.value)
        if isinstance(part, (Call, Item)) and part not in made:
            made[part] = create(part) if isinstance(part, Call) else item(graph, build(part.call), part.index)
        return made[part] if isinstance(part, (Call, Item)) else part

    with graph.inserting_before(node):
        results = [build(part) for part in reversed(parts)][::-1]
    for user in list(node.users):
        index: Any = user.args[1]
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[index])
        graph.erase_node(user)
    for unread in (node, *(r for r in results if not r.users)):
        graph.erase_node(unread)


def item(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """Result `index` of a node that has several."""
    taken = graph.call_function(operator.getitem, (node, index))
    taken.meta["val"] = node.meta["val"][index]
    return taken
