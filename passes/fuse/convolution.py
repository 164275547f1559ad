"""A convolution's backward as two ops: the weight's gradient first, then the input's.

`aten.convolution_backward` computes both, one after the other, and is handed the convolution's input for both.
Apart, with the same kernels and the same bits, the input may go once the weight's gradient is there: of it the
other half needs the shape alone. ATen has no op that takes the shape, so a view of something that is resident
anyway and large enough stands for it, as an expanded scalar does in `torch.nn.grad.conv2d_input` (which a kernel
may copy out to its full size).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes.memory import span

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
GRADIENT, INPUT, WEIGHT, MASK = 0, 1, 2, 10  # places of arguments


def split_convolutions(graph: fx.Graph) -> None:
    """Split each `convolution_backward` that computes the input's and another gradient, if it is worth it.

    That is where the input is larger than the weight: two calls prepare the weight twice.
    """
    nodes = [n for n in graph.nodes if n.target is CONVOLUTION_BACKWARD]
    read = [n.args[WEIGHT] for n in nodes if n.args[MASK][0] and n.args[WEIGHT].op == "placeholder"]
    weights = list(dict.fromkeys(read))
    for node in nodes:
        numels = [node.args[place].meta["val"].numel() for place in (INPUT, WEIGHT)]
        if node.args[MASK][0] and any(node.args[MASK][1:]) and numels[0] > numels[1]:
            _split(graph, node, weights)


def _split(graph: fx.Graph, node: fx.Node, weights: list[fx.Node]) -> None:
    mask: Any = node.args[MASK]
    with graph.inserting_before(node):
        rest = _part(graph, node, [False, *mask[1:]], "weight")
        of_input = _part(graph, node, [True, False, False], "input")
    for item in list(node.users):
        assert item.target is operator.getitem
        item.update_arg(0, of_input if item.args[1] == 0 else rest)
    graph.erase_node(node)
    _let_input_go(graph, of_input, weights)


def _part(graph: fx.Graph, node: fx.Node, mask: list[bool], name: str) -> fx.Node:
    arguments = (*node.args[:MASK], mask)
    part = graph.create_node("call_function", CONVOLUTION_BACKWARD, arguments, name=f"{node.name}_{name}")
    part.meta = dict(node.meta)
    part.meta["val"] = tuple(v if wanted else None for v, wanted in zip(node.meta["val"], mask, strict=True))
    return part


def _let_input_go(graph: fx.Graph, part: fx.Node, weights: list[fx.Node]) -> None:
    """Hand the op a stand-in of the input's shape: what it reads anyway, or a weight that some convolution reads."""
    source: Any = part.args[INPUT]
    value = source.meta["val"]
    if source.op == "placeholder":
        return  # resident in any case
    candidates: Any = (part.args[GRADIENT], part.args[WEIGHT], *weights)
    for other in candidates:
        if _covers(other.meta["val"], value):
            sizes, strides = list(value.shape), list(value.stride())
            with graph.inserting_before(part):
                view = graph.call_function(torch.ops.aten.as_strided.default, (other, sizes, strides))
            view.meta = {**part.meta, "val": other.meta["val"].as_strided(sizes, strides)}
            part.update_arg(INPUT, view)
            return


def _covers(other: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a dense tensor's memory can be looked at in the shape and layout of `value`."""
    if other.dtype != value.dtype or other.device != value.device:
        return False
    return other.numel() == span(other) and other.numel() >= span(value)
