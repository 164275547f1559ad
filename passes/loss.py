"""The backward of a cross-entropy in one op, without a buffer as large as the logits.

Autograd runs it as two kernels: `nll_loss_backward` fills a tensor of the logits' size with zeros but for one entry a
row, and `_log_softmax_backward_data` turns that into the logits' gradient. Both treat each row by itself, so running
them on blocks of rows gives the same bits; and because the second reads a row before it writes it, its result can
go where the log-probabilities were. With a large vocabulary this is the largest buffer of a step, saved for nothing.

The op is registered as `planner::cross_entropy_backward`. Source: ATen's LossNLL.cpp and SoftMax.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

aten = torch.ops.aten
BLOCKS = 16
SMALLEST_BLOCK = 1 << 20

LIBRARY = torch.library.Library("planner", "FRAGMENT")
ARGUMENTS = (
    "Tensor gradient, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction, int ignore_index, "
    "Tensor total_weight"
)
LIBRARY.define(f"cross_entropy_backward({ARGUMENTS}) -> Tensor")
LIBRARY.define(f"cross_entropy_backward.out({ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")


def cross_entropy_backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient with respect to the logits, `[rows, classes]`, of `nll_loss(log_softmax(logits, 1), target)`.

    Arguments are those of `aten.nll_loss_backward`; `out` may be `log_probabilities`.
    """
    result = torch.empty_like(log_probabilities) if out is None else out
    rows = log_probabilities.shape[0]
    size = rows_per_block(log_probabilities)
    for first in range(0, rows, size):
        block = slice(first, first + size)
        of_rows = gradient[block] if reduction == 0 else gradient
        picked = aten.nll_loss_backward.default(
            of_rows, log_probabilities[block], target[block], weight, reduction, ignore_index, total_weight
        )
        aten._log_softmax_backward_data.out(
            picked, log_probabilities[block], 1, log_probabilities.dtype, out=result[block]
        )
        del picked  # before the next block's is made
    return result


def rows_per_block(log_probabilities: torch.Tensor) -> int:
    """A sixteenth of the rows, but no less than what a MiB holds."""
    rows, classes = log_probabilities.shape
    row_bytes = max(1, classes * log_probabilities.element_size())
    return max(1, -(-rows // BLOCKS), SMALLEST_BLOCK // row_bytes)


def workspace_bytes(log_probabilities: torch.Tensor) -> int:
    """What one block needs."""
    rows, classes = log_probabilities.shape
    return min(rows, rows_per_block(log_probabilities)) * classes * log_probabilities.element_size()


LIBRARY.impl("cross_entropy_backward", cross_entropy_backward, "CompositeExplicitAutograd")
LIBRARY.impl("cross_entropy_backward.out", cross_entropy_backward, "CompositeExplicitAutograd")
OP = torch.ops.planner.cross_entropy_backward


def merge_cross_entropy(graph: fx.Graph) -> None:
    """Let one op stand for each pair of backward kernels of a cross-entropy over `[rows, classes]`."""
    for node, picked in list(_pairs(graph)):
        with graph.inserting_before(node):
            merged = graph.create_node("call_function", OP.default, picked.args, name="cross_entropy_backward")
        merged.meta = dict(node.meta)
        node.replace_all_uses_with(merged)
        graph.erase_node(node)
        graph.erase_node(picked)


def _pairs(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    for node in graph.nodes:
        if node.target is not aten._log_softmax_backward_data.default:
            continue
        picked, log_probabilities, dim, dtype = node.args
        if not isinstance(picked, fx.Node) or picked.target is not aten.nll_loss_backward.default:
            continue
        value = node.meta["val"]
        alike = value.dim() == 2 and dim in (1, -1) and value.is_contiguous() and dtype == value.dtype
        source = _undetached(log_probabilities)
        if alike and len(picked.users) == 1 and _undetached(picked.args[1]) is source and _fits(source, value):
            yield node, picked


def _fits(log_probabilities: fx.Node, value: torch.Tensor) -> bool:
    before = log_probabilities.meta["val"]
    return before.dtype == value.dtype and before.shape == value.shape and before.is_contiguous()


def _undetached(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    while value.target in (aten.detach.default, aten.alias.default):
        source = value.args[0]
        assert isinstance(source, fx.Node)
        value = source
    return value
