"""Ways of writing one value that are not told apart: in the proof, and where a pattern is looked for.

With the meanings and splits of `passes.fuse.records`, and the arguments that an op ignores (`passes.ops`), these are
all that the proof takes as given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# The value of the argument itself.
SAME = frozenset({aten.detach.default, aten.alias.default})
# The first two arguments may change places where both have one shape and layout.
COMMUTES = frozenset({aten.add.Tensor, aten.mul.Tensor})
# Position of a dimension that may be counted from the end.
DIMENSION = {aten._log_softmax.default: 1, aten._log_softmax_backward_data.default: 2}


def same_node(value: Any) -> Any:
    """The node that a value was first computed by."""
    while isinstance(value, fx.Node) and value.target in SAME:
        value = value.args[0]
    return value


def counted_from_front(target: Any, args: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """The arguments with a dimension as a number from 0."""
    place = DIMENSION.get(target)
    if place is None or args[place] >= 0:
        return args
    return (*args[:place], args[place] + rank, *args[place + 1 :])


def may_swap(target: Any, args: tuple[Any, ...], values: list[Any]) -> bool:
    """Whether a call means the same with its first two arguments changed over."""
    if target not in COMMUTES or len(args) != 2 or not all(isinstance(v, torch.Tensor) for v in values):
        return False
    first, second = values
    return bool(first.shape == second.shape and first.stride() == second.stride())


def orders(node: fx.Node, values: list[Any], either: bool) -> Iterator[tuple[Any, ...]]:
    """The arguments of a call, and with `either` the other way to write them."""
    first = values[0] if values else None
    args = counted_from_front(node.target, node.args, first.dim() if isinstance(first, torch.Tensor) else 0)
    yield args
    if either and may_swap(node.target, args, values):
        yield args[::-1]
