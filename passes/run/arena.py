"""arena: a step's larger tensors in a few segments of torch's caching allocator, asked for before the first step.

Left alone, the allocator takes a segment wherever no free block is large enough, and what tensors of another size leave
of one is lost. A large segment is split and merged as tensors come and go, and wastes less. The allocator keeps it
cached, so later steps ask for nothing. Where segments grow, they do so by 20 MiB; those asked for are as large as asked
for there, too.

The allocator takes the smallest free block that is large enough, and where that is the wrong one, a spacer is in it: a
block that is asked for right before an op and given back right after it. Needs torch alone: exports hold a copy.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ._torch import make_workspaces, segments_that_do_not_grow

# Where more lies idle in segments that cannot be given back, an arena would be too much: bytes, and a part of it.
SPARE_BYTES, IDLE = 40 << 20, 0.5
SLACK_BYTES = 20 << 20  # more than foreseen that may be reserved before spacers are left out

Arena = tuple[int, ...]  # bytes of its segments, ascending: none is served from those before it


class Spacing(NamedTuple):
    """Where a step has spacers.

    Attributes:
        at: the bytes of each spacer, by the place of the op in the schedule.
        growth: bytes that are reserved in all, after the arena, while steps run.
        workspaces: whether those that cuBLAS keeps are made before the arena, and are no part of it.
    """

    at: tuple[tuple[int, tuple[int, ...]], ...] = ()
    growth: int = 0
    workspaces: bool = False


class Spacers:
    """Asks for spacers while a step runs, on the device where the arena is, and nowhere else.

    Attributes:
        growth, workspaces: as of the `Spacing`; a step without one has no growth to look at.
        device: where the arena is; None where there is none, or more is reserved than foreseen.
    """

    def __init__(self, growth: int | None = None, workspaces: bool = False) -> None:
        self.growth, self.workspaces = growth, workspaces
        self.device: torch.device | None = None
        self.most = 0

    def __call__(self, *sizes: int) -> list[torch.UntypedStorage] | None:
        """Blocks of so many bytes, in this order, until they are dropped; None where there is no arena."""
        if self.device is None or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        try:
            return [torch.UntypedStorage(size, device=self.device) for size in sizes]
        except torch.OutOfMemoryError:
            self.device = None
            return None

    def start(self, device: torch.device) -> None:
        """The arena is there."""
        if self.growth is not None:
            self.device, self.most = device, _bytes("current", device) + self.growth + SLACK_BYTES

    def look(self, device: torch.device) -> None:
        """Whether all is as foreseen, before each step: if not, a spacer could take memory of its own."""
        if self.device is not None and _bytes("current", device) > self.most:
            self.device = None


SPACERS = Spacers()  # those of an exported step, which has a copy of this file to itself

# What had been given back to a device when an arena was last known to be there, by whose arena it is.
_given_back: WeakKeyDictionary[Any, dict[torch.device, int]] = WeakKeyDictionary()
# Address and size of the segments that were asked for, whoever asked.
_segments: dict[torch.device, set[tuple[int, int]]] = {}


def least_arena(idle_bytes: int) -> int:
    """Bytes of the smallest arena that is asked for where so much lies idle."""
    return max(0, int((idle_bytes - SPARE_BYTES) / IDLE))


def ask_for(arena: Arena, device: torch.device, owner: Any) -> None:
    """Have an arena's segments reserved, at the owner's first step and wherever the cache has been emptied since.

    Args:
        owner: what the step belongs to; its `Spacers`, where it may have some.
    """
    if not arena or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    known, spacers = _given_back.setdefault(owner, {}), owner if isinstance(owner, Spacers) else Spacers()
    if device in known and (known[device] == _bytes("freed", device) or _is_there(arena, device)):
        known[device] = _bytes("freed", device)
        spacers.look(device)
        return
    spacers.device = None
    if spacers.workspaces:
        make_workspaces(device)
    torch.cuda.empty_cache()
    idle = _bytes("current", device) - torch.cuda.memory_allocated(device)
    if sum(arena) >= least_arena(idle) and torch.cuda.mem_get_info(device)[0] >= sum(arena):
        with segments_that_do_not_grow(), contextlib.suppress(torch.OutOfMemoryError):
            for size in arena:
                address = torch.empty(size, dtype=torch.uint8, device=device).data_ptr()
                _segments.setdefault(device, set()).add((address, size))
            spacers.start(device)
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
