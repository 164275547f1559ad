"""`passes.allocator` against torch's own: the same figures after each of many random allocations and frees."""

from __future__ import annotations

import random

import pytest
import torch

from passes.allocator import MIB, CachingAllocator
from passes.run._torch import segments_that_do_not_grow
from planner.footprint import start_of
from tests.gpu.device import CUDA, ON_A_GPU, is_expandable

pytestmark = ON_A_GPU


@pytest.mark.parametrize("seed", range(20))
def test_it_allocates_and_reserves_what_torchs_allocator_does(seed: int) -> None:
    draw = random.Random(seed)
    expandable = is_expandable()
    resident = [torch.empty(int(2 ** draw.uniform(4, 24)), dtype=torch.uint8, device=CUDA) for _ in range(12)]
    del resident[::3]
    start = start_of(resident, CUDA)  # with holes
    assert start is not None
    ours = CachingAllocator(
        expandable=expandable, segments=start.segments, descending=start.descending, range_bytes=start.range_bytes
    )
    torch.cuda.reset_peak_memory_stats()
    if seed % 2:
        with segments_that_do_not_grow():
            torch.empty(300 * MIB, dtype=torch.uint8, device=CUDA)
        ours.reserve(300 * MIB)
    live = []
    for _ in range(400):
        if live and draw.random() < 0.48:
            tensor, block = live.pop(draw.randrange(len(live)))
            ours.release(block)
            del tensor
        else:
            size = int(2 ** draw.uniform(4, 27))
            live.append((torch.empty(size, dtype=torch.uint8, device=CUDA), ours.allocate(size)))
        assert ours.allocated_bytes == torch.cuda.memory_allocated()
        assert ours.reserved_bytes == torch.cuda.memory_reserved()
    assert ours.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert ours.peak_reserved_bytes == torch.cuda.max_memory_reserved()
