"""What a schedule makes the device's caching allocator hold: its own allocations, played step after step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.allocator import ENDLESS, OWN_SEGMENT, CachingAllocator, Segment, unknown_settings
from passes.device import empty_cache, kind_of, room_bytes
from passes.lower import Lowered
from passes.run._torch import make_workspaces, segments_that_do_not_grow
from passes.run.arena import Arena
from passes.trace.capture import Traced
from passes.trace.structure import flatten

from .events import Steps

IDLE = "inactive"
STEPS, MOST_STEPS = 3, 8  # the second finds what the first left cached; the last shows that nothing more is needed


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device, at their highest.

    Attributes:
        allocated_bytes: as `torch.cuda.max_memory_allocated` counts, without what was there besides the step.
        reserved_bytes: as `torch.cuda.max_memory_reserved` counts.
    """

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Start:
    """The allocator as the step finds it.

    Attributes:
        segments: what it has reserved.
        others_bytes: what is allocated in them besides the step's parameters, buffers and inputs.
        room_bytes: what can be reserved in all before the device is full.
        expandable: whether the allocator's segments grow.
        descending: whether a new segment lies below those before it.
        range_bytes: addresses that torch sets aside for one that grows.
        workspaces: what cuBLAS keeps for the thread of the forward, and for autograd's.
        carried: addresses of state that the first step reads, and replaces by what it leaves.
    """

    segments: tuple[Segment, ...]
    others_bytes: int
    room_bytes: int
    expandable: bool
    descending: bool
    range_bytes: int = ENDLESS
    workspaces: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    carried: tuple[int, ...] = ()


def start_of(
    tensors: Iterable[torch.Tensor], device: torch.device, state: Iterable[torch.Tensor] = ()
) -> Start | None:
    """The allocator with nothing cached, and `tensors` in it; None where there is none, or one that is not known.

    Args:
        state: what else is in it, until the first step replaces it.
    """
    if not kind_of(device).caches or unknown_settings():
        return None
    empty_cache(device)
    snapshot = _snapshot(device)
    segments = tuple(
        Segment(
            s["address"], s["segment_type"] == "small", tuple((b["size"], b["state"] != IDLE) for b in s["blocks"]),
            s["is_expandable"],
        )
        for s in snapshot
    )
    ours = {t.untyped_storage().data_ptr() for t in tensors if t.device == device}
    replaced = {t.untyped_storage().data_ptr() for t in state if t.device == device}
    used = [b for s in snapshot for b in s["blocks"] if b["state"] != IDLE]
    others = sum(b["size"] for b in used if b["address"] not in ours | replaced)
    carried = tuple(sorted({b["address"] for b in used} & replaced - ours))
    expandable = any(s["is_expandable"] for s in snapshot)
    total = torch.cuda.mem_get_info(device)[1]
    room, descending, workspaces = room_bytes(device) or 0, _descends(device), _workspaces(device)
    return Start(segments, others, room, expandable, descending, total + total // 8, workspaces, carried)


def found_by_step(
    model: nn.Module, arguments: Mapping[str, Any], traced: Traced, lowered: Lowered, device: torch.device
) -> Start | None:  # fmt: skip
    """`start_of` with what a step finds there."""
    inputs = zip(traced.placeholders[len(traced.state) : traced.num_primals], flatten(dict(arguments))[0], strict=True)
    replaced = {storage.node for t in lowered.before if (storage := lowered.storages[t]) is not None}
    resident, state = [*model.parameters(), *model.buffers()], list[torch.Tensor]()
    for node, tensor in inputs:
        (state if node in replaced else resident).append(tensor)
    return start_of([t for t in resident if not any(t is each for each in state)], device, state)


def _snapshot(device: torch.device) -> list[dict[str, Any]]:
    return [s for s in torch.cuda.memory_snapshot() if s["device"] == (device.index or 0)]


def _used(device: torch.device) -> Counter[int]:
    return Counter(b["size"] for s in _snapshot(device) for b in s["blocks"] if b["state"] != IDLE)


def _workspaces(device: torch.device) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What cuBLAS keeps for this thread once it has run a product, and then for autograd's."""
    before = _used(device)
    with torch.no_grad():
        matrix = torch.zeros(16, 16, device=device)
        matrix @ matrix
    del matrix
    own = _used(device) - before
    make_workspaces(device)
    both = _used(device) - before
    empty_cache(device)
    return tuple(own.elements()), tuple((both - own).elements())


def _descends(device: torch.device) -> bool:
    """Whether the driver places segments downwards: two of the smallest that are not shared are asked for."""
    try:
        first = torch.empty(OWN_SEGMENT, dtype=torch.uint8, device=device)
        with segments_that_do_not_grow():
            second = torch.empty(OWN_SEGMENT, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    found = second.data_ptr() < first.data_ptr()
    del first, second
    empty_cache(device)
    return found


def footprint(
    steps: Steps, start: Start, reserve_bytes: int = 0, arena: Arena = (), before: Iterable[int] = ()
) -> Footprint:
    """Play steps until one needs no more than those before.

    Args:
        reserve_bytes: what is set aside on top of both figures.
        arena: what the first step asks for in advance (`passes.run.arena`).
        before: what is there before that.
    """
    allocator = ready(start, arena, before)
    for count in range(MOST_STEPS):
        before = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        allocator.play(steps[min(count, 1)])
        if count + 1 >= STEPS and before == (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes):
            break
    allocated = allocator.peak_allocated_bytes - start.others_bytes
    return Footprint(allocated + reserve_bytes, allocator.peak_reserved_bytes + reserve_bytes)


def ready(start: Start, arena: Arena, before: Iterable[int]) -> CachingAllocator:
    """The allocator as the first step finds it."""
    allocator = CachingAllocator(
        expandable=start.expandable, segments=start.segments, descending=start.descending,
        range_bytes=start.range_bytes,
    )  # fmt: skip
    allocator.leaving = [allocator.given[address] for address in start.carried]
    allocator.play(tuple(filter(None, before)))
    for size in arena:
        allocator.reserve(size)
    return allocator


def larger_of(found: Iterable[Footprint]) -> Footprint:
    """The larger figures of some."""
    every = list(found)
    return Footprint(max(f.allocated_bytes for f in every), max(f.reserved_bytes for f in every))
