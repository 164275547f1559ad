"""The integer program, refined until its solution is a schedule or its bound is close enough.

Heuristics find a plan; the staged program (`solvers.staged`) bounds it. The first program has a few end slots,
where most bytes are needed whatever is kept. Its solution, turned into a schedule, may exceed the budget between
two end slots: the slots where it does become end slots of the next program. Every solution is repaired by greedy
evictions, polished by local search and offered as the answer; every program's dual bound counts, the largest wins.
Where the first program leaves more than the gap, the plan is annealed (`solvers.turns`), which also looks for one
where greedy found none; then relaxations with windows of more and more stages are solved (`solvers.climb`), for bounds
and for the plans that they are rounded to (`solvers.rounding`), and later programs have windows, too. Where much is
open, relaxations come before annealing, or beside it where its walk is compiled, and nothing is solved for integers.
What is left of the time goes to local search and annealing, until many rounds have found nothing. Where local search is
compiled, it goes on from greedy's plan as soon as there is a bound, so that integers often need not meet the gap.

Small problems are searched exactly first (`solvers.exact`), which is the answer, or a bound where it gives up.

The clock: greedy and the search for the smallest peak end at shares of the time limit; a program gets so many seconds
whatever the limit is, so that a longer solve does what a shorter one did, and then more.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .base import CLOCK, Effort, Solver
from .bounds import floor_bytes
from .climb import WIDE_POLISH_SHARE, climb_and_anneal
from .descent import Reached, cheapest_descent, repair
from .end_slots import first_ends, forward_binds
from .engine import Answer, StagedRun
from .errors import BudgetError
from .exact import exact_schedule
from .hunt import LEAST_SECONDS, LOWEST_SHARE, Hunt, anneal_each_way, anneal_for, look_exactly, look_lower, polish_on
from .known import lowest_known, recalled
from .live import Live
from .minimum import (
    EXACT_SHARE,
    KNOWN_SHARE,
    MINIMUM_SHARE,
    budget_error,
    early,
    recall_or_refuse,
    smallest_of,
    smallest_peak,
)  # fmt: skip
from .problem import LARGE, Problem
from .rounding import rounded
from .solution import EVERY, Solution, cheapest_fit, solution
from .staged import StagedModel
from .turns import WAYS

ALL_SCHEDULES = f"{EVERY} that run the required ops in this order, whatever they recompute, however often"
FIRST_ENDS = 5
FEWEST_ENDS = 2
PLANLESS_SIZE = 2500
NEW_ENDS = 4
FIRST_ROUNDS = 3
PROGRAM_SECONDS = 10.0
PROGRAM_GROWTH = 1.5
PROGRAM_SHARE = 0.8
FINISHED_SECONDS = 3.0  # for integers where the gap is met
PLANLESS_SHARE = 0.25
BUILD_SHARE = 0.4
GREEDY_SHARE = 0.2
LARGE_GREEDY_SHARE = 0.5
FIRST_SHARE = 0.75
POLISH_SHARE = 0.2
FIRST_ANNEAL_SHARE = 0.2
LOWER_SHARE = 0.3


def hunt(problem: Problem, budget_bytes: int, effort: Effort, bound: int) -> Hunt:
    """Alternate between finding and proving, from a bound known, until the gap or the time is used up."""
    gap_cost = int(effort.gap * problem.step_cost)
    state = Hunt(problem, budget_bytes, effort.until(), gap_cost, effort.report, bound=bound)
    greedy_until = effort.until(LARGE_GREEDY_SHARE if len(problem.ops) > LARGE else GREEDY_SHARE)
    state.start_from(effort.warm_starts, greedy_until)
    # Where the forward's own peak binds, annealing and a program find plans where no descent does.
    binds, begin = forward_binds(problem, budget_bytes), time.monotonic()
    if binds and state.fast and state.anneal(greedy_until):
        greedy_until = min(greedy_until, 2 * time.monotonic() - begin)  # as long again
    first_by = greedy_until if binds else effort.until(FIRST_SHARE)
    reached = state.reached = Reached(early(first_by))
    state.offer(cheapest_descent(problem, budget_bytes, deadline=greedy_until, first_by=first_by, reached=reached))
    if time.monotonic() > greedy_until:
        state.notes[CLOCK] = None
    state.tell("greedy")
    if state.live is None:
        look_exactly(state, effort)
    if not state.impossible:
        if state.live is None:
            anneal_for(state, FIRST_ANNEAL_SHARE)
        if state.live is None and state.known_bytes < 0:  # a descent as deep as it goes may fit
            look_lower(state, state.until(LOWER_SHARE), again=True)
        refine(state, effort)
    return state


def refine(state: Hunt, effort: Effort) -> None:
    """Solve programs with more and more end slots, then go on with local search.

    Where greedy found no plan, the first programs may: its solution often fits where no descent from scratch does.
    """
    in_time = state.seconds_left > LEAST_SECONDS
    ends = first_ends(state.problem, first_count(state), state.budget_bytes) if in_time else ()
    number, climbed = 0, False
    while not state.finished and state.seconds_left > LEAST_SECONDS:
        number += 1
        more = refine_once(state, ends, number)
        if state.live is None and (number > 1 or not more) and state.known_bytes < 0:
            look_lower(state, effort.until(LOWEST_SHARE))
        if state.live is not None and not climbed:
            climbed, more = True, (*more, *climb_and_anneal(state))
            if state.wide:
                break
        late = number == 1 and state.known_bytes >= 0 and not state.impossible  # a plan since the first program
        if not more and not late:
            break
        ends = tuple(sorted({*ends, *more}))
    if state.live is None and state.known_bytes < 0:
        look_lower(state, effort.until(LOWEST_SHARE))
    polish_on(state)
    if not state.finished and state.seconds_left <= LEAST_SECONDS:
        state.notes[CLOCK] = None


def first_count(state: Hunt) -> int:
    """About how many end slots the first program has: few where it is large, or must be solved for want of a plan."""
    size = len(state.problem.ops)
    most = FIRST_ENDS if size <= LARGE else FEWEST_ENDS
    return most if state.live is not None else max(FEWEST_ENDS, min(most, PLANLESS_SIZE // size))


def refine_once(state: Hunt, ends: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Solve the program of these end slots and polish; returns new end slots, none where no program is to follow."""
    known = state.bound
    cost_limit = math.inf if state.live is None else state.cost
    try:
        until = state.until(BUILD_SHARE)
        model = StagedModel(state.problem, state.budget_bytes, ends, until, cost_limit, windows=number > 1)
    except TimeoutError:
        state.notes[CLOCK] = None
        return ()
    answer = bound_with(state, model, number)
    if answer.infeasible or answer.failed:
        return ()
    if state.wide and state.fast:  # annealing finds cheaper plans beside the relaxations
        state.tell(f"{len(ends)} stages")
        return ()
    extra = offer_solution(state, model, answer)
    state.tell(f"{len(ends)} stages")
    if answer.timed_out and state.bound == known:  # a larger program would do no better
        return ()
    # Some rounds also where the gap is met: they are cheap beside the proof, and often find a better plan.
    for _ in range(1 if state.wide else FIRST_ROUNDS):
        state.polish(WIDE_POLISH_SHARE if state.wide else POLISH_SHARE)
    if state.fast and not state.wide:
        anneal_each_way(state, state.until(POLISH_SHARE))
    extra = extra or first_ends(state.problem, 2 * len(ends), state.budget_bytes)
    return () if set(extra) <= set(ends) else extra


