"""Solving under the user's hints.

`save` and `never_recompute` are in the Problem: the ops they name may not run again. `recompute` is a preference, met
in two moves. The solvers see the Problem with those ops free of charge, so that what the budget asks for is taken from
them first. Then every result of theirs that is still kept for the backward is dropped and computed again right
before its first read there, as long as the step stays within the budget (everything, without one).

The bound of the first move holds for the cost of all *other* recompute of any schedule. With what the preferred ops
cost in the answer added, it bounds every schedule that runs them at least as often as the answer does: that is the
family which the answer names.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from solvers import Report, minimum_budget, solve
from solvers.bounds import floor_bytes
from solvers.errors import MIB, BudgetError, shown_minimum
from solvers.known import RUNS, fallbacks, remember
from solvers.live import Live
from solvers.minimum import Minimum, budget_error
from solvers.problem import Problem
from solvers.schedule import Schedule, computes, recomputes_of, with_frees
from solvers.simulate import simulate
from solvers.solution import Solution, plain_solution, solution

from .options import Options
from .prepared import Prepared, lower_step
from .regions.emit import settled

AS_OFTEN = "all schedules that run the ops of the recompute hints at least as often as this one"
PREFERRED_SHARE = 0.6
LEAST_SHARE = 0.1  # of the time limit, for the plain question, however long the other took
SHARE_WITHOUT = 0.25
SMALLEST = "what the search found does not fit where it can run; this plan has the smallest peak known"


def solve_step(
    prepared: Prepared,
    budget_bytes: int | None,
    *,
    solver: str | None = None,
    report: Report | None = None,
    warm_starts: tuple[Schedule, ...] = (),
) -> Solution:
    """The cheapest schedule found for `budget_bytes` (None: no limit) under the hints, by `solver` if one is named.

    Raises:
        BudgetError: nothing found fits; says so where the hints narrow what fits.
    """
    problem, preferred = prepared.problem, prepared.preferred
    options = replace(prepared.options, solver=solver or prepared.options.solver)
    try:
        found = solve_preferring(problem, preferred, budget_bytes, options, report, warm_starts)
    except BudgetError as error:
        smallest = _smallest_within(prepared, budget_bytes, error, error.minimum_bytes)
        if smallest is None:
            raise error from error.__cause__
        found = smallest
    try:
        found = placed_within(prepared, found, budget_bytes)
    except BudgetError as error:
        smallest = _smallest_within(prepared, budget_bytes, error, budget_bytes)
        if smallest is None:
            raise error from error.__cause__
        found = smallest
    binding = options.hints.binding
    if binding and found.bound is not None and found.added_cost:
        found = replace(found, family=f"{found.family}, under {binding}")
    return found


def placed(prepared: Prepared, schedule: Schedule) -> Schedule:
    """The same recomputes, each where it can run: within its own region, and not between a step's two halves."""
    if prepared.regions is not None:
        return settled(prepared.regions.composed, schedule)
    return _in_the_halves(prepared.problem, schedule)


def _in_the_halves(problem: Problem, schedule: Schedule) -> Schedule:
    """What stands between the end of the forward, which hands its results over, and the backward's start runs in one of
    them: in the forward it would hold these results. So it follows the start, or goes first where that takes less.
    """
    order = computes(schedule)
    begins = order.index(problem.num_forward)
    first_run = {i: place for place, i in reversed([*enumerate(order[:begins])])}
    last = max(first_run.values(), default=-1)  # of the forward itself
    between = order[last + 1 : begins]
    if not between or problem.ops[order[last]].outputs:  # nothing is handed over
        return schedule
    first = (*order[: last + 1], order[begins], *between, *order[begins + 1 :])
    second = (*order[:last], *between, order[last], *order[begins:])
    either = [with_frees(problem, o) for o in (first, second)]
    return min(either, key=lambda s: simulate(problem, s).peak_bytes)


