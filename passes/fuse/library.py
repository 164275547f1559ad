"""The kernels of `passes.run.kernels` as ops of the library `planner`, and the memory that they need while they run."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from passes.run import kernels

LIBRARY = torch.library.Library("planner", "FRAGMENT")
LOGITS = "Tensor logits, Tensor target, int reduction, int ignore_index"
BACKWARD = (
    "Tensor gradient, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction, int ignore_index, "
    "Tensor total_weight"
)
LOGITS_BACKWARD = f"Tensor gradient, {LOGITS}, Tensor total_weight"
EMBEDDING = "Tensor gradient, Tensor indices, int padding_idx, Tensor other"
MASK = "Tensor values, Tensor mask"
SUM = "Tensor first, Tensor second"
STATISTICS = "Tensor values, Tensor running_mean, Tensor running_var, float momentum, float eps"
NORM = "Tensor values, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd"
OUT = "*, Tensor(a!) out"

for _name, _schema, _kernel in (
    ("cross_entropy", f"({LOGITS}) -> (Tensor, Tensor)", kernels.cross_entropy),
    ("cross_entropy_backward", f"({BACKWARD}) -> Tensor", kernels.cross_entropy_backward),
    ("cross_entropy_backward.out", f"({BACKWARD}, {OUT}) -> Tensor(a!)", kernels.cross_entropy_backward),
    ("cross_entropy_logits_backward", f"({LOGITS_BACKWARD}) -> Tensor", kernels.cross_entropy_logits_backward),
    ("cross_entropy_logits_backward.over", f"({LOGITS_BACKWARD}, *, Tensor(a!) over) -> Tensor",
     kernels.cross_entropy_logits_backward),
    ("embedding_backward_add", f"({EMBEDDING}) -> Tensor", kernels.embedding_backward_add),
    ("embedding_backward_add.out", f"({EMBEDDING}, {OUT}) -> Tensor(a!)", kernels.embedding_backward_add),
    ("mul_mask", f"({MASK}) -> Tensor", kernels.mul_mask),
    ("mul_mask.out", f"({MASK}, {OUT}) -> Tensor(a!)", kernels.mul_mask),
    ("dropout", "(Tensor values, float p) -> (Tensor, Tensor)", kernels.dropout),
    ("add_relu", f"({SUM}) -> Tensor", kernels.add_relu),
    ("add_relu.out", f"({SUM}, {OUT}) -> Tensor(a!)", kernels.add_relu),
    ("batch_norm_statistics", f"({STATISTICS}) -> (Tensor, Tensor, Tensor, Tensor)", kernels.batch_norm_statistics),
    ("batch_norm_moments", "(Tensor values, float eps) -> (Tensor, Tensor)", kernels.batch_norm_moments),
    ("batch_norm", f"({NORM}) -> Tensor", kernels.batch_norm),
    ("batch_norm_relu", f"({NORM}) -> Tensor", kernels.batch_norm_relu),
    ("batch_norm_add_relu", f"({NORM}, Tensor other) -> Tensor", kernels.batch_norm_add_relu),
    ("batch_norm_add_relu.out", f"({NORM}, Tensor other, {OUT}) -> Tensor(a!)", kernels.batch_norm_add_relu),
):  # fmt: skip
    LIBRARY.define(_name + _schema, tags=(torch.Tag.nondeterministic_seeded,) if _name == "dropout" else ())
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")

CROSS_ENTROPY = torch.ops.planner.cross_entropy
CROSS_ENTROPY_BACKWARD = torch.ops.planner.cross_entropy_backward
CROSS_ENTROPY_LOGITS_BACKWARD = torch.ops.planner.cross_entropy_logits_backward
EMBEDDING_BACKWARD_ADD = torch.ops.planner.embedding_backward_add
MUL_MASK = torch.ops.planner.mul_mask
DROPOUT = torch.ops.planner.dropout
ADD_RELU = torch.ops.planner.add_relu
BATCH_NORM_STATISTICS = torch.ops.planner.batch_norm_statistics
BATCH_NORM_MOMENTS = torch.ops.planner.batch_norm_moments
BATCH_NORM = torch.ops.planner.batch_norm
BATCH_NORM_RELU = torch.ops.planner.batch_norm_relu
BATCH_NORM_ADD_RELU = torch.ops.planner.batch_norm_add_relu

_TRACED_NORMS = (
    torch.ops.aten._native_batch_norm_legit_functional.default, torch.ops.aten._native_batch_norm_legit.no_stats,
)  # fmt: skip
BATCH_NORMS = (*_TRACED_NORMS, torch.ops.aten.batch_norm.default, torch.ops.aten.native_batch_norm.default)
# What else a forward op is called where ATen's ops are named: what ours stand for, and what is traced as another op.
STANDS_FOR: dict[OpOverload, tuple[OpOverload, ...]] = {
    CROSS_ENTROPY.default: (torch.ops.aten._log_softmax.default, torch.ops.aten.nll_loss_forward.default),
    DROPOUT.default: (torch.ops.aten.native_dropout.default,),
    ADD_RELU.default: (torch.ops.aten.add.Tensor, torch.ops.aten.relu.default),
    **dict.fromkeys(_TRACED_NORMS, BATCH_NORMS),
    BATCH_NORM_STATISTICS.default: BATCH_NORMS,
    BATCH_NORM_MOMENTS.default: BATCH_NORMS,
    BATCH_NORM.default: BATCH_NORMS,
    BATCH_NORM_RELU.default: (*BATCH_NORMS, torch.ops.aten.relu.default),
    BATCH_NORM_ADD_RELU.default: (*BATCH_NORMS, torch.ops.aten.add.Tensor, torch.ops.aten.relu.default),
}


def workspace_bytes(node: fx.Node) -> int:
    """What one block needs besides the op's inputs and results; 0 for other ops."""
    if node.target is CROSS_ENTROPY_BACKWARD.default:
        return _block_bytes(_value(node.args[1]))
    if node.target is CROSS_ENTROPY_LOGITS_BACKWARD.default:
        return 2 * _block_bytes(_value(node.args[1]))
    if node.target is CROSS_ENTROPY.default:  # for each row its number, its target as a mask and its log-probability
        logits = _value(node.args[0])
        return _block_bytes(logits) + int(logits.shape[0]) * (8 + 1 + logits.element_size())
    if node.target is EMBEDDING_BACKWARD_ADD.default:  # one row more, and the indices
        indices, other = _value(node.args[1]), _value(node.args[3])
        row = int(other.shape[1]) * other.element_size()
        return _block_bytes(other) + row + indices.numel() * indices.element_size()
    if node.target in (BATCH_NORM_STATISTICS.default, BATCH_NORM_MOMENTS.default):
        return _bytes(_value(node.args[0]))
    if node.target is BATCH_NORM_ADD_RELU.default:
        return _block_of_planes(_value(node.args[0]))
    masked = node.target in (MUL_MASK.default, DROPOUT.default)
    return _block_bytes(_value(node.args[0]).view(-1, 1)) if masked else 0


def _block_bytes(values: torch.Tensor) -> int:
    rows, width = values.shape
    return int(min(rows, kernels.rows_per_block(values)) * width * values.element_size())


def _block_of_planes(values: torch.Tensor) -> int:
    batch, channels = values.shape[:2]
    count = kernels.planes_per_block(values, kernels.SMALLEST_BLOCK)
    planes = count // channels * channels if count >= channels else count
    return _bytes(values) * min(planes, batch * channels) // (batch * channels)


def _bytes(values: torch.Tensor) -> int:
    return values.numel() * values.element_size()


def _value(node: object) -> torch.Tensor:
    assert isinstance(node, fx.Node)
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