def bound_with(state: Hunt, model: StagedModel, number: int) -> Answer:
    """Solve one program, starting from the best plan; compiled local search may meet the gap before the integers."""
    large = len(state.problem.ops) > LARGE
    seconds = math.inf if large else PROGRAM_SECONDS * PROGRAM_GROWTH ** (number - 1)
    share = PROGRAM_SHARE if state.live is not None or state.known_bytes >= 0 else PLANLESS_SHARE
    seconds = min(seconds, share * state.seconds_left)
    run = StagedRun(model, time.monotonic() + seconds)
    answer = run.relax()
    state.take_bound(model, answer)
    if state.live is not None and state.fast:
        if not state.finished:
            state.polish(POLISH_SHARE)
        if state.finished:
            run.deadline = min(run.deadline, time.monotonic() + FINISHED_SECONDS)
    incumbent = model.values_of(state.live) if state.live is not None else None
    answer = run.integers(answer, state.gap_cost // 10, incumbent)
    state.take_bound(model, answer)
    state.impossible |= answer.certified and state.live is None
    state.notes.update(dict.fromkeys(answer.notes))
    if answer.timed_out:
        state.notes[CLOCK] = None
    return answer


def offer_solution(state: Hunt, model: StagedModel, answer: Answer) -> tuple[int, ...]:
    """Make the program's solution a plan; returns the slots at which it needed more than the budget."""
    if answer.values is None:
        return ()
    live = model.to_live(answer.values)
    over = tight_slots(live, state.budget_bytes)
    if state.wide:
        state.offer(rounded(model, answer.values, state.until(WIDE_POLISH_SHARE)))
    elif repair(live, state.budget_bytes, state.deadline):
        state.offer(live)
    elif state.live is None:
        for _ in WAYS:
            state.anneal(state.until(FIRST_ANNEAL_SHARE), live)
    return over


def tight_slots(live: Live, budget_bytes: int) -> tuple[int, ...]:
    """Slots over the budget, the worst first, no two of them close to each other."""
    problem = live.problem
    excess = live.total + (problem.static_bytes - budget_bytes)
    apart = max(1, len(problem.ops) // 80)
    chosen: list[int] = []
    for s in np.argsort(-excess, kind="stable").tolist():
        if excess[s] <= 0 or len(chosen) == NEW_ENDS:
            break
        if all(abs(s - c) >= apart for c in chosen):
            chosen.append(int(s))
    return tuple(chosen)


@dataclass(frozen=True)
class Ilp(Solver):
    """Heuristics bounded by the staged integer program."""

    name: ClassVar[str] = "ilp"

    def search(self, problem: Problem, budget_bytes: int, plain: Solution, effort: Effort) -> Solution:
        return search_with_proof(problem, budget_bytes, self.name, effort)


def search_with_proof(problem: Problem, budget_bytes: int, name: str, effort: Effort) -> Solution:
    """What `ilp` and `auto` share: exact if tiny, else the hunt."""
    exact = exact_schedule(problem, budget_bytes, effort.until(EXACT_SHARE))
    if exact.schedule is not None:
        return solution(problem, exact.schedule, name, bound=exact.bound, family=ALL_SCHEDULES)
    if exact.complete:
        raise _exact_error(problem, budget_bytes, effort)
    floor = floor_bytes(problem)
    if floor > budget_bytes:
        until = min(time.monotonic() + MINIMUM_SHARE * effort.time_limit, effort.until(LOWEST_SHARE))
        lowest = smallest_peak(problem, floor, until).live.peak_bytes
        raise budget_error(budget_bytes, int(min(lowest, lowest_known(problem))), floor)
    state = hunt(problem, budget_bytes, effort, exact.bound)
    # A state holds the recomputes of a slot in one order only, so a warm start may fit where its state does not.
    found = () if state.live is None else (state.live.schedule(),)
    schedules = (*found, *recalled(problem, budget_bytes), *state.lowest, *effort.warm_starts)
    best = cheapest_fit(problem, budget_bytes, name, schedules)
    if best is None:
        floor = max(floor, budget_bytes + 1 if state.impossible else 0)
        hurried = CLOCK in state.notes and not state.impossible
        best = recall_or_refuse(
            problem, budget_bytes, name, state.reached, state.known_bytes, floor, hurried=hurried
        )  # fmt: skip
    notes = (*state.notes, *best.notes)
    return solution(problem, best.schedule, name, bound=state.bound, family=ALL_SCHEDULES, notes=notes)


def _exact_error(problem: Problem, budget_bytes: int, effort: Effort) -> BudgetError:
    """The exact search found that nothing fits; the smallest peak is searched for in the time that is left."""
    smallest = smallest_of(problem, effort.until(KNOWN_SHARE), effort.until(LOWEST_SHARE))
    return budget_error(budget_bytes, smallest.minimum_bytes, max(smallest.floor_bytes, budget_bytes + 1))