def placed_within(prepared: Prepared, found: Solution, budget_bytes: int | None) -> Solution:
    """`found` with its recomputes where they can run.

    Raises:
        BudgetError: there, they do not fit.
    """
    schedule = placed(prepared, found.schedule)
    if schedule == found.schedule:
        return found
    moved = solution(
        prepared.problem, schedule, found.solver, bound=found.bound, family=found.family, notes=found.notes
    )
    if budget_bytes is not None and moved.peak_bytes > budget_bytes:
        remember(prepared.problem, schedule, RUNS)
        raise budget_error(budget_bytes, moved.peak_bytes, floor_bytes(prepared.problem))
    return moved


def smallest_placed(prepared: Prepared) -> Minimum:
    """The schedule of the smallest peak known, its recomputes where they can run."""
    problem = prepared.problem
    found = minimum_budget(problem, time_limit=prepared.options.time_limit)
    best = min(_placed_ones(prepared, found.schedule), key=lambda each: each.peak_bytes)
    remember(problem, best.schedule, RUNS)
    return replace(found, schedule=best.schedule, minimum_bytes=best.peak_bytes)


def _placed_ones(prepared: Prepared, *schedules: Schedule) -> list[Solution]:
    """These and all that is known, where they can run: one that cannot may peak lower."""
    every = (*schedules, *fallbacks(prepared.problem, math.inf))
    return [solution(prepared.problem, placed(prepared, each), "minimum", notes=(SMALLEST,)) for each in every]


def _smallest_within(
    prepared: Prepared, budget_bytes: int | None, error: BudgetError, enough_bytes: int | None
) -> Solution | None:
    """What is left where a search has found nothing, or what it found does not fit where it can run; the error names
    what can, where nothing does.

    Args:
        enough_bytes: where what is known reaches this, no smaller peak is looked for.
    """
    known = _placed_ones(prepared)
    if enough_bytes is None or all(each.peak_bytes > enough_bytes for each in known):
        known = _placed_ones(prepared, smallest_placed(prepared).schedule)
    fits = [each for each in known if budget_bytes is not None and each.peak_bytes <= budget_bytes]
    if fits:
        return min(fits, key=lambda each: each.added_cost)
    works = min(each.peak_bytes for each in known)
    if error.minimum_bytes is not None and error.minimum_bytes != works:
        error.args = (str(error).replace(shown_minimum(error.minimum_bytes), shown_minimum(works)),)
        error.minimum_bytes = works
    _tell_of_update(error, prepared)
    _tell_of_hints(error, prepared)
    return None


def solve_preferring(
    problem: Problem, preferred: Sequence[int], budget_bytes: int | None, options: Options, report: Report | None,
    warm_starts: tuple[Schedule, ...] = (),
) -> Solution:  # fmt: skip
    """A preference must not narrow what fits: where it leads the search astray, the plain question is asked.

    Both together keep to the time limit.
    """
    if not preferred:
        return _solve(problem, budget_bytes, options, report, warm_starts)
    begin, hurried = time.monotonic(), replace(options, time_limit=PREFERRED_SHARE * options.time_limit)
    try:
        found = _solve(_free_of_charge(problem, preferred), budget_bytes, hurried, report, warm_starts)
    except BudgetError:
        seconds = max(options.time_limit - (time.monotonic() - begin), LEAST_SHARE * options.time_limit)
        left = replace(options, time_limit=seconds)
        found = _solve(problem, budget_bytes, left, report, warm_starts)
        return prefer(problem, found, budget_bytes, preferred)
    return prefer(problem, found, budget_bytes, preferred, found.bound)


def _solve(
    problem: Problem, budget_bytes: int | None, options: Options, report: Report | None,
    warm_starts: tuple[Schedule, ...],
) -> Solution:  # fmt: skip
    if budget_bytes is None:
        return plain_solution(problem, "none")
    return solve(
        problem, budget_bytes, solver=options.solver, time_limit=options.time_limit, gap=options.gap,
        warm_starts=warm_starts, report=report,
    )  # fmt: skip


def _free_of_charge(problem: Problem, preferred: Sequence[int]) -> Problem:
    """The same step at the same total cost, in which running the preferred ops again costs nothing."""
    chosen = frozenset(preferred)
    ops = tuple(replace(op, cost=0) if i in chosen else op for i, op in enumerate(problem.ops))
    return replace(problem, ops=ops)


