"""What the planner knows about particular ops, as tables: randomness, order-dependence, ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes._torch import OpOverload

from .device import kind_of
from .fuse.fused import IgnoredArguments
from .fuse.records import FUSED

aten = torch.ops.aten

# Batch norms in training mode read the running statistics only to update them, so results other than the updated
# statistics do not depend on them.
IGNORED_ARGUMENTS: dict[Any, IgnoredArguments] = {
    aten._native_batch_norm_legit_functional.default: IgnoredArguments(frozenset({3, 4}), 5, frozenset({0, 1, 2})),
    aten._batch_norm_with_update_functional.default: IgnoredArguments(
        frozenset({3, 4}), None, frozenset({0, 1, 2, 3})
    ),
    aten.native_batch_norm_backward.default: IgnoredArguments(frozenset({3, 4}), 7, None),
    aten.batch_norm_backward.default: IgnoredArguments(frozenset({3, 4}), 7, None),
    aten.cudnn_batch_norm_backward.default: IgnoredArguments(frozenset({4, 5}), None, None),
    aten.miopen_batch_norm_backward.default: IgnoredArguments(frozenset({4, 5}), None, None),
    **{fused.op: fused.ignores for fused in FUSED if fused.ignores},
}

# Ops one of whose results is a blob that only their own backward understands: made-up bytes there can crash it, so
# when such a backward is measured its forward is really run.
# Attention on a GPU leaves where its generator stood in the host's memory, which no rule of shapes tells.
OPAQUE_RESULTS = frozenset(
    {
        "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_thnn_fused_lstm_cell", "_cudnn_ctc_loss", "_embedding_bag",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention", "_efficient_attention_forward", "_flash_attention_forward",
        "_cudnn_attention_forward",
    }
)  # fmt: skip



# In a node's meta: its op was seen to give other values when it ran again on the same ones.
VARIES = "varies"
COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "c10d"})  # their namespaces
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "planner", *COLLECTIVES})


@dataclass(frozen=True)
class Donation:
    """The op that writes the same bits into the memory of one of its arguments.

    Attributes:
        target: runs the same kernel.
        out: the keyword that takes the memory; None for an op that writes its first argument.
    """

    target: OpOverload
    out: str | None


def _donations() -> dict[Any, dict[int, Donation]]:
    """Element-wise kernels read each element before they write it: op -> argument position -> who is given it."""
    table: dict[Any, dict[int, Donation]] = {}
    in_place = {
        "Tensor": ("add", "sub", "mul", "div"),
        "Scalar": ("add", "sub", "mul", "div", "masked_fill"),
        "default": (
            "neg", "relu", "sigmoid", "tanh", "exp", "silu", "gelu", "clamp", "clamp_min", "clamp_max", "leaky_relu",
            "hardtanh", "rsqrt", "sqrt", "elu", "hardswish", "hardsigmoid", "erf", "reciprocal",
        ),
    }  # fmt: skip
    for overload, names in in_place.items():
        for name in names:
            twin = Donation(getattr(getattr(aten, name + "_"), overload), None)
            table[getattr(getattr(aten, name), overload)] = {0: twin}
    with_out: tuple[tuple[str, str, str, tuple[int, ...]], ...] = (
        *((name, "Tensor", "out", (1,)) for name in ("add", "sub", "mul", "div")),
        ("pow", "Tensor_Scalar", "Tensor_Scalar_out", (0,)),
        ("where", "self", "self_out", (1, 2)),
        *((f"{name}_backward", "default", "grad_input", (0, 1)) for name in (
            "threshold", "tanh", "sigmoid", "silu", "gelu", "leaky_relu", "hardtanh", "hardsigmoid", "softplus",
        )),
        ("elu_backward", "default", "grad_input", (0, 5)),
        *((name, "default", "out", (0,)) for name in ("_softmax", "_log_softmax")),
        *((name, "default", "out", (0, 1)) for name in ("_softmax_backward_data", "_log_softmax_backward_data")),
    )  # fmt: skip
    for fused in FUSED:
        if fused.donates:
            table[fused.op] = dict.fromkeys(fused.donates, Donation(fused.overloads[1], fused.written))
    for name, overload, twin_overload, positions in with_out:
        target = getattr(getattr(aten, name), twin_overload)
        twin = Donation(target, next(a.name for a in target._schema.arguments if a.kwarg_only and a.is_write))
        table.setdefault(getattr(getattr(aten, name), overload), {}).update(dict.fromkeys(positions, twin))
    return table


DONATIONS = _donations()
FUNCTIONAL: dict[Any, Any] = {twin.target: op for op, twins in DONATIONS.items() for twin in twins.values()}

# Write over a value that the caller was given only if the caller holds it no more, which they find out as they run.
CHECKS_OWNER = frozenset(op for fused in FUSED if fused.checks_owner for op in fused.overloads)

# Not element-wise, but the CPU's kernel is done reading a row before it writes it: op -> position of `dim`, None for
# an op that always works along the last one.
ROWWISE: dict[Any, int | None] = {
    **{fused.op: None for fused in FUSED if fused.rowwise},
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}

# Choices between equal values may fall differently when run again on a GPU: never recomputed.
TIES = frozenset(
    getattr(aten, name)
    for name in ("topk", "sort", "argsort", "msort", "kthvalue", "median", "nanmedian", "mode", "_unique2")
)


def is_custom(node: fx.Node) -> bool:
    """Whether the op is neither torch's nor ours, so that nothing is known of it but what its author says."""
    return isinstance(node.target, OpOverload) and node.target.namespace not in _KNOWN_NAMESPACES


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a random number generator."""
    return draws(node.target, node.args, node.kwargs)


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an op draws from a random number generator."""
    if not isinstance(target, OpOverload):
        return False
    if target is aten.native_dropout.default and len(args) > 2 and args[2] is False:
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention kernels carry the tag whether or not dropout is on.
    probability = _dropout_probability(target, args, kwargs)
    return probability is None or probability > 0


