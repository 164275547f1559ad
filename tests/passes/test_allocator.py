"""The simulated caching allocator: what torch's own counted for the same requests, and what must hold of any."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from passes.allocator import MIB, Block, CachingAllocator, Segment
from passes.tape import Tape

# Peaks of allocated and reserved bytes by torch 2.11's allocator for `requests(seed)`, by default and with
# expandable segments. tests/gpu/test_allocator.py compares after each request.
TORCH = {
    0: ((288_840_704, 442_499_072), (288_437_760, 339_738_624)),
    1: ((476_634_112, 872_415_232), (476_228_096, 505_413_632)),
    2: ((381_208_576, 432_013_312), (379_354_624, 423_624_704)),
    3: ((556_265_472, 801_112_064), (556_157_952, 677_380_096)),
    4: ((578_677_760, 677_380_096), (577_950_720, 614_465_536)),
    5: ((444_104_192, 775_946_240), (444_100_608, 490_733_568)),
}  # fmt: skip


def requests(seed: int, count: int = 400) -> Iterator[tuple[str, int]]:
    """`("allocate", bytes)` and `("free", position among what is live)`."""
    draw, live = random.Random(seed), 0
    for _ in range(count):
        if live and draw.random() < 0.48:
            yield "free", draw.randrange(live)
            live -= 1
        else:
            yield "allocate", int(2 ** draw.uniform(4, 27))
            live += 1


def play(allocator: CachingAllocator, seed: int) -> list[Block]:
    """What is live at the end."""
    live: list[Block] = []
    for kind, number in requests(seed):
        if kind == "free":
            allocator.release(live.pop(number))
        else:
            live.append(allocator.allocate(number))
    return live


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", TORCH)
def test_peaks_are_those_of_torch(seed: int, expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    play(allocator, seed)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == TORCH[seed][expandable]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_never_overlap_and_all_come_back(seed: int, expandable: bool, descending: bool) -> None:
    allocator = CachingAllocator(expandable=expandable, descending=descending)
    live = play(allocator, seed)
    ranges = sorted((b.address, b.address + b.size) for b in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert allocator.allocated_bytes == sum(b.size for b in live) <= allocator.reserved_bytes
    assert allocator.reserved_bytes % (2 * MIB) == 0
    for block in live:
        allocator.release(block)
    free = [block for pool in (allocator.small, allocator.large) for _, _, block in pool.free]
    assert allocator.allocated_bytes == 0
    assert sum(b.size for b in free) == allocator.reserved_bytes
    assert all(b.before is None and (b.after is None or not b.after.mapped) for b in free), "neighbours did not merge"


def test_a_large_block_is_split_only_where_more_than_a_mib_stays() -> None:
    default, growing = CachingAllocator(), CachingAllocator(expandable=True)
    assert [a.allocate(19 * MIB + 1).size for a in (default, growing)] == [20 * MIB, 19 * MIB + 512]
    default, growing = CachingAllocator(), CachingAllocator(expandable=True)
    assert [a.allocate(9 * MIB).size for a in (default, growing)] == [9 * MIB, 9 * MIB]
    assert default.reserved_bytes == growing.reserved_bytes == 20 * MIB


def test_what_is_reserved_at_the_start_is_used_before_more_is_reserved() -> None:
    hole = Segment(1 << 30, False, ((8 * MIB, True), (6 * MIB, False), (6 * MIB, True)))
    for expandable in (False, True):
        allocator = CachingAllocator(segments=[hole], expandable=expandable)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (14 * MIB, 20 * MIB)
        assert allocator.allocate(6 * MIB).address == (1 << 30) + 8 * MIB
        assert allocator.reserved_bytes == 20 * MIB
        allocator.allocate(2 * MIB)
        assert allocator.reserved_bytes == 40 * MIB


def test_where_segments_grow_one_that_does_not_is_as_large_as_it_is_asked_for() -> None:
    allocator = CachingAllocator(expandable=True)  # torch 2.11 and 2.15 on the hollow GPU: the same figures
    allocator.allocate(3 * MIB)
    allocator.reserve(38 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.reserved_bytes) == (41 * MIB, 58 * MIB)
    inside = allocator.allocate(30 * MIB)
    assert allocator.allocate(7 * MIB + 512).address == inside.address + 30 * MIB
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (40 * MIB + 512, 58 * MIB)
    allocator.allocate(18 * MIB)  # segments grow by 20 MiB: 17 are left of the first
    assert allocator.reserved_bytes == 78 * MIB


@pytest.mark.parametrize(("range_mib", "taken"), [(100, 62), (1 << 20, 0)])
def test_of_two_free_blocks_the_one_that_can_become_less_large_is_taken(range_mib: int, taken: int) -> None:
    allocator = CachingAllocator(expandable=True, range_bytes=range_mib * MIB)
    first = allocator.allocate(60 * MIB)
    allocator.allocate(2 * MIB)
    allocator.release(first)  # 60 MiB at the beginning; 18 behind, which can grow to the end of the range
    assert allocator.allocate(10 * MIB).address == taken * MIB
    allocator.allocate(90 * MIB)
    assert allocator.reserved_bytes <= (180 if range_mib == 100 else 160) * MIB


def test_a_tapes_workspace_is_its_highest_point_above_what_it_returns() -> None:
    # 1000 B of workspace, the result, 600 B more; the first goes, then the last.
    tape = Tape((1000, 4096, 600, -1, -3), (1,))
    assert tape.workspace_bytes(512) == 1024 + 1024
    assert Tape((4096,), (0,)).workspace_bytes(512) == 0
    assert Tape((), (None,)).workspace_bytes(512) == 0
