"""device: what differs from one kind of device to another, one record for each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._torch import allocator_events, cuda_allocations, forget_cublas_workspaces, storage_events

aten = torch.ops.aten

# Sums whose order of addition is not fixed on a GPU: recomputing would change bits there.
ATOMIC_ON_CUDA = frozenset(
    getattr(aten, name)
    for name in (
        "index_add", "index_put", "_unsafe_index_put", "scatter_add", "scatter_reduce", "embedding_dense_backward",
        "put", "bincount", "histc", "_embedding_bag", "cumsum", "grid_sampler_2d", "upsample_bilinear2d",
    )
)  # fmt: skip


@dataclass(frozen=True)
class DeviceKind:
    """What the planner has to know about a kind of device.

    Attributes:
        granule: bytes that its allocator rounds sizes up to.
        rng_state_bytes: what a saved state of its generator takes from its allocator.
        caches: whether its allocator is torch's caching one, whose blocks and segments are simulated.
        rowwise_in_place: whether row-wise kernels (softmax) are done reading a row before they write it.
        product_bytes: what matrix products hold throughout, a workspace for each of the two threads that run them.
        order_dependent: ops whose sums are added in an order that is not fixed, so that they run once.
        synchronize: wait until all kernels are done.
        peak_bytes: the highest point of memory above its level at the start, while something runs.
        allocations: the allocator's events while something runs: addresses (0 where they are not told), and signed
            sizes as they were asked for.
    """

    granule: int
    rng_state_bytes: int
    caches: bool
    rowwise_in_place: bool
    product_bytes: int
    order_dependent: frozenset[Any]
    synchronize: Callable[[torch.device], None]
    peak_bytes: Callable[[Callable[[], Any], torch.device], int]
    allocations: Callable[[Callable[[], Any], torch.device], list[tuple[int, int]]]


def kind_of(device: torch.device) -> DeviceKind:
    """The record of a device's kind; of a kind that has none, the CPU's."""
    return META if device.type == "meta" else KINDS.get(device.type, KINDS["cpu"])


def empty_cache(device: torch.device) -> None:
    """Give back what the device's caching allocator holds and nobody uses, cuBLAS's workspaces included."""
    if kind_of(device).caches:
        forget_cublas_workspaces()
        torch.cuda.empty_cache()


def room_bytes(device: torch.device) -> int | None:
    """What this process can have on the device, with all that it has reserved there; None on the CPU."""
    if not kind_of(device).caches:
        return None
    return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def _peak_on_cpu(run: Callable[[], Any], device: torch.device) -> int:
    """Every allocator event is replayed, each rounded to the granule in which sizes are predicted: exact."""
    level = peak = 0
    multiple = kind_of(device).granule
    for change in allocator_events(run):
        level += round_up(change, multiple) if change > 0 else -round_up(-change, multiple)
        peak = max(peak, level)
    return peak


def _peak_on_cuda(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _allocations_on_cuda(run: Callable[[], Any], device: torch.device) -> list[tuple[int, int]]:
    with torch.cuda.device(device):
        return cuda_allocations(run)[0]


def _without_addresses(sizes: list[int]) -> list[tuple[int, int]]:
    return [(0, size) for size in sizes]


KINDS = {
    "cpu": DeviceKind(
        granule=64, rng_state_bytes=5056, caches=False, rowwise_in_place=True, product_bytes=0,
        order_dependent=frozenset(), synchronize=lambda device: None, peak_bytes=_peak_on_cpu,
        allocations=lambda run, _: _without_addresses(allocator_events(run)),
    ),
    "cuda": DeviceKind(  # a generator's state of 16 bytes is kept on the host
        granule=512, rng_state_bytes=0, caches=True, rowwise_in_place=False, product_bytes=2 * 33 << 20,
        order_dependent=ATOMIC_ON_CUDA, synchronize=torch.cuda.synchronize, peak_bytes=_peak_on_cuda,
        allocations=_allocations_on_cuda,
    ),
}  # fmt: skip

# Nothing is allocated there: what storages take that ops make, without what kernels need for a moment.
META = replace(KINDS["cpu"], allocations=lambda run, _: _without_addresses(storage_events(run)))
