"""A batch norm in training as two ops: its statistics, and what these make of its input.

`aten._native_batch_norm_legit_functional` finds out about its input and normalizes it, and the first takes most of the
time on a CPU. The statistics are a few numbers a channel, which the backward needs anyway and which are therefore kept,
so that computing the result again need not find them again. A relu, or a sum and a relu, that follow at once are
computed with the result: the memory is gone through once.

Where both ops run one after the other, as they do in the forward, ATen's one op stands for them (`whole`); a rewrite
puts it there, and the proof (`passes.verify`) knows what it stands for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from passes.alias import is_compute
from passes.run import kernels

from .library import (
    ADD_RELU,
    BATCH_NORM,
    BATCH_NORM_ADD_RELU,
    BATCH_NORM_MOMENTS,
    BATCH_NORM_RELU,
    BATCH_NORM_STATISTICS,
)

aten = torch.ops.aten
WITH_RUNNING, ALONE = aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats
# An op that normalizes -> what it does to the result.
FOLLOWED: dict[Any, Any] = {
    BATCH_NORM.default: None,
    BATCH_NORM_RELU.default: aten.relu.default,
    BATCH_NORM_ADD_RELU.default: ADD_RELU.default,
}
STATISTICS = frozenset({BATCH_NORM_STATISTICS.default, BATCH_NORM_MOMENTS.default})


def statistics(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """The op that finds the statistics of a whole batch norm in training, and its arguments; None for other calls.

    Result `i` of it is result `i + 1` of the batch norm.
    """
    if target is WITH_RUNNING and args[5] is True:
        return BATCH_NORM_STATISTICS.default, (args[0], args[3], args[4], args[6], args[7])
    if target is ALONE and args[3] is True:
        return BATCH_NORM_MOMENTS.default, (args[0], args[5])
    return None


def split_batch_norms(graph: fx.Graph) -> None:
    """Split batch norms on the CPU that are large enough for the kernels of `passes.run.kernels` to be worth it."""
    for node in list(graph.nodes):
        found = statistics(node.target, node.args)
        if found is not None and _known(node):
            _split(graph, node, *found)
    for target in (aten.relu.default, ADD_RELU.default):
        for node in graph.find_nodes(op="call_function", target=target):
            _join(graph, node)


def _known(node: fx.Node) -> bool:
    """Anything that is not contiguous is normalized by another formula (Normalization.cpp)."""
    given = [a.meta["val"] for a in node.args[:5] if isinstance(a, fx.Node)]
    value = given[0]
    return bool(
        value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64)
        and all(g.dtype == value.dtype and g.is_contiguous() for g in given)
        and value.numel() * value.element_size() > kernels.SMALLEST_BLOCK
    )  # fmt: skip


def _split(graph: fx.Graph, node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    results = node.meta["val"]
    with graph.inserting_before(node):
        found = graph.create_node("call_function", target, arguments, name="batch_norm_statistics")
        found.meta = {**node.meta, "val": tuple(results[1:])}
        items = [item(graph, found, i) for i in range(len(results) - 1)]
        normal = graph.create_node("call_function", BATCH_NORM.default, (*node.args[:3], *items[:2]), name="batch_norm")
        normal.meta = {**node.meta, "val": results[0]}
    for user in list(node.users):
        assert user.target is operator.getitem
        index: Any = user.args[1]
        user.replace_all_uses_with(normal if index == 0 else items[index - 1])
        graph.erase_node(user)
    graph.erase_node(node)
    for unread in items:
        if not unread.users:
            graph.erase_node(unread)


def item(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """Result `index` of a node that has several."""
    taken = graph.call_function(operator.getitem, (node, index))
    taken.meta["val"] = node.meta["val"][index]
    return taken


def _join(graph: fx.Graph, node: fx.Node) -> None:
    """Let one op stand for a relu, or a sum with its relu, and the batch norm right before it, which it alone reads."""
    normal, *others = node.args
    assert isinstance(normal, fx.Node)
    if normal.target is not BATCH_NORM.default or len(normal.users) > 1 or normal in others:
        return
    if next(_computes(normal)) is not node:
        return
    target = next(joined for joined, follower in FOLLOWED.items() if follower is node.target)
    with graph.inserting_before(node):
        joined = graph.create_node("call_function", target, (*normal.args, *others), name=_name(target))
    joined.meta = dict(node.meta)
    node.replace_all_uses_with(joined)
    graph.erase_node(node)
    graph.erase_node(normal)


def _name(target: Any) -> str:
    return str(target.overloadpacket.__name__)


def _computes(node: fx.Node) -> Iterator[fx.Node]:
    """The kernels after a node, in order."""
    while (node := node.next).op != "root":
        if is_compute(node):
            yield node


def belong_together(found: fx.Node, normal: fx.Node) -> bool:
    """Whether `normal` normalizes the values whose statistics are `found`."""
    if normal.target not in FOLLOWED or normal.args[0] is not found.args[0]:
        return False
    return all(
        isinstance(a, fx.Node) and a.target is operator.getitem and a.args == (found, i)
        for i, a in enumerate(normal.args[3:5])
    )


def whole(graph: fx.Graph, found: fx.Node, normal: fx.Node, resolve: Callable[[Any], Any]) -> tuple[fx.Node, fx.Node]:
    """ATen's op for both, as nodes of `graph`: the batch norm, whose result `i + 1` is result `i` of `found`, and the
    value of `normal`, in the memory of the batch norm's first result.
    """
    weight, bias = normal.args[1:3]
    values, *rest = found.args
    arguments: tuple[Any, ...]
    if found.target is BATCH_NORM_STATISTICS.default:
        mean, variance, momentum, eps = rest
        target, arguments = WITH_RUNNING, (values, weight, bias, mean, variance, True, momentum, eps)
    else:
        target, arguments = ALONE, (values, weight, bias, True, 0.0, *rest)
    norm = graph.call_function(target, tuple(resolve(a) if isinstance(a, fx.Node) else a for a in arguments))
    norm.meta["val"] = (normal.meta["val"], *found.meta["val"])
    result = item(graph, norm, 0)
    if normal.target is BATCH_NORM_RELU.default:
        result = graph.call_function(aten.relu_.default, (result,))
    elif normal.target is BATCH_NORM_ADD_RELU.default:
        result = graph.call_function(ADD_RELU.out, (result, resolve(normal.args[5])), {"out": result})
    result.meta["val"] = normal.meta["val"]
    return norm, result
