"""Measuring memory: exactly, by allocator events on the CPU and by the caching allocator's counters on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from ._torch import dense_parts
from .device import kind_of, round_up

T = TypeVar("T")

__all__ = ["granule", "high_water", "measure_peak", "own_bytes", "place", "round_up", "span", "without_collections"]


def granule(device: torch.device) -> int:
    """What the allocator rounds sizes up to: 512 bytes on CUDA, 64 on the CPU."""
    return kind_of(device).granule


def place(memory: torch.UntypedStorage) -> int:
    """What a storage is told from others by: where it lies; on the meta device, where none lies anywhere, torch's own
    record of it.
    """
    return memory._cdata if memory.device.type == "meta" else memory.data_ptr()


def own_bytes(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Bytes of memory that each tensor adds to those before it: its whole storage, 0 where a former one lies there."""
    seen, found = set[int](), []
    for tensor in tensors:
        storages = {place(s): s.nbytes() for s in map(torch.Tensor.untyped_storage, dense_parts(tensor))}
        found.append(sum(size for where, size in storages.items() if where not in seen))
        seen.update(storages)
    return tuple(found)


def span(value: torch.Tensor) -> int:
    """Elements of memory from a tensor's first to its last; 0 for an empty one."""
    if not value.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def without_collections(run: Callable[[], T]) -> T:
    """Let nothing from before be freed while `run()` is measured, which would count as freed by it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return run()
    finally:
        if collects:
            gc.enable()


def measure_peak(run: Callable[[], Any], device: torch.device | None = None) -> int:
    """Bytes of the highest point of memory *above its level at the start* while `run()` executes.

    Without a device, on the CPU: exact there, by allocator events; on CUDA by `max_memory_allocated`.
    """
    device = torch.device("cpu") if device is None else device
    return without_collections(lambda: kind_of(device).peak_bytes(run, device))


def high_water(
    run: Callable[[], Any], device: torch.device, expected: Sequence[Any] | None = None
) -> tuple[int, Sequence[Any]]:
    """`(workspace, results)` of one op: its highest point above its start less what it returns, and what it returns.

    Args:
        expected: the op's results by its shape rule. One that is no tensor there is not kept by anybody, so what the
            kernel returns in its place (a gradient that was not asked for) is workspace.
    """
    kept: list[Any] = []
    peak = measure_peak(lambda: kept.append(run()), device)
    result = kept[0] if isinstance(kept[0], (tuple, list)) else kept
    storages = [
        t.untyped_storage() for i, t in enumerate(result) if isinstance(t, torch.Tensor)
        and (expected is None or i >= len(expected) or isinstance(expected[i], torch.Tensor))
    ]  # fmt: skip
    distinct = {s.data_ptr(): s.nbytes() for s in storages}
    return max(0, peak - sum(round_up(size, granule(device)) for size in distinct.values())), result
