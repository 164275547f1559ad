"""What the planner knows about particular ops, as tables: randomness, order-dependence, ties."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten

# Batch norms in training mode read the running statistics only to update them, so results other than the updated
# statistics do not depend on them: op -> (positions of the statistics, position of the training flag or None when the
# op always trains, results that do not depend, or None for all of them).
RUNNING_STATISTICS: dict[Any, tuple[frozenset[int], int | None, frozenset[int] | None]] = {
    aten._native_batch_norm_legit_functional.default: (frozenset({3, 4}), 5, frozenset({0, 1, 2})),
    aten._batch_norm_with_update_functional.default: (frozenset({3, 4}), None, frozenset({0, 1, 2, 3})),
    aten.native_batch_norm_backward.default: (frozenset({3, 4}), 7, None),
    aten.batch_norm_backward.default: (frozenset({3, 4}), 7, None),
    aten.cudnn_batch_norm_backward.default: (frozenset({4, 5}), None, None),
    aten.miopen_batch_norm_backward.default: (frozenset({4, 5}), None, None),
}

# Ops one of whose results is a blob that only their own backward understands: made-up bytes there can crash it, so
# when such a backward is measured its forward is really run.
OPAQUE_RESULTS = frozenset(
    {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_thnn_fused_lstm_cell", "_cudnn_ctc_loss", "_embedding_bag"}
)

# Element-wise ops with an in-place twin that runs the same kernel: where the first argument dies, the twin writes the
# same bits into its memory.
INPLACE: dict[Any, Any] = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, name + "_"), overload)
    for name, overload in (
        ("add", "Tensor"), ("add", "Scalar"), ("sub", "Tensor"), ("sub", "Scalar"), ("mul", "Tensor"),
        ("mul", "Scalar"), ("div", "Tensor"), ("div", "Scalar"), ("neg", "default"), ("relu", "default"),
        ("sigmoid", "default"), ("tanh", "default"), ("exp", "default"), ("silu", "default"), ("gelu", "default"),
        ("clamp", "default"), ("clamp_min", "default"), ("clamp_max", "default"), ("leaky_relu", "default"),
        ("hardtanh", "default"), ("masked_fill", "Scalar"), ("rsqrt", "default"), ("sqrt", "default"),
    )
}  # fmt: skip
FUNCTIONAL = {inplace: functional for functional, inplace in INPLACE.items()}

# Choices between equal values may fall differently when run again on a GPU: never recomputed.
TIES = frozenset(
    getattr(aten, name)
    for name in ("topk", "sort", "argsort", "msort", "kthvalue", "median", "nanmedian", "mode", "_unique2")
)

# Sums whose order of addition is not fixed on a GPU: recomputing would change bits there.
ATOMIC_ON_CUDA = frozenset(
    getattr(aten, name)
    for name in (
        "index_add", "index_put", "_unsafe_index_put", "scatter_add", "scatter_reduce", "embedding_dense_backward",
        "put", "bincount", "histc", "_embedding_bag", "cumsum", "grid_sampler_2d", "upsample_bilinear2d",
    )
)  # fmt: skip


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a random number generator."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if target is aten.native_dropout.default and len(node.args) > 2 and node.args[2] is False:
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention kernels carry the tag whether or not dropout is on.
    probability = _dropout_probability(node)
    return probability is None or probability > 0


def _dropout_probability(node: fx.Node) -> float | None:
    schema = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return float(value)  # type: ignore[arg-type]
    return None


def result_ignores(target: Any, args: tuple[Any, ...], index: Any) -> frozenset[int]:
    """Positions of arguments that result `index` (None: the op as a whole) does not depend on."""
    rule = RUNNING_STATISTICS.get(target)
    if rule is None:
        return frozenset()
    positions, training, results = rule
    if training is not None and args[training] is not True:
        return frozenset()
    if results is None:
        return positions if index is None else frozenset()
    return positions if index in results else frozenset()


def must_run_once(node: fx.Node, device_type: str) -> str | None:
    """Why an op may not be recomputed, or None."""
    target = node.target
    if not isinstance(target, OpOverload):
        return "not an ATen op"
    if target.overloadpacket in TIES:
        return "ties could fall differently"
    if device_type == "cuda" and target.overloadpacket in ATOMIC_ON_CUDA:
        return "not deterministic on CUDA"
    if target.namespace in ("_c10d_functional", "c10d", "c10d_functional"):
        return "collective"
    if torch.Tag.nondeterministic_bitwise in target.tags:
        return "not bitwise deterministic"
    return None
