"""Measuring memory: exactly, by allocator events on the CPU and by the caching allocator's counters on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._torch import allocator_events


def granule(device: torch.device) -> int:
    """What the allocator rounds sizes up to: 512 bytes on CUDA, 64 on the CPU."""
    return 512 if device.type == "cuda" else 64


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def span(value: torch.Tensor) -> int:
    """Elements of memory from a tensor's first to its last; 0 for an empty one."""
    if not value.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def measure_peak(run: Callable[[], Any], device: torch.device | None = None) -> int:
    """Bytes of the highest point of memory *above its level at the start* while `run()` executes.

    On the CPU every allocator event of the block is replayed, each rounded to the granule in which sizes are
    predicted, so the figure is exact; on CUDA it is `max_memory_allocated` less what was allocated before.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    level = peak = 0
    multiple = granule(torch.device("cpu"))
    for change in allocator_events(run):
        level += round_up(change, multiple) if change > 0 else -round_up(-change, multiple)
        peak = max(peak, level)
    return peak


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
