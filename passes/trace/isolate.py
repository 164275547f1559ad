"""Tracing leaves the model as it was: flags, generators, attributes and whatever else the forward can reach."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._torch import private_generator
from .state import Snapshot


@contextlib.contextmanager
def isolated(model: nn.Module, loss_fn: Any = None, arguments: Sequence[Any] = ()) -> Iterator[Snapshot]:
    """Trace in training mode with gradients on, from the state that is yielded; everything is put back afterwards.

    Args:
        arguments: of the call, except for its tensors.
    """
    before = start = Snapshot(model, loss_fn, arguments)
    devices = sorted({t.device.index or 0 for t in model.parameters() if t.device.type == "cuda"})
    collects = gc.isenabled()
    try:
        gc.disable()  # what a collection calls back, or finalizes, is not part of the forward
        if not model.training:
            model.train()
            start = Snapshot(model, loss_fn, arguments)
        with private_generator(), start.iterators_held(), torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield start
    finally:
        if collects:
            gc.enable()
        before.restore()
