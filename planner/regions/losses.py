"""Cross entropy between regions is a region of its own: nowhere else does glue hold as much as at a model's head.

Eager keeps the logarithms of all probabilities and makes two more tensors of that size in its backward; planned, the
gradient is written over what is saved. While the model's forward runs, `torch.nn.functional.cross_entropy` of this
thread is therefore looked at: a large call is one of the region's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

LOSS = "cross_entropy()"  # its path among regions
LARGE_BYTES = 1 << 20
_plain = functional.cross_entropy


class CrossEntropy(nn.Module):
    """The function as a module."""

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None,
        size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        return _plain(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)


class _Calls(threading.local):
    region: Callable[..., Any] | None = None


_calls, _lock, _users = _Calls(), threading.Lock(), [0]


class _LookedAt:
    """The function, for as long as calls of it are looked at."""

    runs_plan = True

    def __init__(self) -> None:
        functools.update_wrapper(self, _plain)

    def stands_for(self) -> Any:
        """What it is for guards (`stood_for`)."""
        return _plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("input")
        large = type(given) is torch.Tensor and given.nbytes >= LARGE_BYTES
        return (_plain if _calls.region is None or not large else _calls.region)(*args, **kwargs)


_looked_at = _LookedAt()


@contextmanager
def looking_at_losses(region: Callable[..., Any] | None) -> Iterator[None]:
    """Let `region` be called for each large cross entropy of this thread in the block; None leaves them alone."""
    before = _calls.region
    _calls.region = region
    _use(1)
    try:
        yield
    finally:
        _use(-1)
        _calls.region = before


def _use(change: int) -> None:
    with _lock:
        _users[0] += change
        functional.cross_entropy = _looked_at if _users[0] else _plain


@contextmanager
def losses_set_aside() -> Iterator[None]:
    """Around tracing, which would note that it is looked at."""
    before = functional.cross_entropy
    functional.cross_entropy = _plain
    try:
        yield
    finally:
        functional.cross_entropy = before


def region_module(model: nn.Module, path: str) -> nn.Module:
    """The module that a region's path stands for."""
    return CrossEntropy() if path == LOSS else model.get_submodule(path)
