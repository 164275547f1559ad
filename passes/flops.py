"""FLOPs of an op: by torch's registry (`torch.utils.flop_counter`), and of a few that it does not list.

They are kept apart, so that a plan's FLOPs are those that `FlopCounterMode` counts, while the roofline does not take
a fused LSTM layer for a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ._torch import flop_registry, pytree

aten = torch.ops.aten


def listed_flops(node: fx.Node, result: Any) -> int:
    """Floating-point operations by torch's registry; 0 for ops that it does not list."""
    return _apply(flop_registry.get(getattr(node.target, "overloadpacket", None)), node, result)


def unlisted_flops(node: fx.Node, result: Any) -> int:
    """Floating-point operations of the ops below, where torch's registry does not list them; 0 for all others."""
    packet = getattr(node.target, "overloadpacket", None)
    return 0 if packet in flop_registry else _apply(_UNLISTED.get(str(packet)), node, result)


def _apply(formula: Callable[..., Any] | None, node: fx.Node, result: Any) -> int:
    if formula is None:
        return 0
    args, kwargs = pytree.tree_map(
        lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, dict(node.kwargs))
    )
    if "scaled_dot_product" in str(node.target):
        args = _with_equal_heads(args)
    return int(formula(*args, **kwargs, out_val=result))


def _with_equal_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Heads of keys and values that several of the query share count for each (torch 2.11's formula refuses them)."""
    heads = [a.shape[1] if isinstance(a, torch.Tensor) and a.dim() == 4 else 0 for a in args[:4]]
    shared = [i for i, count in enumerate(heads) if 0 < count < max(heads)]
    return tuple(a[:, :1].expand(-1, max(heads), -1, -1) if i in shared else a for i, a in enumerate(args))


def _rnn_layer(x: torch.Tensor, input_weight: torch.Tensor, hidden_weight: torch.Tensor, *_: Any, out_val: Any) -> int:
    """Two matrix products per position: of the input, and of the hidden state, with all gates' weights."""
    positions = x.numel() // max(1, x.shape[-1])
    return 2 * positions * (input_weight.numel() + hidden_weight.numel())


def _rnn_layer_backward(*args: Any, out_val: Any) -> int:
    """Each product has two in the backward: for what it read and for its weight."""
    return 2 * _rnn_layer(*args, out_val=out_val)


def _attention(x: torch.Tensor, key: torch.Tensor, *weights: torch.Tensor) -> int:
    """Products with weights at each position, and of each query with all keys, and of that with all values; of nested
    tensors, which have no shape, with as many keys as there are in the mean.
    """
    width = weights[0].shape[-1]
    positions, keys = x.numel() // width, key.numel() // (width * max(1, key.size(0)))
    return 2 * positions * (sum(w.numel() for w in weights) + 2 * keys * width)


def _native_attention(query: torch.Tensor, key: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return _attention(query, key, args[3], args[5])


def _encoder_layer(x: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return _attention(x, x, args[2], args[4], args[13], args[15])


def _trilinear(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *expanded: Any, out_val: Any, **kwargs: Any
) -> int:
    """A multiplication and an addition for each index of all three."""
    sizes = []
    for tensor, dims in zip((a, b, c), expanded, strict=False):
        sizes.append(list(tensor.shape))
        for dim in sorted(dims):
            sizes[-1].insert(dim, 1)
    return 2 * math.prod(map(max, *sizes))


def _like(name: str) -> Callable[..., Any]:
    """The registry's formula for an op of the same arguments."""
    packet = getattr(aten, name, None)

    def formula(*args: Any, **kwargs: Any) -> int:
        listed = flop_registry.get(packet)
        return int(listed(*args, **kwargs)) if listed is not None else 0

    return formula


_UNLISTED: dict[str, Callable[..., Any]] = {
    "aten.mkldnn_rnn_layer": _rnn_layer,
    "aten.mkldnn_rnn_layer_backward": _rnn_layer_backward,
    "aten._native_multi_head_attention": _native_attention,
    "aten._transformer_encoder_layer_fwd": _encoder_layer,
    "aten._trilinear": _trilinear,
    "aten._scaled_dot_product_flash_attention_for_cpu": _like("_scaled_dot_product_flash_attention"),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _like("_scaled_dot_product_flash_attention_backward"),
}