def prefer(
    problem: Problem, found: Solution, budget_bytes: int | None, preferred: Sequence[int],
    bound_of_others: int | None = None,
) -> Solution:  # fmt: skip
    """Recompute the preferred ops too, where the budget allows it.

    Args:
        bound_of_others: lower bound on what all but the preferred ops cost in any schedule; None leaves the bound be.
    """
    live = Live(problem, recomputes_of(problem, found.schedule))
    limit = float("inf") if budget_bytes is None else budget_bytes
    schedule = found.schedule
    if live.peak_bytes <= limit:
        _drop_all(live, preferred, limit)
        schedule = live.schedule()
    given = paid_for(problem, schedule, preferred)
    if bound_of_others is None:
        bound, family = found.bound, found.family
    else:
        bound, family = bound_of_others + given, AS_OFTEN
    kept = sum(1 for i in preferred if _first_read(live, i) is not None)
    notes = found.notes
    if kept:
        notes += (f"the budget leaves no room to recompute {kept} of the {len(preferred)} ops of the recompute hints",)
    solver = "hints" if found.solver == "none" else found.solver
    return solution(problem, schedule, solver, bound=bound, family=family, notes=notes)


def paid_for(problem: Problem, schedule: Schedule, preferred: Sequence[int]) -> int:
    """What a schedule's recompute of the preferred ops costs."""
    runs = Counter(computes(schedule))
    return sum(problem.ops[i].cost * (runs[i] - 1) for i in preferred)


def _drop_all(live: Live, preferred: Sequence[int], limit: float) -> None:
    """All together if that fits, else one by one; readers before what they read, whose first read they move."""
    last_first = sorted(preferred, reverse=True)
    live.journal = []
    for i in last_first:
        _drop(live, i)
    if live.peak_bytes <= limit:
        return
    live.rollback()
    for i in last_first:
        mark = len(live.journal or ())
        _drop(live, i)
        if live.peak_bytes > limit:
            live.rollback(mark)


def _drop(live: Live, i: int) -> None:
    slot = _first_read(live, i)
    if slot is not None:
        live.add(slot, i)


def _first_read(live: Live, i: int) -> int | None:
    """The first slot of the backward that reads a result of op `i` which the forward kept; None if it keeps none."""
    start = live.key(live.problem.num_forward, 0)
    slots = []
    for t in live.problem.ops[i].outputs:
        before, after = live.around(t, start)
        if before >= 0 and after >= 0 and not after & 1 and t not in live.problem.pinned:
            slots.append((after >> 1) // live.stride)
    return min(slots, default=None)


def _tell_of_update(error: BudgetError, prepared: Prepared) -> None:
    """Say that updating the parameters alone takes more than the budget, where it does."""
    needed = prepared.update_peak_bytes
    if error.budget_bytes is None or error.budget_bytes >= needed:
        return
    error.args = (
        f"{error}. optimizer.step() alone peaks at {needed / MIB:.3f} MiB (parameters, gradients, the optimizer's "
        f"state and {prepared.options.update.step_bytes / MIB:.3f} MiB of temporaries), which no recompute lowers: an "
        "optimizer with foreach=False or fused=True may need less.",
    )


def _tell_of_hints(error: BudgetError, prepared: Prepared) -> None:
    """Say that the hints narrow the budget, and what works without them."""
    options = prepared.options
    binding = options.hints.binding
    if not binding:
        return
    unhinted = lower_step(prepared.traced, prepared.aliases, prepared.profiles, prepared.device, options)
    free = minimum_budget(unhinted.problem, time_limit=SHARE_WITHOUT * options.time_limit)
    held = sum(1 for hint in prepared.hinted.values() if hint.once)
    error.args = (
        f"{error}. The hints {binding} keep {held} ops from being recomputed; without them the smallest budget known "
        f"to work is {shown_minimum(free.minimum_bytes)}. Raise the budget, or loosen them.",
    )