def _dropout_probability(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            return float(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))
    return None


def donations(node: fx.Node) -> dict[int, Donation]:
    """Which argument's memory the node's result could be written into, by position, whatever else reads it."""
    functional: Any = FUNCTIONAL.get(node.target, node.target)
    found = DONATIONS.get(functional, {})
    value = node.meta["val"]
    if not found or value.is_complex():  # complex kernels give other bits where they write over an argument
        return {}
    if functional is aten.mul.Scalar and value.dtype in (torch.bfloat16, torch.float16):
        return {}  # mul_ rounds the number to the tensor's type first
    if functional not in ROWWISE:
        return found
    position = ROWWISE[functional]
    last = position is None or node.args[position] in (-1, value.dim() - 1)
    return found if last and kind_of(value.device).rowwise_in_place and value.is_contiguous() else {}


def donated_argument(node: fx.Node) -> fx.Node | None:
    """The argument whose memory an op of `FUNCTIONAL` writes its result into; None for other ops."""
    functional = FUNCTIONAL.get(node.target)
    if functional is None:
        return None
    outs = dict.fromkeys(twin.out for twin in DONATIONS[functional].values() if twin.target is node.target)
    written = next((node.kwargs[out] for out in outs if out is not None and out in node.kwargs), node.args[0])
    return written if isinstance(written, fx.Node) else None


def functional_form(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """The op that computes the node's value out of place, and its keyword arguments."""
    functional = FUNCTIONAL.get(node.target)
    if functional is None:
        return node.target, dict(node.kwargs)
    outs = {twin.out for twin in DONATIONS[functional].values() if twin.target is node.target}
    return functional, {name: value for name, value in node.kwargs.items() if name not in outs}


def ignored_by(target: Any, args: tuple[Any, ...]) -> IgnoredArguments | None:
    """The arguments that results of this call do not depend on, or None."""
    rule = IGNORED_ARGUMENTS.get(target)
    return rule if rule is not None and (rule.training is None or args[rule.training] is True) else None


def looks_at_values(node: fx.Node) -> bool:
    """Whether what the op needs depends on values: whether a factor is zero, how much of a mask is set."""
    picks = torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
    return picks or node.target in (torch.ops.planner.gradient_of.default, torch.ops.planner.sum_of_selected.default)


def is_collective(node: fx.Node) -> bool:
    """Whether the op talks to other ranks, in an order that all share."""
    return isinstance(node.target, OpOverload) and node.target.namespace in COLLECTIVES


def must_run_once(node: fx.Node, device: torch.device) -> str | None:
    """Why an op may not be recomputed, or None."""
    target = node.target
    if not isinstance(target, OpOverload):
        return "not an ATen op"
    if target.overloadpacket in TIES:
        return "ties could fall differently"
    if target.overloadpacket in kind_of(device).order_dependent:
        return f"not deterministic on {device.type.upper()}"
    if is_collective(node):
        return "collective"
    if torch.Tag.nondeterministic_bitwise in target.tags:
        return "not bitwise deterministic"
    if node.meta.get(VARIES):
        return "another run of it gives other values"
    return None
