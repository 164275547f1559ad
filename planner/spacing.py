"""spacing: where a step has spacers, so that its larger blocks come to lie as closely as they can be packed.

torch's caching allocator takes the smallest free block that is large enough, and knows nothing of what comes next. What
comes next is known here: how long each block of a step is held. Packed by that, blocks waste next to nothing. Where the
allocator would take other memory than that, spacers are in its way while the op runs, each as small as it can be; there
are none where more than may be would be allocated for them, or over .1 % more than without. Around what still lies
elsewhere the rest is packed anew, and spacers that change nothing are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from passes.allocator import OWN_SEGMENT, SMALL_SEGMENT
from passes.device import round_up
from passes.run.arena import Arena, Spacing

from .arena import ENOUGH, Reservation, aimed_bytes, least_to_ask_for
from .events import Apart, Order
from .footprint import Footprint, Start, ready
from .packing import FAR, Gap, Packer, by_place, gaps_of, held_blocks
from .placing import Placing

RESTS: tuple[Arena, ...] = ((), (OWN_SEGMENT,), (2 * OWN_SEGMENT,))  # segments beside it
MORE = (0, 1, 2, 3, 4, 6, 8, 12)  # how much larger than packed it may be, in units of 2 MiB
WAYS, TRIED = 30, 6  # ways to pack that are compared, and that are tried
EVENTS = 600_000  # that are played in all
SLACK = 1.01  # allocated with spacers over without: where blocks lie decides which are given out with their rest
# Spacers that there may be for each op: where no more is reserved than aimed at, and elsewhere.
FEW, MANY = 0.1, 0.5
DROPS = 900_000  # events that are played to see which spacers change nothing


def spaced(
    order: Order, start: Start, measure: Callable[[Reservation], Footprint], most_bytes: int, aside_bytes: int,
    found: Reservation,
) -> Reservation:  # fmt: skip
    """What reserves less than `found` by spacers; `found` where nothing does.

    Args:
        measure: the footprint with a reservation.
        most_bytes: what may be allocated.
        aside_bytes: what the footprint counts besides what the allocator does.
    """
    needed = measure(found)
    if needed.allocated_bytes > most_bytes or _is_enough(needed):
        return found
    most_bytes = max(needed.allocated_bytes, min(most_bytes, int(SLACK * needed.allocated_bytes)))
    besides_bytes = start.others_bytes - aside_bytes
    search = _Search(order.apart, start, measure, order.before, needed, found, most_bytes, besides_bytes)
    return search.best()


def _is_enough(needed: Footprint) -> bool:
    return needed.reserved_bytes <= ENOUGH * needed.allocated_bytes


class _Search:
    def __init__(
        self, apart: Apart, start: Start, measure: Callable[[Reservation], Footprint], before: tuple[int, ...],
        needed: Footprint, found: Reservation, most_bytes: int, besides_bytes: int,
    ) -> None:  # fmt: skip
        self.apart, self.start, self.measure, self.before = apart, start, measure, (*before, *apart.workspaces)
        self.needed, self.found = needed, found
        self.most_bytes, self.limit_bytes = most_bytes, most_bytes + besides_bytes
        self.length = len(apart.steps[1])
        self.events = EVENTS
        self.packer = Packer(held_blocks(apart.steps[1]))

    def best(self) -> Reservation:
        given, aim = self.found, aimed_bytes(self.needed.allocated_bytes, self.start.expandable)
        share = FEW if self.needed.reserved_bytes <= aim else MANY
        for arena, way in self._arenas():
            if self.events <= 0 or self.packer.pairs <= 0 or _is_enough(self.needed):
                break
            self._attempt(arena, way)
        if self.found is given:
            return given
        self._drop_idle_ones()
        count = sum(len(sizes) for _, sizes in self.found.spacing.at) if self.found.spacing else 0
        return self.found if count <= share * len(self.apart.runs[1]) else given

    def _arenas(self) -> Iterator[tuple[Arena, int]]:
        """Arenas that the step might fit into, each with a way to pack it that says so: the closest ways first."""
        found, least = list[tuple[int, int, Arena, int]](), least_to_ask_for(self.start)
        for rest in RESTS:
            allocator = ready(self.start, rest, self.before)
            if rest and allocator.reserved_bytes == ready(self.start, (), self.before).reserved_bytes:
                continue  # it is served from what is there
            gaps, blocks = [*gaps_of(allocator), Gap(FAR, FAR)], self.packer.blocks
            ways = max(2, min(WAYS, self.packer.pairs // (4 * len(blocks) ** 2 + 1)))
            packed = sorted((self.packer.pack(blocks, gaps, (), way)[1], way) for way in range(ways))
            for rank, (packed_bytes, way) in enumerate(packed[:TRIED]):
                size = max(round_up(packed_bytes, SMALL_SEGMENT), sum(rest) + SMALL_SEGMENT)
                for k, more in enumerate(MORE):
                    found.append((2 * rank + k, allocator.reserved_bytes, (*rest, size + more * SMALL_SEGMENT), way))
        for _, reserved, arena, way in sorted(found):
            if arena[-1] >= OWN_SEGMENT and sum(arena) >= least and reserved + arena[-1] < self.needed.reserved_bytes:
                yield arena, way

    def _attempt(self, arena: Arena, way: int) -> None:
        starts = [replace(self.start, descending=way) for way in (False, True)]
        allocators = [ready(start, arena, self.before) for start in starts]
        is_there = all(any(gap.size == arena[-1] for gap in gaps_of(each)) for each in allocators)
        if not is_there or allocators[0].peak_allocated_bytes > self.limit_bytes:
            return
        placing = Placing(self.apart, self.packer, allocators, arena[-1], self.limit_bytes, way)
        self.events -= 4 * self.length
        if placing.run(self.needed.reserved_bytes):
            self._consider(arena, placing.spacers)

    def _consider(self, arena: Arena, at: Mapping[int, tuple[int, ...]], equal: bool = False) -> None:
        spacing = Spacing(tuple(sorted(at.items())), workspaces=bool(self.apart.workspaces))
        needed = self.measure(Reservation(arena, spacing))
        self.events -= 6 * self.length
        if needed.allocated_bytes <= self.most_bytes and needed.reserved_bytes < self.needed.reserved_bytes + equal:
            growth = max(0, needed.reserved_bytes - ready(self.start, arena, self.before).reserved_bytes)
            self.found, self.needed = Reservation(arena, spacing._replace(growth=growth)), needed

    def _drop_idle_ones(self) -> None:
        """Drop spacers that change nothing, many at once, then fewer."""
        assert self.found.spacing is not None
        left = [(place, size) for place, sizes in self.found.spacing.at for size in sizes]
        part, self.events = len(left), DROPS
        while part and self.events > 0:
            k = 0
            while k < len(left) and self.events > 0:
                fewer = [*left[:k], *left[k + part :]]
                if self._is_as_good(by_place(fewer)):
                    left = fewer
                else:
                    k += part
            part //= 2
        self._consider(self.found.arena, by_place(left), equal=True)

    def _is_as_good(self, at: Mapping[int, tuple[int, ...]]) -> bool:
        """In two steps, wherever the driver places new segments."""
        for descending in (False, True):
            allocator = ready(replace(self.start, descending=descending), self.found.arena, self.before)
            for events in self.apart.spaced(at):
                allocator.play(events)
                self.events -= len(events)
            if allocator.peak_reserved_bytes > self.needed.reserved_bytes:
                return False
        return allocator.peak_allocated_bytes <= self.limit_bytes
