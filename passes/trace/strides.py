"""In which strides kernels lay out what norms and views make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from passes._torch import native_kernels, suggest_memory_format

aten = torch.ops.aten

Strides = tuple[int, ...]
Made = tuple[Strides, torch.dtype]


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


def of_layer_norm(args: Sequence[Any]) -> Strides:
    """Contiguous, whatever the strides of the argument (layer_norm.cpp); the backward's rule keeps the argument's."""
    return _strides(args[0], torch.contiguous_format)


def of_view(func: Callable[..., torch.Tensor], args: Sequence[Any]) -> Strides:
    """The rules disagree where a dimension has one index; a convolution may look at its stride all the same."""
    source, *rest = args
    sizes = (source.shape, source.stride(), *(tuple(r) if isinstance(r, list) else r for r in rest))
    try:
        return _strides_of_view(func, *sizes)
    except TypeError:  # symbols have no hash
        return _strides_of_view.__wrapped__(func, *sizes)


@functools.lru_cache(4096)
def _strides_of_view(func: Callable[..., torch.Tensor], shape: Any, strides: Strides, *rest: Any) -> Strides:
    with native_kernels():
        return func(torch.empty_strided(shape, strides, device="meta"), *rest).stride()


# What the CPU's kernels do, for the first result.
NORMS: dict[Any, Callable[[Sequence[Any]], Strides]] = {
    aten.native_batch_norm.default: _of_batch_norm,
    aten._native_batch_norm_legit.default: _of_batch_norm,
    aten._native_batch_norm_legit.no_stats: _of_batch_norm,
    aten._native_batch_norm_legit_functional.default: _of_batch_norm,
    aten._native_batch_norm_legit_no_training.default: _of_batch_norm,
    aten.native_batch_norm_backward.default: _of_batch_norm_backward,
    aten.native_layer_norm.default: of_layer_norm,
    aten.native_layer_norm_backward.default: of_layer_norm,
}
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.expand.default})
