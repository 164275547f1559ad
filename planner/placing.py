"""placing: one step, with spacers where its blocks would not come to lie as they are packed.

A driver may place a new segment above those before it, or below them, and of free blocks of one size the allocator
takes that at the lowest address. So a step is placed in both at once, by the same spacers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from passes.allocator import ENDLESS, LARGEST_SMALL, Block, CachingAllocator

from .events import Apart
from .packing import FAR, Blocks, Gap, Held, Packer, Run, any_in, gaps_of, spacer_in

ANEW = 200  # how often the rest of a step is packed anew
SINGLE = 2  # how many of an op's blocks are tried one by one
LASTING = 1000  # how much more it counts where a block lies that outlives its op


class World:
    """The allocator as one driver places segments, and where each block lies.

    Attributes:
        own: what is free at first, besides the arena.
        lying: the blocks that are held, with their addresses as packed: those of `like`, and of an arena at FAR.
    """

    def __init__(self, allocator: CachingAllocator, arena_bytes: int, blocks: Blocks, like: World | None) -> None:
        self.allocator, self.blocks = allocator, blocks
        gaps = gaps_of(allocator)
        arena = next(gap for gap in gaps if gap.size == arena_bytes)
        self.own: list[Gap] = [gap for gap in gaps if gap is not arena]
        # What is added to addresses as packed: the arena lies at FAR there. What was free before lies where it did in
        # either world, so that of two gaps of one size each is the other's.
        self.shifts = [(arena, arena.address - FAR)]
        for gap, other in zip(sorted(self.own), sorted(self.own if like is None else like.own), strict=False):
            self.shifts.append((gap, gap.address - other.address))
        self.lying: dict[int, tuple[int, Held]] = {}
        self.made: list[Block] = []

    def real(self, packed: int) -> int:
        """The address of one that is as packed."""
        return packed + next((shift for gap, shift in self.shifts if 0 <= packed + shift - gap.address < gap.size), 0)

    def packed(self, real: int) -> int:
        return real - next((shift for gap, shift in self.shifts if 0 <= real - gap.address < gap.size), 0)

    def play(self, events: Iterable[int], planned: Mapping[int, int]) -> bool:
        """Whether a block comes to lie elsewhere than planned."""
        is_off = False
        for event in events:
            if event < 0:
                self.allocator.release(self.made[-1 - event])
                self.lying.pop(-1 - event, None)
                continue
            n, block = len(self.made), self.allocator.allocate(event)
            self.made.append(block)
            if n in self.blocks:
                address, held = self.packed(block.address), self.blocks[n]
                is_off = is_off or address != planned[n]
                self.lying[n] = address, Held(block.size, held.born, held.dies)
        return is_off

    def in_the_way(self, which: Collection[int], planned: Mapping[int, int], tight: bool) -> tuple[int, ...]:
        """Sizes of spacers that leave no gap for these blocks that the allocator would take instead.

        Args:
            tight: whether they leave what is too small, or fill gaps.
        """
        gaps, addresses, sizes = gaps_of(self.allocator), {n: self.real(planned[n]) for n in which}, list[int]()
        targets = set(addresses.values())
        for n, address in addresses.items():
            size = self.blocks[n].size
            own = next((g for g in gaps if g.address <= address and address + size <= g.address + g.size), None)
            if own is None:
                continue
            front = address - own.address
            if front <= LARGEST_SMALL or any(own.address <= a < address for a in targets):
                front = 0
            least = min(size, front) if front else size
            others = [g for g in gaps if least <= g.size and g.rank < own.rank and not any_in(g, targets)]
            needed = [spacer_in(gap, least, gaps) if tight else gap.size for gap in others]
            needed += [front] if front else []
            for each in dict.fromkeys(needed):
                sizes += [each] * (needed.count(each) - sizes.count(each))
        return tuple(sizes)

    def wrong(
        self, sizes: Sequence[int], events: Sequence[int], run: Run, planned: Mapping[int, int], limit: int
    ) -> float:
        """Bytes that come to lie elsewhere than packed, those that outlive the op above all; endless where more than
        `limit` would be allocated, or more be reserved. Nothing is changed.
        """
        allocator = self.allocator
        peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        most = allocator.allocated_bytes + sum(sizes)
        if sizes and most > limit:
            return ENDLESS
        spacers, made, wrong, n, is_more = list[Block](), dict[int, Block](), 0, len(self.made) - 1, False
        for event in (*sizes, *events[run.start : run.end]):
            if event < 0:
                if (given := made.pop(-1 - event, None)) is not None:
                    allocator.release(given)
                continue
            is_more = bool(sizes) and not allocator.has_room(event)
            if is_more:  # a segment would stay
                break
            if len(spacers) < len(sizes):
                spacers.append(allocator.allocate(event))
                continue
            n, block = n + 1, allocator.allocate(event)
            made[n], most = block, max(most, allocator.allocated_bytes)
            if n in self.blocks and self.packed(block.address) != planned[n]:
                wrong += self.blocks[n].size * (LASTING if self.blocks[n].dies >= run.end else 1)
        is_more = is_more or most > limit
        for block in (*made.values(), *spacers):
            allocator.release(block)
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes = peaks
        return ENDLESS if sizes and is_more else wrong


class Placing:
    """One step, with spacers where blocks would not come to lie where they are packed, wherever segments are placed.

    Attributes:
        spacers: their sizes, by the place of the op in the schedule.
    """

    def __init__(
        self, apart: Apart, packer: Packer, allocators: Iterable[CachingAllocator], arena_bytes: int, limit_bytes: int,
        way: int,
    ) -> None:  # fmt: skip
        self.events, self.runs = apart.steps[1], apart.runs[1]
        self.packer, self.limit_bytes, self.way, self.arena_bytes = packer, limit_bytes, way, arena_bytes
        self.blocks, self.worlds = packer.blocks, list[World]()
        for allocator in allocators:
            self.worlds.append(World(allocator, arena_bytes, self.blocks, self.worlds[0] if self.worlds else None))
        self.gaps = [*self.worlds[0].own, Gap(FAR, FAR)]
        self.planned, _ = packer.pack(self.blocks, self.gaps, (), way)
        self.spacers: dict[int, tuple[int, ...]] = {}
        self.is_off, self.anew = False, 0

    def run(self, most_reserved: int) -> bool:
        """Whether less is reserved for the step."""
        done = 0
        for run in self.runs:
            self._play(done, run.start)
            self._op(run)
            done = run.end
            if self._reserved() >= most_reserved or self.anew > ANEW or self.packer.pairs <= 0:
                return False
        self._play(done, len(self.events))
        return self._reserved() < most_reserved

    def _reserved(self) -> int:
        return max(world.allocator.peak_reserved_bytes for world in self.worlds)

    def _play(self, start: int, end: int) -> None:
        for world in self.worlds:
            self.is_off |= world.play(self.events[start:end], self.planned)

    def _op(self, run: Run) -> None:
        first = len(self.worlds[0].made)
        count = sum(event > 0 for event in self.events[run.start : run.end])
        wanted = [n for n in range(first, first + count) if n in self.blocks]
        if not wanted:
            self._play(run.start, run.end)
            return
        if self.is_off:
            self._pack_anew(wanted[0])
        sizes = self._chosen(wanted, run)
        spacers = [[world.allocator.allocate(size) for size in sizes] for world in self.worlds]
        self._play(run.start, run.end)
        for world, held in zip(self.worlds, spacers, strict=True):
            for spacer in held:
                world.allocator.release(spacer)
        if sizes:
            self.spacers[run.place] = sizes

    def _pack_anew(self, first: int) -> None:
        """Around what lies elsewhere: what it is in the way of, or else all that comes."""
        self.is_off, self.anew = False, self.anew + 1
        later = [n for n in self.blocks if n >= first]
        lying = {(k, n): pair for k, world in enumerate(self.worlds) for n, pair in world.lying.items()}
        moved = [pair for (_, n), pair in lying.items() if pair[0] != self.planned[n]]
        stuck = self.packer.in_the_way_of(later, self.planned, moved)
        staying = {(0, n): (self.planned[n], self.blocks[n]) for n in set(later) - set(stuck)}
        found, packed_bytes = self.packer.pack(stuck, self.gaps, (lying | staying).values(), self.way)
        if packed_bytes > self.arena_bytes:
            other, other_bytes = self.packer.pack(later, self.gaps, lying.values(), self.way)
            found = other if other_bytes < packed_bytes else found
        self.planned |= found

    def _chosen(self, wanted: Sequence[int], run: Run) -> tuple[int, ...]:
        """Spacers for all blocks of an op, for those that outlive it, for one, or none: what errs least."""
        lasting = [n for n in wanted if self.blocks[n].dies >= run.end]
        single = sorted(wanted, key=lambda n: -self.blocks[n].size)[:SINGLE]
        least, best = float(ENDLESS), tuple[int, ...]()
        ways = [(which, tight) for tight in (True, False) for which in (wanted, lasting, *([n] for n in single))]
        tried = (world.in_the_way(which, self.planned, tight) for which, tight in ways for world in self.worlds)
        for sizes in dict.fromkeys([*tried, ()]):
            wrong = sum(w.wrong(sizes, self.events, run, self.planned, self.limit_bytes) for w in self.worlds)
            if wrong < least or (not sizes and wrong == least):
                least, best = wrong, sizes
            if not wrong:
                break
        return best
