"""A schedule played through the simulated allocator, against `simulate`; `fit` against a device that is too small."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from passes.lower import Lowered
from planner import BudgetError, auto_checkpoint
from planner.fit import solve_to_fit
from planner.footprint import Start, footprint, unknown_settings
from planner.plan import Plan
from solvers.errors import MIB
from solvers.schedule import plain_order, with_frees
from solvers.simulate import simulate

EIGHT = 8  # the CPU's sizes are multiples of 64 bytes, the caching allocator's of 512
EMPTY = Start((), 0, 1 << 40, True, False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(48, 192), nn.GELU(), nn.Dropout(0.1), nn.Linear(192, 48))]
    model, sample = nn.Sequential(*layers).train(), torch.randn(1024, 48)
    free = auto_checkpoint(model, sample, check=False)
    return auto_checkpoint(model, sample, 0.7 * free.peak_bytes / MIB, check=False, time_limit=5)


def _larger(lowered: Lowered) -> Lowered:
    problem = lowered.problem
    ops = tuple(replace(op, workspace=EIGHT * op.workspace) for op in problem.ops)
    tensors = tuple(replace(t, bytes=EIGHT * t.bytes) for t in problem.tensors)
    return replace(lowered, problem=replace(problem, ops=ops, tensors=tensors, static_bytes=0))


def test_where_every_block_is_split_the_peak_is_that_of_the_referee(plan: Plan) -> None:
    assert plan.recomputed
    lowered = _larger(plan.prepared.lowered)
    for schedule in (plan.schedule, with_frees(plan.problem, plain_order(plan.problem))):
        found = footprint(lowered, {}, schedule, EMPTY)
        assert found.allocated_bytes == simulate(lowered.problem, schedule).peak_bytes
        assert found.reserved_bytes >= found.allocated_bytes


def test_what_is_reserved_decides_whether_a_plan_fits(plan: Plan) -> None:
    lowered = _larger(plan.prepared.lowered)
    prepared = replace(plan.prepared, lowered=lowered, profiles={}, start=EMPTY)
    plain = solve_to_fit(prepared, None)
    needed = prepared.footprint(plain.schedule)
    assert needed is not None and not plain.added_cost
    small = replace(EMPTY, room_bytes=needed.reserved_bytes - 4 * MIB)
    found = solve_to_fit(replace(prepared, start=small), None)
    smaller = prepared.footprint(found.schedule)
    assert smaller is not None and smaller.reserved_bytes <= small.room_bytes
    assert found.added_cost and "planned to reserve" in found.notes[-1]
    with pytest.raises(BudgetError, match="reserves"):
        solve_to_fit(replace(prepared, start=replace(EMPTY, room_bytes=MIB)), None)


def test_settings_that_are_not_simulated_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert unknown_settings() == ()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert unknown_settings() == ("max_split_size_mb",)
