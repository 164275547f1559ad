"""Graph passes that let the block-wise kernels of `passes.run.kernels` stand for autograd's.

With a large vocabulary the logits are the largest buffer of a step, and eager holds four of that size: the logits, the
log-probabilities, their gradient and the logits'. One op for the backward's two kernels leaves out the third, and
its result can take the place of the log-probabilities.

The log-probabilities can take the logits' place only where nobody else reads those. A model that returns its logits
beside the loss, as Hugging Face's do, has them read by the caller, after the forward. If the caller does not hold
them through the backward (`keep_outputs=False`), the loss is computed without whole log-probabilities, the logits
are saved in their stead and the gradient takes the logits' place.

Where one weight is embedding and head, its gradient at the backward's end is a sum of two tables: the second is never
whole. Nor is the mask of a dropout as numbers. A residual network's `relu(x + y)` costs one reading of what it sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from passes.alias import aliased_argument, is_view
from passes.memory import span
from passes.run import kernels

from .batch_norm import split_batch_norms
from .library import (
    ADD_RELU,
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_LOGITS_BACKWARD,
    DROPOUT,
    EMBEDDING_BACKWARD_ADD,
    MUL_MASK,
)

aten = torch.ops.aten


def merge_all(graph: fx.Graph) -> None:
    """The passes that hold whatever the caller keeps."""
    merge_cross_entropy(graph)
    add_embedding_gradients(graph)
    mask_in_blocks(graph)
    add_and_relu(graph)
    split_batch_norms(graph)


def merge_cross_entropy(graph: fx.Graph) -> None:
    """Let one op stand for each pair of backward kernels of a cross-entropy over `[rows, classes]`."""
    for node, picked in list(_pairs(graph)):
        with graph.inserting_before(node):
            merged = graph.create_node(
                "call_function", CROSS_ENTROPY_BACKWARD.default, picked.args, name="cross_entropy_backward"
            )
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
        source = _undetached(log_probabilities)
        alike = dim in (1, -1) and dtype == value.dtype and _same_rows(value, source)
        if alike and len(picked.users) == 1 and _undetached(picked.args[1]) is source:
            yield node, picked


def save_logits(graph: fx.Graph, returned: Collection[fx.Node]) -> None:
    """Compute cross-entropies from the logits where those are returned: no whole log-probabilities.

    Args:
        returned: the forward's results whose memory is the caller's once the forward is done, and not planned for.
    """
    roots = {_root(node) for node in returned}
    for merged in graph.find_nodes(op="call_function", target=CROSS_ENTROPY_BACKWARD.default):
        normalize = _undetached(merged.args[1])
        if normalize.target is aten._log_softmax.default and _root(normalize.args[0]) in roots:
            _from_logits(graph, normalize, merged)


def _from_logits(graph: fx.Graph, normalize: fx.Node, merged: fx.Node) -> None:
    gradient, _, target, weight, reduction, ignore_index, total_weight = merged.args
    logits, dim, _ = normalize.args
    picked = next((n for n in normalize.users if n.target is aten.nll_loss_forward.default), None)
    readers = {n for n in _readers(normalize) if n is not merged and n is not picked}
    value = normalize.meta["val"]
    if picked is None or readers or weight is not None or dim not in (1, -1) or value.shape[1] < 2:
        return
    if not _same_rows(value, logits):
        return
    with graph.inserting_before(picked):
        loss = graph.create_node(
            "call_function", CROSS_ENTROPY.default, (logits, target, reduction, ignore_index), name="cross_entropy"
        )
    loss.meta = dict(picked.meta)
    picked.replace_all_uses_with(loss)
    with graph.inserting_before(merged):
        arguments: Any = (gradient, logits, target, reduction, ignore_index, total_weight)
        backward = graph.create_node(
            "call_function", CROSS_ENTROPY_LOGITS_BACKWARD.default, arguments, name="cross_entropy_logits_backward"
        )
    backward.meta = dict(merged.meta)
    merged.replace_all_uses_with(backward)
    for node in (merged, picked):
        graph.erase_node(node)
    _erase_unread(graph, normalize)


def add_embedding_gradients(graph: fx.Graph) -> None:
    """Add the gradient of an embedding to another gradient of its weights without a table of its own."""
    for found in graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default):
        gradient, indices, _, padding_idx, by_frequency = found.args
        total = next(iter(found.users), None)
        if total is None or len(found.users) > 1 or by_frequency or total.target is not aten.add.Tensor:
            continue
        others = [a for a in total.args if a is not found]
        table = found.meta["val"]
        if total.kwargs or len(others) != 1 or not (table.is_contiguous() and _in_blocks(table, others[0])):
            continue
        with graph.inserting_before(total):
            arguments: Any = (gradient, indices, padding_idx, others[0])
            merged = graph.create_node(
                "call_function", EMBEDDING_BACKWARD_ADD.default, arguments, name="embedding_backward_add"
            )
        merged.meta = dict(total.meta)
        total.replace_all_uses_with(merged)
        graph.erase_node(total)
        graph.erase_node(found)


def mask_in_blocks(graph: fx.Graph) -> None:
    """Let dropout and its backward multiply by masks without turning a whole one into numbers."""
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        values, p, train = node.args
        value = node.meta["val"][0]
        exact = value.dtype in (torch.float32, torch.float64)  # smaller types round the scale first
        if exact and train is True and 0 < p < 1 and value.is_contiguous() and _in_blocks(value, values):
            node.target, node.args = DROPOUT.default, (values, p)
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        if node.meta.get("partitioner_tag") != "is_backward" or len(operands) != 2:
            continue
        mask, values = sorted(operands, key=lambda n: n.meta["val"].dtype is not torch.bool)
        value = node.meta["val"]
        if mask.meta["val"].dtype is not torch.bool or not value.is_floating_point():
            continue
        bits = mask.meta["val"]
        contiguous = bits.shape == value.shape and bits.is_contiguous() and value.is_contiguous()
        if not contiguous or not _in_blocks(value, values):
            continue
        with graph.inserting_before(node):
            merged = graph.create_node("call_function", MUL_MASK.default, (values, mask), name="mul_mask")
        merged.meta = dict(node.meta)
        node.replace_all_uses_with(merged)
        graph.erase_node(node)


def add_and_relu(graph: fx.Graph) -> None:
    """Let one op stand for a sum and the relu that alone reads it."""
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        (total,) = node.args
        if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor or len(total.users) > 1:
            continue
        value, operands = node.meta["val"], total.args
        if total.kwargs or not all(_in_blocks(value, a) for a in operands):
            continue
        with graph.inserting_before(node):
            merged = graph.create_node("call_function", ADD_RELU.default, operands, name="add_relu")
        merged.meta = dict(node.meta)
        node.replace_all_uses_with(merged)
        graph.erase_node(node)
        graph.erase_node(total)


def _in_blocks(value: torch.Tensor, source: object) -> bool:
    """Whether both are dense, laid out alike and of one type, and large enough for several blocks, on the CPU.

    A CUDA kernel turns masks into numbers as it reads them, and how it sums an embedding's rows was not looked at.
    """
    if not isinstance(source, fx.Node) or value.device.type != "cpu":
        return False
    before = source.meta["val"]
    alike = before.shape == value.shape and before.stride() == value.stride() and before.dtype == value.dtype
    large = value.numel() * value.element_size() > kernels.SMALLEST_BLOCK
    return bool(alike and large and value.numel() == span(value))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield from _readers(user) if user.target in DETACHES else (user,)


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase_unread(graph, user)
    graph.erase_node(node)


def _same_rows(value: torch.Tensor, source: object) -> bool:
    """Whether both are dense `[rows, classes]` of one type."""
    if not isinstance(source, fx.Node) or value.dim() != 2 or not value.is_contiguous():
        return False
    before = source.meta["val"]
    return bool(before.dtype == value.dtype and before.shape == value.shape and before.is_contiguous())


DETACHES = (aten.detach.default, aten.alias.default)


def _undetached(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    while value.target in DETACHES:
        source = value.args[0]
        assert isinstance(source, fx.Node)
        value = source
    return value


def _root(node: Any) -> fx.Node:
    """The node that wrote the memory of a value."""
    while is_view(node):
        source = aliased_argument(node)
        if source is None:  # one of several views
            source = node.args[0]
        node = source
    assert isinstance(node, fx.Node)
    return node
