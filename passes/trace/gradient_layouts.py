"""The strides in which the gradients of outputs have come, and those to expect for outputs of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from passes._torch import symbolic

from .layouts import BACKWARD_AUTOCAST, Layouts


def gradient_key(path: str, output: torch.Tensor) -> Any:
    """Under which the strides of the gradient that comes for the output at `path` are kept."""
    return "gradient of", path, tuple(output.shape)


def gradient_strides(layouts: Layouts, path: str, output: torch.Tensor) -> tuple[int, ...] | None:
    """The strides in which a gradient for the output at `path` has come; in another shape, in the order that it had."""
    if not any(map(symbolic, output.shape)):
        known = layouts.get(gradient_key(path, output))
        if known is not None:
            return known
    for key, strides in reversed(layouts.items()):
        if key[:2] == ("gradient of", path) and len(key[2]) == output.dim():
            return _in_order(key[2], strides, output.shape)
    return None


def gradient_orders(layouts: Layouts) -> frozenset[Any] | None:
    """In which order gradients lie in memory, by their outputs, for any sizes; None if layouts tell more than that."""
    latest: dict[Any, Any] = {}
    for key, strides in reversed(layouts.items()):
        if key == BACKWARD_AUTOCAST:
            continue
        if key[0] != "gradient of":
            return None
        _, path, shape = key
        like, of_it = latest.setdefault((path, len(shape)), (shape, strides))
        if _in_order(like, of_it, shape) != strides:
            return None
    return frozenset((where, any(strides) and _order(shape, strides)) for where, (shape, strides) in latest.items())


def _in_order(shape: Sequence[int], strides: Sequence[int], other: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a tensor of another shape that lies in memory as this one: dense, or one item. Else None."""
    if not any(strides):
        return (0,) * len(other)
    order = _order(shape, strides)
    return _dense(order, other) if _dense(order, shape) == tuple(strides) else None


def _order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d], d)))


def _dense(order: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    strides, size = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension], size = size, size * shape[dimension]
    return tuple(strides)
