"""Ways of writing one value that are not told apart: in the proof, and where a pattern is looked for.

With the meanings and splits of `passes.fuse.records`, and the arguments that an op ignores (`passes.ops`), these are
all that the proof takes as given.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from passes._torch import is_dense

aten = torch.ops.aten

# The value of the argument itself.
SAME = frozenset({aten.detach.default, aten.alias.default})
# What they give is told by where it lies in the memory of the value that they begin from.
VIEWS = SAME | {
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
}  # fmt: skip
COPY = aten.copy.default
# Of their second argument, values alone matter.
SCATTERS = frozenset({
    aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
})  # fmt: skip
# The first two arguments may change places where both have one shape and layout.
COMMUTES = frozenset({aten.add.Tensor, aten.mul.Tensor})
# Position of a dimension that may be counted from the end.
DIMENSION = {aten._log_softmax.default: 1, aten._log_softmax_backward_data.default: 2}


def same_node(value: Any) -> Any:
    """The node that a value was first computed by."""
    while isinstance(value, fx.Node) and value.target in SAME:
        value = value.args[0]
    return value


Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


def geometry(value: torch.Tensor) -> Geometry:
    """Where in its memory a tensor lies."""
    return tuple(value.shape), tuple(value.stride()), int(value.storage_offset())


def is_copied_over(view: Any, source: Any) -> bool:
    """Whether `copy(view, source)` gives the source's value: in the view's layout, which a scatter does not look at."""
    if not isinstance(view, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    looks = [(t.shape, t.dtype, t.device, t.is_conj(), t.is_neg()) for t in (view, source)]
    return looks[0] == looks[1] and not any(looks[0][-2:])


def stand_in(value: Any) -> torch.Tensor | None:
    """A tensor without data that is laid out like a value, from the beginning of its memory; None if it has gaps."""
    if not isinstance(value, torch.Tensor) or not _are_dense(tuple(value.shape), value.stride()):
        return None
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@functools.lru_cache(4096)
def _are_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return bool(is_dense(torch.empty_strided(shape, strides, device="meta")))


def viewed(target: Any, shown: torch.Tensor, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor | None:
    """What one of `VIEWS` gives of a stand-in; None where it gives nothing."""
    try:
        found: torch.Tensor = target(shown, *args, **kwargs)
    except (RuntimeError, IndexError):
        return None
    return found


def shortest(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """A view as the value that it is already, or as its own op on the earliest value that gives the same with it.

    Where each of the views before lies is computed anew: where a dimension has one index, traces disagree on its
    stride, which a kernel may look at all the same.
    """
    chain = [node]
    while chain[-1].target in VIEWS:
        chain.append(_source(chain[-1]))
    root = stand_in(chain[-1].meta["val"]) if len(chain) > 1 else None
    if root is None:
        return node, None
    shown = [root]
    for view in reversed(chain[:-1]):
        found = viewed(view.target, shown[-1], view.args[1:], view.kwargs)
        if found is None:
            return node, None
        shown.append(found)
    own, before = geometry(shown.pop()), list(zip(reversed(chain[1:]), shown, strict=True))
    for earlier, value in before:
        if geometry(value) == own:
            return earlier, None
    for earlier, value in before[:-1]:
        found = viewed(node.target, value, node.args[1:], node.kwargs)
        if found is not None and geometry(found) == own:
            return node, earlier
    return node, None


def _source(view: fx.Node) -> fx.Node:
    source = view.args[0]
    assert isinstance(source, fx.Node)
    return source


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
