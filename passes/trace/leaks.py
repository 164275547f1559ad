"""Tensors of the trace that outlive it: the model's code, a hook or an output keeps them where no plan would put one.

Whatever holds them (a list of a closure, a set, a generator, an object with slots), the caller would find a tensor
without data there, and after the next step a stale one. So every tensor made while tracing is remembered weakly, and
none may be alive when all that belongs to the trace is gone.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from passes._torch import pytree

from .constructs import KEPT


class Remembered:
    """Weak references to the tensors of one trace."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[torch.Tensor]] = []

    def add(self, values: Any) -> None:
        """Remember every tensor in `values`."""
        self.references += [weakref.ref(t) for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]

    def check(self) -> None:
        """Raise Unsupported if one of them is still alive, naming what holds it."""
        if any(reference() is not None for reference in self.references):
            gc.collect()  # a cycle of the model's own is not a place where anybody looks
        for reference in self.references:
            tensor = reference()
            if tensor is not None:
                holder = _holder(gc.get_referrers(tensor), tensor)
                raise KEPT.at(f"one of shape {tuple(tensor.shape)} in {holder}")


def _holder(referrers: Iterable[Any], tensor: torch.Tensor) -> str:
    for holder in referrers:
        if isinstance(holder, dict):
            keys = [key for key, value in holder.items() if value is tensor]
            return f"a dict under {keys[0]!r}" if keys else "a dict"
        if isinstance(holder, types.CellType):
            return "a variable of a closure"
        if not isinstance(holder, types.FrameType):
            return f"a {type(holder).__name__}"
    return "a place that cannot be named"
