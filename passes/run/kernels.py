"""Some of autograd's work on blocks: the same bits, less memory. Needs torch alone: exports hold a copy.

`F.cross_entropy(logits, target)` over `[rows, classes]` is four kernels: `_log_softmax`, `nll_loss_forward`, and in the
backward `nll_loss_backward`, which fills a tensor of the logits' size with zeros except for one entry a row, and
`_log_softmax_backward_data`. All but the sum in the second treat each row by itself, so blocks of rows give the same
bits, and what a block needs lives in the cache. Source: ATen's LossNLL.cpp and SoftMax.cpp.

The gradient of an embedding whose weights are used elsewhere too (a language model's tied head) is a table that is
added to another: each row of it sums what belongs to that row, in order, so blocks of rows do (Embedding.cpp). And a
product with a mask, as in dropout (Dropout.cpp), first turns the whole mask into numbers (TensorIterator.cpp); here one
block at a time. A residual network's sums go through the memory once instead of twice.

A batch norm is two things: statistics, of which the backward needs little, and a product and a sum for each element,
with which its result can be had again for a fraction of the time (batch_norm_kernel.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .tensors import held_once

aten = torch.ops.aten
BLOCKS = 16
SMALLEST_BLOCK = 1 << 20
NORM_BLOCK = 8 << 20  # handing over a block of a batch norm takes longer


def rows_per_block(values: torch.Tensor) -> int:
    """A sixteenth of the rows of `[rows, classes]`, but no less than what a MiB holds."""
    rows, classes = values.shape
    row_bytes = max(1, classes * values.element_size())
    return max(1, -(-rows // BLOCKS), SMALLEST_BLOCK // row_bytes)


def _blocks(values: torch.Tensor) -> Iterator[slice]:
    size = rows_per_block(values)
    return (slice(first, first + size) for first in range(0, values.shape[0], size))


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`nll_loss_forward(log_softmax(logits, 1), target, None, ...)`: the loss and the number of targets that count.

    Only each row's own log-probability is kept, as a tensor of one class; targets are renamed to fit: 0 for a valid
    one, and whatever is out of range stays out of range, so that it raises as usual.

    Args:
        logits: `[rows, classes]`, of at least two classes.
        target: `[rows]`, int64.
        reduction: 0 none, 1 mean, 2 sum.

    Raises:
        IndexError: a target is out of range.
    """
    classes = logits.shape[1]
    valid = (target >= 0).logical_and_(target < classes)
    index = target.masked_fill(valid.logical_not(), 0).unsqueeze_(1)
    picked = torch.empty_like(index, dtype=logits.dtype)
    for block in _blocks(logits):
        torch.gather(aten._log_softmax.default(logits[block], 1, False), 1, index[block], out=picked[block])
    renamed = target.masked_fill(valid, 0)
    ignored = 1 if 0 <= ignore_index < classes else ignore_index
    renamed.masked_fill_(target == ignore_index, ignored)
    loss, total_weight = aten.nll_loss_forward.default(picked, renamed, None, reduction, ignored)
    return loss, total_weight


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
    for block in _blocks(log_probabilities):
        _backward(
            gradient[block] if reduction == 0 else gradient, log_probabilities[block], target[block], weight,
            reduction, ignore_index, total_weight, result[block],
        )  # fmt: skip
    return result


def cross_entropy_logits_backward(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    *,
    over: torch.Tensor | None = None,
) -> torch.Tensor:
    """`cross_entropy_backward` from the logits: a block's log-probabilities are computed again and dropped.

    Args:
        over: the logits, where nobody needs them any more. The result takes their memory if it is nobody else's;
            whoever took the logits from the model and still holds them keeps them as they are.
    """
    result = over if over is not None and held_once(over) else torch.empty_like(logits)
    for block in _blocks(logits):
        _backward(
            gradient[block] if reduction == 0 else gradient, aten._log_softmax.default(logits[block], 1, False),
            target[block], None, reduction, ignore_index, total_weight, result[block],
        )  # fmt: skip
    return result


def _backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    out: torch.Tensor,
) -> None:
    picked = aten.nll_loss_backward.default(
        gradient, log_probabilities, target, weight, reduction, ignore_index, total_weight
    )
    aten._log_softmax_backward_data.out(picked, log_probabilities, 1, log_probabilities.dtype, out=out)


