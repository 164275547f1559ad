"""Layouts that tracing would lose: an in-place op keeps its tensor's strides in eager, its traced twin does not.

Functionalization turns `gate.sigmoid_()` into `sigmoid(gate)`, whose result is dense also where `gate` was a slice of
a wider buffer. Arithmetic does not care, but a kernel that runs vectorized inside and scalar at the end of each row
(exp, sigmoid, tanh, sums) gives other last bits on other strides: that is how a GRU's cells differ. The tensor handed
to such a kernel is laid out as in eager first.

And some of torch's shape rules lay results out in another way than the CPU's kernels do: a traced `view` of such a
result would fail when it runs, or a convolution choose another kernel. `EagerFakes` corrects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes._torch import FakeTensor, FakeTensorMode, FunctionalTensor, native_kernels
from passes.exclusive import interrupt_point

from .leaks import Remembered

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

    def __init__(self, remembered: Remembered) -> None:
        super().__init__()
        self.remembered = remembered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._laid_out(func, args, kwargs or {})
        self.remembered.add(result)
        return result

    def _laid_out(self, func: Any, args: Any, kwargs: Any) -> Any:
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


Strides = tuple[int, ...]


def _format(value: torch.Tensor) -> torch.memory_format:
    """How a batch norm lays out what it makes of `value` (suggest_memory_format_contig, Normalization.cpp)."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    other = formats.get(value.dim())
    if other is None or value.is_contiguous() or not value.is_contiguous(memory_format=other):
        return torch.contiguous_format
    return other


def _any_format(value: torch.Tensor) -> bool:
    return value.is_contiguous() or _format(value) is not torch.contiguous_format


def _strides(value: torch.Tensor, layout: torch.memory_format) -> Strides:
    return torch.empty(value.shape, device="meta", memory_format=layout).stride()


def _of_batch_norm(args: Sequence[Any]) -> Strides:
    return _strides(args[0], _format(args[0]))


def _of_batch_norm_backward(args: Sequence[Any]) -> Strides:
    gradient, values = args[:2]
    suggested = suggest_memory_format(values)
    alike = _any_format(values) and _any_format(gradient) and suggested == suggest_memory_format(gradient)
    return _strides(values, _format(values) if alike else suggested)


def _of_view(func: Callable[..., torch.Tensor], args: Sequence[Any]) -> Strides:
    """The rules disagree where a dimension has one index; a convolution may look at its stride all the same."""
    source, *rest = args
    with native_kernels():
        alike = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
        return func(alike, *rest).stride()


# What the CPU's kernels do, for the first result.
BATCH_NORMS: dict[Any, Callable[[Sequence[Any]], Strides]] = {
    aten.native_batch_norm.default: _of_batch_norm,
    aten._native_batch_norm_legit.default: _of_batch_norm,
    aten._native_batch_norm_legit.no_stats: _of_batch_norm,
    aten._native_batch_norm_legit_functional.default: _of_batch_norm,
    aten._native_batch_norm_legit_no_training.default: _of_batch_norm,
    aten.native_batch_norm_backward.default: _of_batch_norm_backward,
}
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.expand.default})


class EagerFakes(FakeTensorMode):
    """Fake tensors whose layouts are those that the kernels make."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        interrupt_point()
        result: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(first, FakeTensor):
            return result
        if func in VIEWS and not kwargs:
            strides = _of_view(func, args)
        elif func in BATCH_NORMS and first.device.type == "cpu":
            strides = BATCH_NORMS[func](args)
        else:
            return result
        if strides == first.stride():
            return result
        if first is result:
            return super().__torch_dispatch__(
                aten.as_strided.default, types, (first, first.size(), strides, first.storage_offset()), {}
            )
        options = {"dtype": first.dtype, "device": first.device}
        corrected = super().__torch_dispatch__(aten.empty_strided.default, types, (first.size(), strides), options)
        return (corrected, *result[1:])
