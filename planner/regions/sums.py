"""sums: regions that would add up a gradient in another order than the plain step stay eager."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from passes.run.tensors import nodes_behind
from passes.trace.templates import argument_path

from .hollow import Hollow, Run

OTHER_SUM = (
    "its input {name!r} is read more than once in it, and by code that comes after it: the gradient would be summed in "
    "another order than the plain step's"
)

LEFT_OUT = (
    "its input {name!r} is read more than once in it, and perhaps by equal modules that this step leaves out (layer "
    "drop): where they run, too, the gradient would be summed in another order than the plain step's. Plan a step in "
    "which they run (another seed), or name their parts as regions"
)

START_OF_BACKWARD = (
    "its input {name!r} is read more than once in it, and is an output that the backward may start from: the gradient "
    "would be summed in another order than the plain step's. Give the loss (loss_fn=), or return less"
)

CHANGED_VIEW = (
    "a result of it is changed in place, and is a view that it reads, too: the gradient would be summed in another "
    "order than the plain step's"
)

CHANGED_SHARED = (
    "a result of it is changed in place, and another one shares its memory: the gradient of that would not follow the "
    "change. Change a clone() of it"
)

SHARED_CAST = (
    "its parameter {name!r} has other uses, and autocast casts it once for all of them: the gradients of the uses "
    "would be added up in another type than the plain step's"
)


def refuse_sums(hollow: Hollow, outputs: Sequence[torch.Tensor], wanted: Collection[int]) -> bool:
    """Leave to eager regions that would add up a gradient in another order; whether any of them is new.

    Args:
        wanted: the outputs that the backward starts from.
    """
    called = [node for node in hollow.nodes if hasattr(node, "owner")]  # other batches' losses may come from any
    nodes = list(nodes_behind(outputs, called))
    starts = [get_gradient_edge(outputs[i])[:2] for i in wanted]
    regions = [node for node in nodes if isinstance(getattr(node, "owner", None), Run)]
    new = _refuse_other_sums(hollow, nodes, regions, starts)
    return _refuse_sums_of_the_left_out(hollow, regions) or new


def _refuse_other_sums(hollow: Hollow, nodes: Sequence[Any], regions: Sequence[Any], starts: Sequence[Any]) -> bool:
    """Leave to eager regions that sum a part of a gradient which the plain step adds, term by term, to others.

    Autograd runs what was recorded last first, so that terms from a later reader come before the region's own, and
    first of all what the backward starts with.
    """
    casters: dict[tuple[Any, int], int] = Counter()
    latest: dict[tuple[Any, int], float] = dict.fromkeys(starts, math.inf)
    for node in nodes:
        for edge in (_to_stand_in(hollow, edge) for edge in node.next_functions):
            latest[edge] = max(latest.get(edge, 0), node._sequence_nr())
            casters[edge] += type(node).__name__ == "ToCopyBackward0"
    for node in regions:
        casters.update(node.next_functions[1:][i] for i in node.owner.part.casts)
    new = False
    for run in hollow.runs:
        if run.views.changed:
            new = hollow.parts.refuse(run.path, CHANGED_VIEW) or new
        if run.overlapping.changed:
            new = hollow.parts.refuse(run.path, CHANGED_SHARED) or new
    for node in regions:
        part, edges = node.owner.part, node.next_functions[1:]  # without the token's
        for i, name in part.casts.items():
            if casters[edges[i]] > 1:
                new = hollow.parts.refuse(node.owner.path, SHARED_CAST.format(name=name)) or new
        for i, name in part.sums.items():
            if edges[i][0] is not None and latest[edges[i]] > node._sequence_nr():
                why = START_OF_BACKWARD if latest[edges[i]] == math.inf else OTHER_SUM
                new = hollow.parts.refuse(node.owner.path, why.format(name=argument_path(name))) or new
    return new


def _to_stand_in(hollow: Hollow, edge: Any) -> Any:
    """The same edge; to a parameter of the model's that code holds elsewhere, the one to what the step has for it."""
    stand_in = hollow.stand_ins.get(id(getattr(edge[0], "variable", None)))
    return edge if stand_in is None or not stand_in.requires_grad else get_gradient_edge(stand_in)[:2]


def _refuse_sums_of_the_left_out(hollow: Hollow, regions: Sequence[Any]) -> bool:
    """Leave to eager what would sum a part of a gradient in a course in which modules that are equal to it run, too.

    Whether they would read the same tensor shows where several of them run. Where a single one does, they may, save for
    its first argument, which is what the one before it has returned.
    """
    left_out = {
        _role(f"{path}.{name}" if name else path)
        for path, m in hollow.candidates.items() if path not in hollow.called for name, _ in m.named_modules()
    }
    regions = [node for node in regions if _role(node.owner.path) in left_out]
    runs = Counter(_role(node.owner.path) for node in regions)
    readers = Counter((edge, _role(node.owner.path)) for node in regions for edge in set(node.next_functions[1:]))
    new = False
    for node in regions:
        part, edges, role = node.owner.part, node.next_functions[1:], _role(node.owner.path)
        for i in (i for i in part.sums if i >= len(part.traced.state) and edges[i][0] is not None):
            may_be_shared = runs[role] == 1 and i > len(part.traced.state)
            if may_be_shared or readers[edges[i], role] > 1:
                new = hollow.parts.refuse(node.owner.path, LEFT_OUT.format(name=argument_path(part.sums[i]))) or new
    return new


def _role(path: str) -> str:
    """What a module has in common with those that are in its place elsewhere: `layers.*.self_attn`."""
    return re.sub(r"\b\d+\b", "*", path)
