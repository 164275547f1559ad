"""The fused ops, each with all that the planner knows of it, and the ATen ops that are split.

With a large vocabulary the logits are the largest buffer of a step, and eager holds four of that size: the logits, the
log-probabilities, their gradient and the logits'. One op for the backward's two kernels leaves out the third, and
its result can take the place of the log-probabilities. Where the caller does not hold the logits through the backward,
the loss is computed from them without whole log-probabilities, and the gradient takes the logits' place.

Where one weight is embedding and head, its gradient at the backward's end is a sum of two tables: the second is never
whole. Nor is the mask of a dropout as numbers. A residual network's `relu(x + y)` costs one reading of what it sums.

`aten._native_batch_norm_legit_functional` finds out about its input and normalizes it, and the first takes most of the
time on a CPU. The statistics are a few numbers a channel, which the backward needs anyway and which are therefore kept,
so that computing the result again need not find them again. A relu, or a sum and a relu, that follow at once are
computed with the result: the memory is gone through once.

`aten.convolution_backward` computes the input's gradient and the weight's, one after the other, and is handed the
convolution's input for both. Apart, with the same kernels and the same bits, the input may be freed once the weight's
gradient is there: of it the other half needs the shape alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes._torch import OpOverload
from passes.memory import span
from passes.run import kernels

from .fused import Fused, IgnoredArguments, Split, register, values_of
from .meaning import Like, call, dtype_of, rows_of, targets

aten = torch.ops.aten
planner = torch.ops.planner
Tensor = torch.Tensor

UNROUNDED = frozenset({torch.float32, torch.float64})  # smaller types are rounded in between


def _on_cpu(*tensors: Tensor | None) -> bool:
    return all(t is None or t.device.type == "cpu" for t in tensors)


def _rows(values: Tensor, *_: Any) -> bool:
    """Whether a tensor is dense `[rows, classes]`."""
    return values.dim() == 2 and values.is_contiguous()


def _alike(first: Tensor, second: Tensor) -> bool:
    """Whether both are dense, laid out alike and of one type, on the CPU.

    A CUDA kernel turns masks into numbers as it reads them, and how it sums an embedding's rows was not looked at.
    """
    same = first.shape == second.shape and first.stride() == second.stride() and first.dtype == second.dtype
    return same and first.numel() == span(first) and _on_cpu(first, second)


def is_large(values: Tensor, *_: Any) -> bool:
    """Whether there are several blocks of it."""
    return _bytes(values) > kernels.SMALLEST_BLOCK


def _bytes(values: Tensor, *_: Any) -> int:
    return values.numel() * values.element_size()


def _block_bytes(values: Tensor, *_: Any) -> int:
    rows, width = values.shape
    return int(min(rows, kernels.rows_per_block(values)) * width * values.element_size())


def _block_of_all(values: Tensor, *_: Any) -> int:
    return _block_bytes(values.view(-1, 1))


def _block_of_planes(values: Tensor, *_: Any) -> int:
    batch, channels = values.shape[:2]
    count = kernels.planes_per_block(values, kernels.SMALLEST_BLOCK)
    planes = count // channels * channels if count >= channels else count
    return _bytes(values) * min(planes, batch * channels) // (batch * channels)


# Cross-entropy -----------------------------------------------------------------------------------------------------

LOGITS = "Tensor logits, Tensor target, int reduction, int ignore_index"


def _classes(logits: Tensor, *_: Any) -> bool:
    """Whether a tensor is dense `[rows, classes]` of several classes: the kernel names targets 0 and 1."""
    return _rows(logits) and logits.shape[1] > 1


def _cross_entropy(logits: Any, target: Any, reduction: Any, ignore_index: Any) -> Any:
    rows = call(aten._log_softmax.default, logits, 1, False)
    return call(aten.nll_loss_forward.default, rows, target, None, reduction, ignore_index)


def _cross_entropy_backward(gradient: Any, log_probabilities: Any, *rest: Any) -> Any:
    picked = call(aten.nll_loss_backward.default, gradient, log_probabilities, *rest)
    dtype = dtype_of(log_probabilities)
    return call(aten._log_softmax_backward_data.default, picked, log_probabilities, 1, dtype)


def _cross_entropy_logits_backward(gradient: Any, logits: Any, target: Any, *rest: Any) -> Any:
    rows = call(aten._log_softmax.default, logits, 1, False)
    picked = call(aten.nll_loss_backward.default, gradient, rows, target, None, *rest)
    return call(aten._log_softmax_backward_data.default, picked, rows, 1, dtype_of(logits))


def _cross_entropy_workspace(logits: Tensor, *_: Any) -> int:
    """A block, and for each row its number, its target as a mask and its log-probability."""
    return _block_bytes(logits) + int(logits.shape[0]) * (8 + 1 + logits.element_size())


CROSS_ENTROPY = Fused(
    "cross_entropy", f"({LOGITS}) -> (Tensor, Tensor)", kernels.cross_entropy, _cross_entropy, when=_classes,
    workspace=_cross_entropy_workspace,
)  # fmt: skip
CROSS_ENTROPY_BACKWARD = Fused(
    "cross_entropy_backward",
    "(Tensor gradient, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction, int ignore_index, "
    "Tensor total_weight) -> Tensor",
    kernels.cross_entropy_backward, _cross_entropy_backward,
    when=lambda gradient, log_probabilities, *_: _rows(log_probabilities), pays=lambda *_: True,
    workspace=lambda gradient, log_probabilities, *_: _block_bytes(log_probabilities), donates=(1,), rowwise=True,
    intermediates=1,
)  # fmt: skip
CROSS_ENTROPY_LOGITS_BACKWARD = Fused(
    "cross_entropy_logits_backward", f"(Tensor gradient, {LOGITS}, Tensor total_weight) -> Tensor",
    kernels.cross_entropy_logits_backward, _cross_entropy_logits_backward,
    when=lambda gradient, logits, *_: _classes(logits),
    workspace=lambda gradient, logits, *_: 2 * _block_bytes(logits), donates=(1,), checks_owner=True,
)  # fmt: skip


# Sums and masks ----------------------------------------------------------------------------------------------------


def _embedding_backward_add(gradient: Any, indices: Any, padding_idx: Any, other: Any) -> Any:
    table = call(aten.embedding_dense_backward.default, gradient, indices, rows_of(other), padding_idx, False)
    return call(aten.add.Tensor, other, table)


def _adds_to_a_table(gradient: Tensor, indices: Tensor, padding_idx: int, other: Tensor) -> bool:
    return _rows(other) and gradient.dtype == other.dtype and _on_cpu(gradient, indices, other)


def _embedding_workspace(gradient: Tensor, indices: Tensor, padding_idx: int, other: Tensor) -> int:
    """A block and one row more, and the indices."""
    return _block_bytes(other) + int(other.shape[1]) * other.element_size() + _bytes(indices)


def _masks(values: Tensor, mask: Tensor) -> bool:
    contiguous = values.shape == mask.shape and values.is_contiguous() and mask.is_contiguous()
    return contiguous and mask.dtype is torch.bool and values.is_floating_point() and _on_cpu(values, mask)


def _drops(values: Tensor, p: float) -> bool:
    return values.dtype in UNROUNDED and 0 < p < 1 and values.is_contiguous() and _on_cpu(values)


EMBEDDING_BACKWARD_ADD = Fused(
    "embedding_backward_add", "(Tensor gradient, Tensor indices, int padding_idx, Tensor other) -> Tensor",
    kernels.embedding_backward_add, _embedding_backward_add, when=_adds_to_a_table,
    pays=lambda gradient, indices, padding_idx, other: is_large(other), workspace=_embedding_workspace, donates=(3,),
    either_order=True,
)  # fmt: skip
DROPOUT = Fused(
    "dropout", "(Tensor values, float p) -> (Tensor, Tensor)", kernels.dropout,
    lambda values, p: call(aten.native_dropout.default, values, p, True), when=_drops, pays=is_large, keeps_name=True,
    workspace=_block_of_all,
)  # fmt: skip
MUL_MASK = Fused(
    "mul_mask", "(Tensor values, Tensor mask) -> Tensor", kernels.mul_mask,
    lambda values, mask: call(aten.mul.Tensor, values, mask), when=_masks, pays=is_large, either_order=True,
    backward_only=True, workspace=_block_of_all, donates=(0,),
)  # fmt: skip
ADD_RELU = Fused(
    "add_relu", "(Tensor first, Tensor second) -> Tensor", kernels.add_relu,
    lambda first, second: call(aten.relu.default, call(aten.add.Tensor, first, second)), when=_alike, pays=is_large,
    donates=(0, 1),
)  # fmt: skip


# Batch norm --------------------------------------------------------------------------------------------------------

WITH_RUNNING, ALONE = aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats
BATCH_NORMS = (WITH_RUNNING, ALONE, aten.batch_norm.default, aten.native_batch_norm.default)
NORM = "Tensor values, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd"

BATCH_NORM_STATISTICS = Fused(
    "batch_norm_statistics",
    "(Tensor values, Tensor running_mean, Tensor running_var, float momentum, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    kernels.batch_norm_statistics, workspace=_bytes,
    ignores=IgnoredArguments(frozenset({1, 2}), None, frozenset({0, 1})),
)  # fmt: skip
BATCH_NORM_MOMENTS = Fused(
    "batch_norm_moments", "(Tensor values, float eps) -> (Tensor, Tensor)", kernels.batch_norm_moments,
    workspace=_bytes,
)  # fmt: skip
BATCH_NORM = Fused("batch_norm", f"({NORM}) -> Tensor", kernels.batch_norm)


def _batch_norm(*arguments: Any) -> Any:
    return call(planner.batch_norm.default, *arguments)


BATCH_NORM_RELU = Fused(
    "batch_norm_relu", f"({NORM}) -> Tensor", kernels.batch_norm_relu,
    lambda *arguments: call(aten.relu.default, _batch_norm(*arguments)), pays=lambda *_: True, adjacent=True,
)  # fmt: skip
BATCH_NORM_ADD_RELU = Fused(
    "batch_norm_add_relu", f"({NORM}, Tensor other) -> Tensor", kernels.batch_norm_add_relu,
    lambda *arguments: call(aten.relu.default, call(aten.add.Tensor, _batch_norm(*arguments[:5]), arguments[5])),
    when=lambda values, weight, bias, mean, invstd, other: _alike(values, other), pays=is_large, adjacent=True,
    workspace=_block_of_planes, donates=(5,),
)  # fmt: skip

FUSED = (
    CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_LOGITS_BACKWARD, EMBEDDING_BACKWARD_ADD, DROPOUT, MUL_MASK,
    BATCH_NORM_STATISTICS, BATCH_NORM_MOMENTS, BATCH_NORM, BATCH_NORM_ADD_RELU, BATCH_NORM_RELU, ADD_RELU,
)  # fmt: skip
for _fused in FUSED:
    register(_fused)


def _with_running(
    values: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: Any, momentum: Any, eps: Any
) -> tuple[Any, ...]:
    found = call(BATCH_NORM_STATISTICS.op, values, mean, variance, momentum, eps)
    return _batch_norm(values, weight, bias, found[0], found[1]), *(found[i] for i in range(4))


def _without_running(
    values: Any, weight: Any, bias: Any, training: Any, momentum: Any, eps: Any
) -> tuple[Any, ...]:
    found = call(BATCH_NORM_MOMENTS.op, values, eps)
    return _batch_norm(values, weight, bias, found[0], found[1]), found[0], found[1]


def _normalizes(training: int) -> Any:
    """Anything that is not contiguous is normalized by another formula (Normalization.cpp)."""

    def when(*arguments: Any) -> bool:
        tensors = [a for a in arguments[:training] if isinstance(a, Tensor)]
        alike = all(t.dtype == tensors[0].dtype and t.is_contiguous() for t in tensors)
        return arguments[training] is True and alike and tensors[0].dtype in UNROUNDED and _on_cpu(*tensors)

    return when


# A convolution's backward ------------------------------------------------------------------------------------------

CONVOLUTION_BACKWARD = aten.convolution_backward.default
GRADIENT, INPUT, WEIGHT, MASK = 0, 1, 2, 10  # positions of arguments


def halves(gradient: Any, values: Any, *rest: Any) -> tuple[Any, ...]:
    """The input's gradient needs the input's shape alone, as `torch.nn.grad.conv2d_input` shows."""
    mask = rest[-1]
    of_input = call(CONVOLUTION_BACKWARD, gradient, Like(values), *rest[:-1], [True, False, False])
    if not any(mask[1:]):
        return of_input[0], of_input[1], of_input[2]
    others = call(CONVOLUTION_BACKWARD, gradient, values, *rest[:-1], [False, *mask[1:]])
    return of_input[0], others[1], others[2]


def has_input_half(*arguments: Any) -> bool:
    return bool(arguments[MASK][0])


SPLITS = (
    Split(WITH_RUNNING, _with_running, _normalizes(5)),
    Split(ALONE, _without_running, _normalizes(3)),
    Split(CONVOLUTION_BACKWARD, halves, has_input_half),
)

BY_OP: dict[OpOverload, Fused] = {fused.op: fused for fused in FUSED}
SPLIT_BY_OP: dict[OpOverload, Split] = {split.op: split for split in SPLITS}


def workspace_bytes(node: fx.Node) -> int:
    """What a fused op needs besides its arguments and results; 0 for other ops."""
    fused = BY_OP.get(node.target)  # type: ignore[call-overload]
    return fused.workspace(*values_of(node.args)) if fused else 0


def op_names(target: OpOverload) -> tuple[OpOverload, ...]:
    """The ops that a call may be named by: itself, what it stands for, and what it is a part of."""
    fused = BY_OP.get(target)
    inner = targets(fused.program) if fused else ()
    return tuple(dict.fromkeys((target, *(name for op in inner for name in op_names(op)), *_wholes(target))))


def _wholes(target: OpOverload) -> tuple[OpOverload, ...]:
    parts = (BATCH_NORM_STATISTICS.op, BATCH_NORM_MOMENTS.op, BATCH_NORM.op)
    return BATCH_NORMS if target in (*BATCH_NORMS, *parts) else ()
