"""Plans rounded from relaxations: they fit, and are cheaper than descents where descents are far off."""

from __future__ import annotations

import math
import time

import pytest

from solvers.bounds import floor_bytes
from solvers.climb import offer_rounded
from solvers.descent import cheapest_descent
from solvers.end_slots import first_ends
from solvers.engine import Answer, bound_staged
from solvers.hunt import Hunt
from solvers.live import Live
from solvers.rounding import rounded
from solvers.staged import StagedModel
from tests.bench.families import FAMILIES

from .oracles import replay
from .strategies import seeded_problem


def relaxed(name: str, share: int, count: int) -> tuple[StagedModel, Answer]:
    """A relaxation with windows, solved."""
    problem = FAMILIES[name]()
    budget = Live(problem).peak_bytes * share // 100
    model = StagedModel(problem, budget, first_ends(problem, count, budget), windows=True)
    return model, bound_staged(model, 60.0)


@pytest.mark.parametrize("seed", range(30))
def test_a_rounded_plan_is_a_schedule_that_fits(seed: int) -> None:
    problem = seeded_problem(seed)
    budget = (floor_bytes(problem) + Live(problem).peak_bytes) // 2
    model = StagedModel(problem, budget, first_ends(problem, 3, budget), windows=True)
    answer = bound_staged(model, 60.0)
    live = rounded(model, answer.values, math.inf) if answer.values is not None else None
    if live is None:
        return
    seen = replay(problem, live.schedule())
    assert seen.peak_bytes <= budget
    assert seen.added_cost == live.cost


def test_far_below_the_plain_peak_it_is_cheaper_than_descents() -> None:
    """Descents come to 37.8 % of the step, rounding to 31.8."""
    model, answer = relaxed("layered-small", 20, 6)
    assert answer.values is not None
    descents = cheapest_descent(model.problem, model.budget_bytes)
    live = rounded(model, answer.values, math.inf)
    assert descents is not None
    assert live is not None
    assert live.cost < 0.9 * descents.cost
    assert live.recomputes() == rounded(model, answer.values, math.inf).recomputes()  # type: ignore[union-attr]


def test_a_hunt_takes_what_a_relaxation_was_rounded_to() -> None:
    model, answer = relaxed("layered-small", 20, 3)
    problem, budget = model.problem, model.budget_bytes
    descents = cheapest_descent(problem, budget)
    assert answer.values is not None
    assert descents is not None
    state = Hunt(problem, budget, time.monotonic() + 30, 0, None, live=descents)
    known = state.cost
    offer_rounded(state, model, answer, math.inf)
    assert state.cost < known
    assert state.rounds == 1


def test_a_deadline_that_has_passed_leaves_nothing_to_round() -> None:
    model, answer = relaxed("transformer-2", 60, 3)
    assert answer.values is not None
    assert rounded(model, answer.values, time.monotonic() - 1) is None
