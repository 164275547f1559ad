"""The cross-entropy kernels of `passes.cross_entropy` as ops of the library `planner`, and what they need.

- `planner::cross_entropy_backward`, from the log-probabilities, which its result may take the place of;
- `planner::cross_entropy` and `planner::cross_entropy_logits_backward`, where the log-probabilities are never whole.
"""

from __future__ import annotations

import torch
from torch import fx

from . import cross_entropy as kernels

LIBRARY = torch.library.Library("planner", "FRAGMENT")
LOGITS = "Tensor logits, Tensor target, int reduction, int ignore_index"
BACKWARD = (
    "Tensor gradient, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction, int ignore_index, "
    "Tensor total_weight"
)
LOGITS_BACKWARD = f"Tensor gradient, {LOGITS}, Tensor total_weight"

for _name, _schema, _kernel in (
    ("cross_entropy", f"({LOGITS}) -> (Tensor, Tensor)", kernels.cross_entropy),
    ("cross_entropy_backward", f"({BACKWARD}) -> Tensor", kernels.cross_entropy_backward),
    ("cross_entropy_backward.out", f"({BACKWARD}, *, Tensor(a!) out) -> Tensor(a!)", kernels.cross_entropy_backward),
    ("cross_entropy_logits_backward", f"({LOGITS_BACKWARD}) -> Tensor", kernels.cross_entropy_logits_backward),
    ("cross_entropy_logits_backward.over", f"({LOGITS_BACKWARD}, *, Tensor(a!) over) -> Tensor",
     kernels.cross_entropy_logits_backward),
):  # fmt: skip
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")

FORWARD = torch.ops.planner.cross_entropy
OP = torch.ops.planner.cross_entropy_backward
FROM_LOGITS = torch.ops.planner.cross_entropy_logits_backward


def workspace_bytes(node: fx.Node) -> int:
    """What one block needs besides the op's inputs and results; 0 for other ops."""
    if node.target is OP.default:
        return _block_bytes(node.args[1])
    if node.target is FROM_LOGITS.default:
        return 2 * _block_bytes(node.args[1])
    return _block_bytes(node.args[0]) + _bytes_per_row(node.args[0]) if node.target is FORWARD.default else 0


def _block_bytes(node: object) -> int:
    values = _value(node)
    rows, classes = values.shape
    return min(rows, kernels.rows_per_block(values)) * classes * values.element_size()


def _bytes_per_row(node: object) -> int:
    """A row's number, its target as a mask and its log-probability."""
    values = _value(node)
    return int(values.shape[0]) * (8 + 1 + values.element_size())


def _value(node: object) -> torch.Tensor:
    assert isinstance(node, fx.Node)
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