def embedding_backward_add(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int,
    other: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`other + embedding_dense_backward(gradient, indices, rows, padding_idx, False)`.

    A block's own indices are counted from its first row; all others go to one row more, which is its padding.

    Args:
        gradient: `[*indices.shape, width]`.
        other: `[rows, width]`; `out` may be it.
    """
    result = torch.empty_like(other) if out is None else out
    for block in _blocks(other):
        count = min(block.stop, other.shape[0]) - block.start
        local = indices - block.start
        outside = (local < 0).logical_or_(local >= count)
        if padding_idx >= 0:
            outside.logical_or_(indices == padding_idx)
        local.masked_fill_(outside, count)
        del outside
        found = aten.embedding_dense_backward.default(gradient, local, count + 1, count, False)
        torch.add(other[block], found[:count], out=result[block])
        del found, local  # before the next block's are made
    return result


def mul_mask(values: torch.Tensor, mask: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`values * mask`, both contiguous and of one shape, the mask bool; `out` may be `values`."""
    result = torch.empty_like(values) if out is None else out
    for _ in _masked(values, mask, result):
        pass
    return result


def dropout(
    values: torch.Tensor, p: float, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout(values, p, True)` of contiguous values, 0 < p < 1: the result and the mask of what was kept."""
    mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1.0 - p, generator=generator)
    result = torch.empty_like(values)
    for block in _masked(values, mask, result):
        block.mul_(1.0 / (1.0 - p))
    return result, mask


def _masked(values: torch.Tensor, mask: torch.Tensor, out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Write `values * mask` block by block; each is given while it is in the cache."""
    flat, bits, written = values.view(-1, 1), mask.view(-1, 1), out.view(-1, 1)
    for block in _blocks(flat):
        yield torch.mul(flat[block], bits[block], out=written[block])


def add_relu(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`relu(first + second)`, both dense and laid out alike; `out` may be either of them.

    The sum is still in the cache when its negative part is cut off.
    """
    result = torch.empty_like(first) if out is None else out
    a, b, written = (t.as_strided((t.numel(), 1), (1, 1)) for t in (first, second, result))
    for block in _blocks(a):
        torch.add(a[block], b[block], out=written[block]).relu_()
    return result


def batch_norm_statistics(
    values: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor, momentum: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a batch norm in training finds out about `values`, `[batch, channels, *]`.

    ATen's op for it has another result, rounded at another place: the whole batch norm runs and its result is dropped.

    Returns:
        Mean, reciprocal standard deviation, and the new running mean and variance, `[channels]` each.
    """
    found = aten._native_batch_norm_legit_functional.default(
        values, None, None, running_mean, running_var, True, momentum, eps
    )
    return found[1], found[2], found[3], found[4]


def batch_norm_moments(values: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`batch_norm_statistics` where none are kept: mean and reciprocal standard deviation."""
    found = aten._native_batch_norm_legit.no_stats(values, None, None, True, 0.0, eps)
    return found[1], found[2]


def batch_norm(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> torch.Tensor:
    """The result of a batch norm in training from its statistics; `values` contiguous, all of one type.

    ATen makes a factor `invstd * weight` and a summand `bias - mean * factor` for each channel. With the factor as
    weight and a variance of 1, its kernel for evaluation makes the same summand and works with the same numbers.
    """
    result = torch.empty_like(values)
    _normalize(values, _factor(weight, invstd), bias, mean, result)
    return result


def batch_norm_relu(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> torch.Tensor:
    """`relu(batch_norm(...))`, a block at a time."""
    result, factor = torch.empty_like(values), _factor(weight, invstd)
    for samples, channels in _planes(values, NORM_BLOCK):
        block = result[samples, channels]
        _normalize(values[samples, channels], factor[channels], _part(bias, channels), mean[channels], block)
        block.relu_()
    return result


def batch_norm_add_relu(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    other: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`relu(batch_norm(...) + other)`, a block at a time; `out` may be `other`."""
    result, factor = torch.empty_like(values) if out is None else out, _factor(weight, invstd)
    for samples, channels in _planes(values, SMALLEST_BLOCK):
        normal = torch.empty_like(values[samples, channels])
        _normalize(values[samples, channels], factor[channels], _part(bias, channels), mean[channels], normal)
        torch.add(normal, other[samples, channels], out=result[samples, channels]).relu_()
        del normal  # before the next block's is made
    return result


def _factor(weight: torch.Tensor | None, invstd: torch.Tensor) -> torch.Tensor:
    return invstd if weight is None else invstd * weight


def _part(bias: torch.Tensor | None, channels: slice) -> torch.Tensor | None:
    return None if bias is None else bias[channels]


def _normalize(
    values: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None, mean: torch.Tensor, out: torch.Tensor
) -> None:
    variance, unused = torch.ones_like(mean), values.new_empty(0)
    aten.native_batch_norm.out(
        values, factor, bias, mean, variance, False, 0.0, 0.0, out=out, save_mean=unused, save_invstd=unused
    )


def planes_per_block(values: torch.Tensor, block_bytes: int) -> int:
    """How many planes of `[batch, channels, *]` make a block."""
    plane = max(1, values.numel() // max(1, values.shape[0] * values.shape[1])) * values.element_size()
    return max(1, block_bytes // plane)


def _planes(values: torch.Tensor, block_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of whole samples, or of one sample's channels: each is contiguous."""
    batch, channels = values.shape[:2]
    count = planes_per_block(values, block_bytes)
    if count >= channels:
        for first in range(0, batch, count // channels):
            yield slice(first, first + count // channels), slice(0, channels)
        return
    for sample in range(batch):
        for first in range(0, channels, count):
            yield slice(sample, sample + 1), slice(first, first + count)
