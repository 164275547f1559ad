"""torch's CUDA caching allocator, in pure Python: what a sequence of allocations and frees makes it reserve.

Source: c10/cuda/CUDACachingAllocator.cpp. Sizes are rounded to 512 bytes. Up to 1 MiB comes from a pool of segments of
2 MiB, more from a pool of segments of 20 MiB, or of the size itself from 10 MiB on. The smallest free block that is
large enough is taken. It is split where more than 1 MiB stays (any 512 bytes in the small pool); otherwise all of it
counts as allocated. Neighbours that are free merge. With expandable segments each pool is one range of addresses, of
which pages of 2 or 20 MiB are mapped as they are needed, and segments of the other kind that it has been given; every
block is split.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

GRANULE = 512
MIB = 1 << 20
LARGEST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB
ENDLESS = 1 << 60
# Settings of the allocator under which it behaves otherwise than here.
UNKNOWN_SETTINGS = (
    "max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold", "cudaMallocAsync",
    "large_segment_size_mb",
)  # fmt: skip


@dataclass(frozen=True)
class Segment:
    """Memory reserved at `address`, made of blocks `(size, in use)` in the order of their addresses."""

    address: int
    small: bool
    blocks: tuple[tuple[int, bool], ...]
    expandable: bool = False


LEAVE = 0  # an event


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of memory between its neighbours `before` and `after` of the same segment."""

    address: int
    size: int
    pool: Pool
    free: bool = True
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(eq=False)
class Pool:
    """Free blocks, by size and address; with expandable segments, `tail` is what is not mapped yet."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    @property
    def page(self) -> int:
        """Bytes of a segment, or of a page that is mapped into an expandable one."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def put(self, block: Block) -> None:
        """Add a block that is free."""
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        del self.free[bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """The allocator of one device and one stream.

    Args:
        expandable: `expandable_segments:True`.
        segments: what is reserved already.
        descending: whether the driver places a new segment below those before it; of free blocks of one size, that at
            the lowest address is taken.
        range_bytes: addresses set aside for an expandable segment. How far a block can grow decides which is taken.

    Attributes:
        allocated_bytes, reserved_bytes: now.
        peak_allocated_bytes, peak_reserved_bytes: the highest so far.
        given: the blocks that are allocated in `segments`, by their addresses.
        leaving: those that `LEAVE` releases.
    """

    def __init__(
        self, *, expandable: bool = False, segments: Iterable[Segment] = (), descending: bool = False,
        range_bytes: int = ENDLESS,
    ) -> None:  # fmt: skip
        self.expandable, self.descending, self.range_bytes = expandable, descending, range_bytes
        self.small, self.large = Pool(True), Pool(False)
        self.allocated_bytes = self.reserved_bytes = 0
        self.next_address = self.lowest_address = 0
        self.given: dict[int, Block] = {}
        self.leaving: list[Block] = []
        self._load(sorted(segments, key=lambda s: s.address))
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes, which are more than 0."""
        size = -(-size // GRANULE) * GRANULE
        pool = self.small if size <= LARGEST_SMALL else self.large
        block = self._best_fit(pool, size) or (self._map(pool, size) if self.expandable else self._reserve(pool, size))
        pool.remove(block)
        remaining = block.size - size
        if remaining >= GRANULE if pool.small or self.expandable else remaining > LARGEST_SMALL:
            pool.put(_split(block, size))
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def has_room(self, size: int) -> bool:
        """Whether so many bytes take no new segment; of the small pool, whose segments are small, always."""
        size = -(-size // GRANULE) * GRANULE
        return size <= LARGEST_SMALL or self._best_fit(self.large, size) is not None

    def release(self, block: Block) -> None:
        """Take back what `allocate` returned."""
        block.free = True
        self.allocated_bytes -= block.size
        _merge(block)
        block.pool.put(block)

    def play(self, events: Iterable[int]) -> None:
        """`n > 0` asks for n bytes, as allocation 0, 1, ...; `-1 - k` frees allocation k. What is not freed stays.

        `LEAVE` frees what was there before and leaves.
        """
        made: list[Block] = []
        for event in events:
            if event < 0:
                self.release(made[-1 - event])
            elif event != LEAVE:
                made.append(self.allocate(event))
            else:
                while self.leaving:
                    self.release(self.leaving.pop())

    def reserve(self, size: int) -> None:
        """Ask for `size` bytes and give them back, cached: where segments grow, in one that does not."""
        if not self.expandable:
            self.release(self.allocate(size))
            return
        self._reserve(self.large, size)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes + size)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        place = bisect_left(pool.free, (size, -ENDLESS))
        if place == len(pool.free):
            return None
        if self.expandable:  # a block that can grow counts as large as it can become
            while place + 1 < len(pool.free) and _reach(pool.free[place + 1][2]) < _reach(pool.free[place][2]):
                place += 1
        return pool.free[place][2]

    def _reserve(self, pool: Pool, size: int) -> Block:
        if pool.small or size < OWN_SEGMENT:
            reserved = pool.page
        else:
            reserved = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        if self.descending:
            self.lowest_address -= reserved
        block = Block(self.lowest_address if self.descending else self.next_address, reserved, pool)
        if not self.descending:
            self.next_address += reserved
        self.reserved_bytes += reserved
        pool.put(block)
        return block

    def _map(self, pool: Pool, size: int) -> Block:
        block = self._growing(pool, size)
        if not block.mapped:
            self._map_pages(block, min(block.size, size))
        while block.size < size:
            following = block.after
            assert following is not None  # what is not mapped has no end
            self._map_pages(following, min(size - block.size, following.size))
            block = following
        return block

    def _growing(self, pool: Pool, size: int) -> Block:
        """The first stretch of free and unmapped blocks that has room, from the lowest address."""
        for _, unmapped in pool.unmapped:
            before = unmapped.before
            start = before if before is not None and before.free else unmapped
            room, block = 0, start
            while room < size and block is not None and block.free:
                room += block.size
                block = block.after  # type: ignore[assignment]
            if room >= size:
                return start
        return self._add_unmapped(pool, self.next_address, self._range(pool), None)

    def _range(self, pool: Pool) -> int:
        return -(-self.range_bytes // pool.page) * pool.page

    def _add_unmapped(self, pool: Pool, address: int, size: int, before: Block | None) -> Block:
        block = Block(address, size, pool, mapped=False, before=before)
        if before is not None:
            before.after = block
        insort(pool.unmapped, (address, block))
        self.next_address = max(self.next_address, address + size)
        return block

    def _map_pages(self, block: Block, size: int) -> None:
        pool = block.pool
        size = -(-size // pool.page) * pool.page
        pool.unmapped = [entry for entry in pool.unmapped if entry[1] is not block]
        if size < block.size:
            rest = _split(block, size)
            insort(pool.unmapped, (rest.address, rest))
        block.mapped = True
        self.reserved_bytes += size
        _merge(block)
        pool.put(block)

    def _load(self, segments: list[Segment]) -> None:
        self.lowest_address = min((s.address for s in segments), default=0)
        last: dict[bool, Block] = {}
        ends: dict[bool, int] = {}
        for segment in segments:
            pool = self.small if segment.small else self.large
            address, before = segment.address, None
            if segment.expandable:
                ends.setdefault(segment.small, address + self._range(pool))
                before = last.get(segment.small)
                if before is not None and before.address + before.size < address:
                    before = self._add_unmapped(pool, end := before.address + before.size, address - end, before)
            for size, used in segment.blocks:
                block = Block(address, size, pool, free=not used, before=before)
                if before is not None:
                    before.after = block
                if used:
                    self.allocated_bytes, self.given[address] = self.allocated_bytes + size, block
                else:
                    pool.put(block)
                self.reserved_bytes += size
                address, before = address + size, block
            if segment.expandable and before is not None:
                last[segment.small] = before
            self.next_address = max(self.next_address, address)
        for small, block in last.items():
            end = block.address + block.size
            if end < ends[small]:
                self._add_unmapped(block.pool, end, ends[small] - end, block)


def _reach(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _split(block: Block, size: int) -> Block:
    """Cut `block` down to `size`; the rest, a neighbour of it."""
    rest = Block(block.address + size, block.size - size, block.pool, mapped=block.mapped, before=block)
    rest.after = block.after
    if rest.after is not None:
        rest.after.before = rest
    block.after, block.size = rest, size
    return rest


def _merge(block: Block) -> None:
    """Let a free block swallow its free neighbours of the same kind."""
    before, after = block.before, block.after
    if before is not None and before.free and before.mapped == block.mapped:
        _take_out(before)
        block.address, block.size, block.before = before.address, block.size + before.size, before.before
        if block.before is not None:
            block.before.after = block
    if after is not None and after.free and after.mapped == block.mapped:
        _take_out(after)
        block.size, block.after = block.size + after.size, after.after
        if block.after is not None:
            block.after.before = block


def _take_out(block: Block) -> None:
    if block.mapped:
        block.pool.remove(block)


def unknown_settings() -> tuple[str, ...]:
    """The settings in force that the simulation does not know."""
    asked = " ".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return tuple(name for name in UNKNOWN_SETTINGS if name in asked)
