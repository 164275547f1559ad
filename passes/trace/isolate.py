"""Tracing leaves the model as it was: flags, generators, attributes and whatever else the forward can reach."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._torch import private_generator, unaware_of_tracing
from ..exclusive import exclusive
from .state import Snapshot


@contextlib.contextmanager
def isolated(model: nn.Module, loss_fn: Any = None, arguments: Sequence[Any] = ()) -> Iterator[Snapshot]:
    """Trace with gradients on, from the state that is yielded; everything is put back afterwards.

    Args:
        arguments: of the call, except for its tensors.
    """
    before = Snapshot(model, loss_fn, arguments)
    devices = sorted({t.device.index or 0 for t in model.parameters() if t.device.type == "cuda"})
    collects = gc.isenabled()
    try:
        gc.disable()  # what a collection calls back, or finalizes, is not part of the forward
        with (
            private_generator(), before.iterators_held(), torch.random.fork_rng(devices=devices), torch.enable_grad(),
            unaware_of_tracing(),
        ):  # fmt: skip
            yield before
    finally:
        if collects:
            gc.enable()
        before.restore()


@contextlib.contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Let a model in eval mode be in training mode in the block; everything is put back afterwards."""
    with exclusive():
        before = Snapshot(model)
        try:
            model.train()
            yield
        finally:
            before.restore()
