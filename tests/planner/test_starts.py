"""Calls of other sizes under a budget: the search starts from what was decided before, and may be left out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from planner import BudgetError, Plan
from planner.decided import Decided
from planner.fit import solve_to_fit
from planner.starts import LIMIT_SHARE, MOST, Starts
from solvers.hunt import Hunt
from solvers.live import Live
from solvers.schedule import recomputes_of
from tests.planner.steps import SmallGPT, assert_same_gradients, plan, tight

LIMIT = 4.0


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 64, (4, length))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "planning anew")
        yield


def planned(length: int, share: float = 0.7, **options: Any) -> tuple[SmallGPT, Plan]:
    torch.manual_seed(0)
    model = SmallGPT(dropout=0.0)
    return model, tight(model, tokens(length), share, solver="auto", time_limit=LIMIT, **options)


def decided_for(chosen: Plan, model: SmallGPT, length: int) -> Decided:
    """What a training step of that length is decided to be; its gradients are the plain ones."""
    plain, data = copy.deepcopy(model), tokens(length)
    chosen.module(data).backward()
    plain(data).backward()
    assert_same_gradients(model, plain)
    model.zero_grad()
    found: Decided = chosen.module._plan_state.latest
    assert found.peak_bytes <= (chosen.budget_bytes or 0)
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("regions", ["whole", "blocks.*"])
def test_a_larger_size_s_decision_is_shared(regions: str) -> None:
    model, chosen = planned(32, on_new_shape="bucket", regions=regions)
    for length in (30, 28):
        found = decided_for(chosen, model, length)
        assert found.solver == "bucket" and found.baseline_peak_bytes > found.peak_bytes
        assert set(found.recomputed) <= set(chosen.recomputed)
    assert decided_for(chosen, model, 4).overhead == 0  # the plain step fits


@pytest.mark.slow
def test_a_size_above_all_that_were_planned_is_solved() -> None:
    model, chosen = planned(24, 0.9, on_new_shape="bucket")
    assert decided_for(chosen, model, 26).solver == "auto"
    assert decided_for(chosen, model, 25).solver == "bucket"


def test_hints_that_prefer_recomputes_are_asked_at_each_size() -> None:
    model, chosen = planned(32, on_new_shape="bucket", recompute=["blocks.0"])
    found = decided_for(chosen, model, 8)
    assert found.solver != "bucket" and found.recomputed
    assert found.peak_bytes < found.baseline_peak_bytes <= (chosen.budget_bytes or 0)


def test_the_search_has_a_share_of_the_time_and_starts_from_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, starts = [], []

    def solving(prepared: Any, *arguments: Any, warm_starts: Any = (), **options: Any) -> Any:
        limits.append(prepared.options.time_limit)
        starts.append(len(recomputes_of(prepared.problem, *warm_starts)) if warm_starts else 0)
        return solve_to_fit(prepared, *arguments, warm_starts=warm_starts, **options)

    monkeypatch.setattr("planner.starts.solve_to_fit", solving)
    model, chosen = planned(30)
    del limits[:], starts[:]
    cold = chosen.seconds["solve"]
    for length in (31, 29):
        assert decided_for(chosen, model, length).prepared.options.time_limit == LIMIT
    assert limits == [max(LIMIT_SHARE * LIMIT, 0.2 * cold)] * 2 and min(starts) > 0


def test_all_of_the_time_where_a_share_was_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def solving(prepared: Any, *arguments: Any, **options: Any) -> Any:
        limits.append(prepared.options.time_limit)
        if limits[-1] < LIMIT:
            raise BudgetError("nothing was found in time")
        return solve_to_fit(prepared, *arguments, **options)

    model, chosen = planned(30)
    monkeypatch.setattr("planner.starts.solve_to_fit", solving)
    decided_for(chosen, model, 29)
    assert limits[0] < limits[1] == LIMIT


@pytest.mark.slow
def test_another_model_s_decisions_are_no_start() -> None:
    starts = Starts()
    _, chosen = planned(16)
    starts.add(chosen)
    assert [len(starts._alike(chosen.problem)) for _ in range(2)] == [1, 1]
    torch.manual_seed(0)
    other = plan(SmallGPT(dropout=0.0, layers=4), tokens(16))
    assert not starts._alike(other.problem)
    for _ in range(2 * MOST):
        starts.add(chosen)
    assert len(starts.known) == MOST


def test_a_start_that_does_not_fit_is_repaired() -> None:
    _, chosen = planned(32, 0.8)
    problem, schedule = chosen.problem, chosen.schedule
    lower = problem.static_bytes + (chosen.peak_bytes - problem.static_bytes) * 9 // 10
    hunt = Hunt(problem, lower, float("inf"), 0, None)
    assert Live(problem, recomputes_of(problem, schedule)).peak_bytes > lower
    hunt.start_from([schedule], float("inf"))
    assert hunt.live is not None and hunt.live.peak_bytes <= lower
    hunt = Hunt(problem, chosen.baseline_peak_bytes, float("inf"), 0, None)
    hunt.start_from([schedule], float("inf"))
    assert hunt.cost == 0  # nothing is needed there
