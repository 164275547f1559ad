"""Random ops run for their figures alone: they draw from a generator of their own.

The default generator belongs to all threads. Saved before profiling and put back after it, it would repeat what a
thread that trains drew in between.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import torch

from ._torch import pytree
from .fuse import records
from .run import kernels
from .run.random import get_rng_state, set_rng_state

aten = torch.ops.aten


def drawing_privately(target: Any, args: Any, kwargs: Any, device: torch.device) -> Callable[[], Any]:
    """The call of a random op, with equal memory and work, that leaves the default generator where it is.

    Of ops that take no generator (an LSTM's dropout, CUDA's attention) the draw is undone right after each run.
    """
    generator = torch.Generator(device)
    if target is records.DROPOUT.op:
        return partial(kernels.dropout, args[0], args[1], generator)
    if target is aten.native_dropout.default and device.type == "cpu" and args[2] is not False and 0 < args[1] < 1:
        return partial(_native_dropout, args[0], args[1], generator)
    if (same := _with_generator(target)) is not None:
        return partial(same, *args, **{**kwargs, "generator": generator})
    return partial(_undone, target, args, kwargs, str(device))


def varies(run: Callable[[], Any]) -> bool:
    """Whether another run of an op gives other values: it draws without saying so, counts, or asks the clock."""
    first, second = (pytree.tree_leaves(run()) for _ in range(2))
    pairs = zip(first, second, strict=True)
    return not all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Put torch's, Python's and NumPy's generators back after the block."""
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


def _native_dropout(values: torch.Tensor, p: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout_cpu` (ATen/native/Dropout.cpp), step by step."""
    mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return values.mul(mask).mul_(1 / (1 - p)), mask


def _with_generator(target: Any) -> Any:
    """The op itself, or its overload that differs in taking a generator; None where there is none."""
    names = [a.name for a in target._schema.arguments]
    if "generator" in names:
        return target
    packet = target.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        own = [a.name for a in overload._schema.arguments]
        if "generator" in own and [n for n in own if n != "generator"] == names:
            return overload
    return None


def _undone(target: Any, args: Any, kwargs: Any, device: str) -> Any:
    before = get_rng_state(device)
    try:
        return target(*args, **kwargs)
    finally:
        set_rng_state(before, device)
