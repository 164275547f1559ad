"""arena: a step's larger tensors in a few segments of torch's caching allocator, asked for before the first step.

Left alone, the allocator takes a segment wherever no free block is large enough, and what tensors of another size leave
of one is lost. A large segment is split and merged as tensors come and go, and wastes less. The allocator keeps it
cached, so later steps ask for nothing. Where segments grow, they do so by 20 MiB; those asked for are as large as asked
for there, too. Needs torch alone: exports hold a copy.
"""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ._torch import segments_that_do_not_grow

# Where more lies idle in segments that cannot be given back, an arena would be too much: bytes, and a part of it.
SPARE_BYTES, IDLE = 40 << 20, 0.5

Arena = tuple[int, ...]  # bytes of its segments, ascending: none is served from those before it

# What had been given back to a device when an arena was last known to be there, by whose arena it is.
_given_back: WeakKeyDictionary[Any, dict[torch.device, int]] = WeakKeyDictionary()
# Address and size of the segments that were asked for, whoever asked.
_segments: dict[torch.device, set[tuple[int, int]]] = {}


def least_arena(idle_bytes: int) -> int:
    """Bytes of the smallest arena that is asked for where so much lies idle."""
    return max(0, int((idle_bytes - SPARE_BYTES) / IDLE))


def ask_for(arena: Arena, device: torch.device, owner: Any) -> None:
    """Have an arena's segments reserved, at the owner's first step and wherever the cache has been emptied since."""
    if not arena or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    known = _given_back.setdefault(owner, {})
    if device in known and (known[device] == _bytes("freed", device) or _is_there(arena, device)):
        known[device] = _bytes("freed", device)
        return
    torch.cuda.empty_cache()
    idle = _bytes("current", device) - torch.cuda.memory_allocated(device)
    if sum(arena) >= least_arena(idle) and torch.cuda.mem_get_info(device)[0] >= sum(arena):
        with segments_that_do_not_grow(), contextlib.suppress(torch.OutOfMemoryError):
            for size in arena:
                address = torch.empty(size, dtype=torch.uint8, device=device).data_ptr()
                _segments.setdefault(device, set()).add((address, size))
    known[device] = _bytes("freed", device)


def _is_there(arena: Arena, device: torch.device) -> bool:
    """Whether segments that were asked for, for this arena or for larger ones, have not been given back."""
    asked = _segments.get(device, set())
    asked &= {(s["address"], s["total_size"]) for s in torch.cuda.memory_snapshot() if s["device"] == device.index}
    largest = sorted(size for _, size in asked)[-len(arena) :]
    return len(largest) == len(arena) and all(size >= needed for size, needed in zip(largest, arena, strict=True))


def _bytes(which: str, device: torch.device) -> int:
    """Of what is reserved: "current", or "freed" for what was given back so far."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"]["all"][which])
