"""Layouts that tracing would lose: an in-place op keeps its tensor's strides in eager, its traced twin does not.

Functionalization turns `gate.sigmoid_()` into `sigmoid(gate)`, whose result is dense also where `gate` was a slice of
a wider buffer. Arithmetic does not care, but a kernel that runs vectorized inside and scalar at the end of each row
(exp, sigmoid, tanh, sums) gives other last bits on other strides: that is how a GRU's cells differ. The tensor handed
to such a kernel is laid out as in eager first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._torch import FunctionalTensor

aten = torch.ops.aten

# Ops whose results are the same bits in every layout: each element by itself, rounded once, or only moved.
LAYOUT_FREE = frozenset(
    getattr(aten, name)
    for name in (
        "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "neg_", "abs", "abs_", "relu", "relu_",
        "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum", "sqrt", "sqrt_",
        "where", "masked_fill", "masked_fill_", "copy_", "copy", "clone", "fill_", "zero_", "_to_copy", "cat", "stack",
        "lt", "le", "gt", "ge", "eq", "ne", "zeros_like", "ones_like", "empty_like", "full_like", "contiguous",
        "ceil", "floor", "round", "trunc", "sign", "sgn", "threshold", "hardtanh", "hardtanh_", "leaky_relu",
        "leaky_relu_", "index_select", "gather", "flip", "isnan", "isfinite",
    )
)  # fmt: skip


class EagerLayouts(TorchDispatchMode):
    """Gives kernels whose bits depend on it the layout that eager has, while the forward is traced."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in LAYOUT_FREE or func.is_view:
            return func(*args, **kwargs)
        laid_out: dict[int, torch.Tensor] = {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if _lost_layout(leaf):
                laid_out[id(leaf)] = torch.empty_strided(
                    leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device
                ).copy_(leaf)
        if not laid_out:
            return func(*args, **kwargs)
        new_args, new_kwargs = pytree.tree_map(lambda leaf: laid_out.get(id(leaf), leaf), (args, kwargs))
        result = func(*new_args, **new_kwargs)
        for old, new in zip(pytree.tree_leaves(args), pytree.tree_leaves(new_args), strict=True):
            if old is not new and result is new:  # an in-place op: what it wrote belongs to the tensor it was given
                return old.copy_(new)
        return result


def _lost_layout(value: Any) -> bool:
    """Whether a traced tensor's value is laid out in another way than the tensor is in eager."""
    if not isinstance(value, FunctionalTensor):
        return False
    strides = zip(value.shape, value.stride(), value.elem.stride(), strict=True)
    return any(size > 1 and eager != traced for size, eager, traced in strides)
