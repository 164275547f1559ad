"""A schedule played through the simulated allocator, against `simulate`; `fit` against a device that is too small."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from passes.allocator import Segment, unknown_settings
from passes.lower import Lowered
from passes.run.arena import Arena
from planner import BudgetError, auto_checkpoint
from planner.arena import aimed_bytes, best_arena
from planner.events import Order
from planner.fit import DEARER, _Search, solve_to_fit
from planner.footprint import Footprint, Start, footprint
from planner.optimizer import state_sizes
from planner.plan import Plan
from planner.preference import solve_step
from planner.prepared import Prepared
from solvers.errors import MIB
from solvers.schedule import plain_order, with_frees
from solvers.simulate import simulate
from solvers.solution import Status

EIGHT = 8  # the CPU's sizes are multiples of 64 bytes, the caching allocator's of 512
EMPTY = Start((), 0, 1 << 40, True, False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(48, 192), nn.GELU(), nn.Dropout(0.1), nn.Linear(192, 48))]
    model, sample = nn.Sequential(*layers).train(), torch.randn(1024, 48)
    free = auto_checkpoint(model, sample, check=False)
    return auto_checkpoint(model, sample, 0.7 * free.peak_bytes / MIB, check=False, time_limit=5)


@pytest.fixture(scope="module")
def mixed() -> Plan:
    """Tensors of many sizes."""
    torch.manual_seed(0)
    widths = (48, 192, 96, 320, 64, 256, 48, 160, 224, 48)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.GELU(), nn.Dropout(0.1))]
    model, sample = nn.Sequential(*layers).train(), torch.randn(1024, 48)
    free = auto_checkpoint(model, sample, check=False)
    return auto_checkpoint(model, sample, 0.7 * free.peak_bytes / MIB, check=False, time_limit=5)


def _larger(lowered: Lowered, factor: int = EIGHT) -> Lowered:
    problem = lowered.problem
    ops = tuple(replace(op, workspace=factor * op.workspace) for op in problem.ops)
    tensors = tuple(replace(t, bytes=factor * t.bytes) for t in problem.tensors)
    return replace(lowered, problem=replace(problem, ops=ops, tensors=tensors, static_bytes=0))


def test_where_every_block_is_split_the_peak_is_that_of_the_referee(plan: Plan) -> None:
    assert plan.recomputed
    lowered = _larger(plan.prepared.lowered)
    for schedule in (plan.schedule, with_frees(plan.problem, plain_order(plan.problem))):
        found = footprint(Order(lowered, {}, schedule).steps, EMPTY)
        assert found.allocated_bytes == simulate(lowered.problem, schedule).peak_bytes
        assert found.reserved_bytes >= found.allocated_bytes


def test_what_is_reserved_decides_whether_a_plan_fits(plan: Plan) -> None:
    lowered = _larger(plan.prepared.lowered)
    prepared = replace(plan.prepared, lowered=lowered, profiles={}, start=EMPTY)
    plain = solve_to_fit(prepared, None)
    needed = prepared.worst_footprint(plain.schedule, prepared.reservation(plain.schedule, None))
    assert not plain.added_cost
    small = replace(EMPTY, room_bytes=needed.reserved_bytes - 4 * MIB)
    found = solve_to_fit(replace(prepared, start=small), None)
    smaller = prepared.worst_footprint(found.schedule, prepared.reservation(found.schedule, None))
    assert smaller.reserved_bytes <= small.room_bytes
    assert found.added_cost and "planned to reserve" in found.notes[-1]
    with pytest.raises(BudgetError, match="reserves"):
        solve_to_fit(replace(prepared, start=replace(EMPTY, room_bytes=MIB)), None)


def test_an_optimizers_state_and_gradients_from_before_are_there(plan: Plan) -> None:
    lowered = _larger(plan.prepared.lowered)
    own = footprint(Order(lowered, {}, plan.schedule).steps, EMPTY)
    sizes = tuple(EIGHT * g for g in lowered.gradient_bytes)
    trained = sum(p.numel() * p.element_size() for p in plan.module.parameters())
    assert EIGHT * trained == sum(sizes)
    lowered = replace(lowered, gradient_bytes=sizes)
    for state in (sum(sizes) // 2, 2 * sum(sizes), 2 * sum(sizes) + 512 * 3):
        found = footprint(Order(lowered, {}, plan.schedule, state).steps, EMPTY)
        assert found.allocated_bytes == own.allocated_bytes + state
    before = footprint(Order(replace(lowered, accumulated_bytes=sum(sizes)), {}, plan.schedule).steps, EMPTY)
    assert before.allocated_bytes == own.allocated_bytes + sum(sizes)
    there = Order(replace(lowered, accumulated_bytes=sum(sizes)), {}, plan.schedule, before=sizes).steps
    assert footprint(there, EMPTY, before=sizes).allocated_bytes == before.allocated_bytes
    arena = (sum(sizes) + (64 << 20),)
    assert footprint(there, EMPTY, 0, arena, sizes).reserved_bytes >= sum(sizes) + sum(arena)


@pytest.mark.parametrize("state", [0, 512, 4096, 40960 + 512])
def test_the_blocks_of_a_state_add_up(state: int) -> None:
    sizes = state_sizes(state, (512, 4096, 0, 12800))
    assert sum(sizes) == state and all(size % 512 == 0 and size for size in sizes)
    assert state_sizes(state, ()) == ((state,) if state else ())


@pytest.mark.parametrize("expandable", [False, True])
def test_an_arena_lowers_what_is_reserved_within_what_may_be_allocated(mixed: Plan, expandable: bool) -> None:
    start = replace(EMPTY, expandable=expandable)
    steps = Order(_larger(mixed.prepared.lowered, 40 if expandable else 160), {}, mixed.schedule).steps

    def measure(arena: Arena) -> Footprint:
        return footprint(steps, start, arena=arena)

    plain = measure(())
    arenas = [best_arena(measure, start, len(steps[1]), limit) for limit in (plain.allocated_bytes, 1 << 40)]
    tight, free = map(measure, arenas)
    assert tight.allocated_bytes <= plain.allocated_bytes
    assert free.reserved_bytes <= tight.reserved_bytes <= plain.reserved_bytes
    if expandable:  # they merge, but grow by 20 MiB
        assert plain.reserved_bytes >= tight.reserved_bytes + 4 * MIB
    else:
        assert plain.reserved_bytes > 1.2 * plain.allocated_bytes > 1.04 * tight.reserved_bytes
    assert best_arena(measure, replace(start, segments=(Segment(0, False, ((1 << 40, False),)),)), 100, 1 << 40) == ()


def test_what_is_reserved_fits_once_it_is_asked_for_at_once(mixed: Plan) -> None:
    lowered = _larger(mixed.prepared.lowered, 160)
    start = replace(EMPTY, expandable=False)
    prepared = replace(mixed.prepared, lowered=lowered, profiles={}, start=start)
    schedule = with_frees(lowered.problem, plain_order(lowered.problem))
    reservation = prepared.reservation(schedule, None)
    left_alone, asked_for = prepared.footprint(schedule), prepared.worst_footprint(schedule, reservation)
    assert left_alone is not None
    assert asked_for.reserved_bytes < left_alone.reserved_bytes - 2 * MIB
    room = replace(start, room_bytes=asked_for.reserved_bytes)
    assert solve_to_fit(replace(prepared, start=room), None).added_cost == 0


@pytest.fixture
def fragmented(mixed: Plan) -> tuple[Prepared, int]:
    """`mixed` on an allocator whose segments do not grow, and what its plain step allocates there."""
    lowered = _larger(mixed.prepared.lowered, 16)
    prepared = replace(mixed.prepared, lowered=lowered, profiles={}, start=replace(EMPTY, expandable=False))
    plain = with_frees(lowered.problem, plain_order(lowered.problem))
    return prepared, prepared.worst_footprint(plain).allocated_bytes


@pytest.mark.slow
def test_of_schedules_that_cost_about_as_much_one_reserves_less(fragmented: tuple[Prepared, int]) -> None:
    prepared, plain_bytes = fragmented
    lower = 0
    for share in (55, 50, 52, 48):  # which schedule the solver comes upon, of those that cost about as much, is luck
        budget = plain_bytes * share // 100
        cheapest, found = solve_step(prepared, budget), solve_to_fit(prepared, budget)
        schedules = cheapest.schedule, found.schedule
        before, after = (prepared.worst_footprint(s, prepared.reservation(s, budget)) for s in schedules)
        if lower or before.reserved_bytes <= aimed_bytes(before.allocated_bytes, expandable=False):
            continue
        assert after.allocated_bytes <= budget and after.reserved_bytes <= before.reserved_bytes
        assert found.added_cost - cheapest.added_cost <= DEARER * prepared.problem.step_cost
        lower += after.reserved_bytes < before.reserved_bytes
    assert lower


def test_what_fits_only_with_segments_asked_for_in_advance_is_judged_with_them(
    fragmented: tuple[Prepared, int],
) -> None:
    prepared, plain_bytes = fragmented
    for share, fits in ((65, False), (200, True)):
        budget = plain_bytes * share // 100
        schedule, search = solve_step(prepared, budget).schedule, _Search(prepared, budget, None, ())
        plain = prepared.worst_footprint(schedule)
        assert (plain.allocated_bytes <= budget) == fits
        assert search._needed(schedule) == (plain if fits else search._least(schedule))


def test_where_nothing_need_be_recomputed_nothing_is_to_reserve_less(fragmented: tuple[Prepared, int]) -> None:
    prepared, plain_bytes = fragmented
    assert solve_to_fit(prepared, None).added_cost == solve_to_fit(prepared, plain_bytes).added_cost == 0


def test_what_is_proved_is_proved_of_all_that_the_budget_allows(fragmented: tuple[Prepared, int]) -> None:
    prepared, plain_bytes = fragmented
    for share in (80, 65):  # blocks that are not split are too much
        budget = plain_bytes * share // 100
        cheapest, found = solve_step(prepared, budget), solve_to_fit(prepared, budget)
        assert prepared.worst_footprint(cheapest.schedule).allocated_bytes > budget
        assert found.added_cost > cheapest.added_cost
        assert (found.bound, found.family) == (cheapest.bound, cheapest.family) and found.status is Status.FEASIBLE


def test_settings_that_are_not_simulated_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert unknown_settings() == ()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert unknown_settings() == ("max_split_size_mb",)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "large_segment_size_mb:2")
    assert "large_segment_size_mb" in unknown_settings()
