"""fit: a solution that the device's caching allocator has room for, not only its schedule.

The solvers count tensors. The allocator adds blocks that it does not split, and segments, which decide whether the
device is full. Both are known once a schedule is, so a schedule that turns out too large is solved anew for as much
less; where that gives away too much, or costs much more than what just did not fit, for something in between. Of a
schedule for which much more is reserved than allocated, others that cost about as much are looked at: the solvers
cannot tell them apart, and the allocator does.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace

from passes.allocator import unknown_settings
from passes.device import kind_of, room_bytes
from solvers import Report
from solvers.errors import MIB, BudgetError, shown_minimum
from solvers.live import Live
from solvers.schedule import Schedule
from solvers.solution import Solution, solution
from solvers.unneeded import drop_unneeded

from .arena import aimed_bytes
from .footprint import Footprint
from .options import BUCKET
from .preference import AS_OFTEN, paid_for, placed_within, smallest_placed, solve_step
from .prepared import Prepared

# Where a schedule is too large: how many others are tried, and how many of these once one fits. What fits is enough
# where it uses so much of its room and costs, as a part of the step, so little more than what does not fit.
TRIES, MORE, WELL_USED, CLOSE = 8, 3, 0.97, 0.01
# Where a schedule reserves too much: how many others are looked at, in what part of the time limit each (twice as long
# after one that is too dear), in how many time limits together, how much less each is asked to take (a part of what is
# not static), and how much more it may cost (a part of the step).
OTHERS, SHARE, LONGEST, LESS, DEARER = 12, 0.2, 4.0, 1 / 400, 0.02


@dataclass(frozen=True)
class _Try:
    asked_bytes: int
    found: Solution
    over_bytes: int


def solve_to_fit(
    prepared: Prepared, budget_bytes: int | None, *, report: Report | None = None,
    warm_starts: tuple[Schedule, ...] = (),
) -> Solution:  # fmt: skip
    """The cheapest schedule found whose peak is within the budget, and whose segments are within the device.

    Args:
        budget_bytes: what may be allocated; None leaves the device's own limit.
        warm_starts: schedules to start from, whether they fit or not.

    Raises:
        BudgetError: nothing found fits; says whether the budget or the device's memory is too small.
    """
    if prepared.options.flight is not None and budget_bytes is not None:
        return _in_flight(prepared, budget_bytes, report, warm_starts)
    if prepared.start is None:
        return _without_allocator(prepared, budget_bytes, report, warm_starts)
    search = _Search(prepared, budget_bytes, report, warm_starts)
    first = search.first()
    fitting = first if first.over_bytes <= 0 else search.within(first)
    return search.noted(search.reserving_less(fitting), first)


def _without_allocator(
    prepared: Prepared, budget_bytes: int | None, report: Report | None, warm_starts: tuple[Schedule, ...]
) -> Solution:
    """Where the allocator cannot be simulated, tensors and workspaces are all that is counted."""
    if not kind_of(prepared.device).caches or not unknown_settings():
        return solve_step(prepared, budget_bytes, report=report, warm_starts=warm_starts)
    limit = room_bytes(prepared.device) if budget_bytes is None else budget_bytes
    found = solve_step(prepared, limit, report=report, warm_starts=warm_starts)
    note = f"reserved memory is not predicted under {', '.join(unknown_settings())}"
    return replace(found, notes=(*found.notes, note))


def _in_flight(
    prepared: Prepared, budget_bytes: int, report: Report | None, warm_starts: tuple[Schedule, ...]
) -> Solution:
    """What one micro-batch may take so that it fits with those that wait, which hold less where it saves less."""
    smallest = smallest_placed(prepared)
    low, high = smallest.minimum_bytes, budget_bytes
    best = solution(prepared.problem, smallest.schedule, "minimum")
    needed = best.peak_bytes + prepared.others_bytes(best.schedule)
    if needed > budget_bytes:
        raise BudgetError(
            f"no schedule found within {budget_bytes / MIB:,.3f} MiB with the micro-batches in flight; the smallest "
            f"budget known to work is {shown_minimum(needed)}: ask for that, or run fewer or smaller micro-batches.",
            budget_bytes=budget_bytes, minimum_bytes=needed, floor_bytes=smallest.floor_bytes,
        )  # fmt: skip
    asked = high
    first = None
    for _ in range(TRIES):
        found = solve_step(prepared, asked, report=report, warm_starts=warm_starts)
        first = first or found
        if found.peak_bytes + prepared.others_bytes(found.schedule) <= budget_bytes:
            best, low = found, asked
        else:
            high = asked
        if high - low <= (1 - WELL_USED) * budget_bytes:
            break
        asked = (low + high) // 2
    return _proved_by(prepared, best, first)


def _proved_by(prepared: Prepared, found: Solution, asked: Solution | None) -> Solution:
    """`found`, with what is proved of all that the budget allows: what was solved for less of it proves too much.

    Args:
        asked: the answer for the whole budget.
    """
    if asked is None or asked.bound is None or asked is found:
        return found
    bound = asked.bound
    if asked.family.startswith(AS_OFTEN):  # the bound holds what the answer pays for preferred ops
        problem, preferred = prepared.problem, prepared.preferred
        bound += paid_for(problem, found.schedule, preferred) - paid_for(problem, asked.schedule, preferred)
    return solution(
        prepared.problem, found.schedule, found.solver, bound=bound, family=asked.family, notes=found.notes
    )


def trimmed_to_fit(prepared: Prepared, live: Live, budget_bytes: int) -> Solution | None:
    """The recomputes of `live` without those that the budget does not need; None where they do not fit."""
    if live.peak_bytes > budget_bytes:
        return None
    drop_unneeded(live, budget_bytes, time.monotonic() + prepared.options.time_limit)
    found = solution(prepared.problem, live.schedule(), BUCKET)
    try:
        found = placed_within(prepared, found, budget_bytes)
    except BudgetError:
        return None
    if prepared.start is not None:
        over = _Search(prepared, budget_bytes, None, ()).measured(found.peak_bytes, found).over_bytes
    else:
        over = found.peak_bytes + prepared.others_bytes(found.schedule) - budget_bytes
    return found if over <= 0 else None


class _Search:
    def __init__(
        self, prepared: Prepared, budget_bytes: int | None, report: Report | None, warm_starts: tuple[Schedule, ...]
    ) -> None:
        assert prepared.start is not None
        self.prepared, self.budget_bytes, self.report, self.warm_starts = prepared, budget_bytes, report, warm_starts
        self.room_bytes = prepared.start.room_bytes
        self.limit_bytes = self.room_bytes if budget_bytes is None else min(self.room_bytes, budget_bytes)
        self.fitting: list[_Try] = []  # of those that were found on the way

    def attempt(self, asked_bytes: int | None, share: float = 1.0) -> _Try:
        """Args: share: of the time limit."""
        seconds = share * self.prepared.options.time_limit
        hurried = replace(self.prepared, options=replace(self.prepared.options, time_limit=seconds))
        found = solve_step(hurried, asked_bytes, report=self.report, warm_starts=self.warm_starts)
        return self.measured(found.peak_bytes if asked_bytes is None else min(asked_bytes, found.peak_bytes), found)

    def first(self) -> _Try:
        """What the budget alone allows, or the device's memory."""
        if self.budget_bytes is None:
            with suppress(BudgetError):
                return self.attempt(self.room_bytes)
        try:
            return self.attempt(self.budget_bytes)
        except BudgetError as error:
            needed = self.prepared.footprint(smallest_placed(self.prepared).schedule)
            if needed is None or error.minimum_bytes is None or needed.allocated_bytes <= error.minimum_bytes:
                raise
            taken = f"With the blocks that torch's allocator does not split it takes {needed.allocated_bytes} bytes."
            raise BudgetError(
                f"{error} {taken}", budget_bytes=error.budget_bytes, minimum_bytes=needed.allocated_bytes,
                floor_bytes=error.floor_bytes,
            ) from error  # fmt: skip

    def within(self, failed: _Try) -> _Try:
        """The cheapest found that fits, if what was asked for first does not."""
        asked, more = failed.asked_bytes - failed.over_bytes, MORE
        for _ in range(TRIES):
            try:
                tried = self.attempt(asked)
            except BudgetError:
                break
            more -= bool(self.fitting)
            if tried.over_bytes <= 0:
                self.fitting.append(tried)
            else:
                failed = tried
            if self.fitting and self._is_enough(self.fitting[-1], failed, more):
                break
            asked = failed.asked_bytes - failed.over_bytes
            if self.fitting:
                asked = (self.fitting[-1].asked_bytes + failed.asked_bytes) // 2
        return min(self.fitting, key=_cost) if self.fitting else self.smallest()

    def _is_enough(self, fits: _Try, failed: _Try, more: int) -> bool:
        """Whether the most that fits uses its room well, and costs little more than the least that does not fit."""
        if fits.over_bytes <= -(1 - WELL_USED) * self.limit_bytes:
            return False
        return more <= 0 or _cost(fits) - _cost(failed) <= CLOSE * self.prepared.problem.step_cost

    def reserving_less(self, best: _Try) -> _Try:
        """Of schedules that cost about as much, one for which less is reserved, where much is and there is a budget.

        The search for them is short and starts from nothing: near the first, they reserve as much.
        """
        assert self.prepared.start is not None
        problem, expandable = self.prepared.problem, self.prepared.start.expandable
        if self.budget_bytes is None or not _cost(best):
            return best
        for needs in (self._needed, self._least):  # what to ask for takes long to find
            needed = needs(best.found.schedule)
            if needed.reserved_bytes <= aimed_bytes(needed.allocated_bytes, expandable):
                return best
        dearest = _cost(best) + DEARER * problem.step_cost
        known = [(self._least(t.found.schedule), t) for t in self.fitting or [best] if _cost(t) <= dearest]
        needed, best = min(known, key=lambda pair: pair[0].reserved_bytes)
        asked, step = best.asked_bytes, int(LESS * (best.asked_bytes - problem.static_bytes))
        share, left = SHARE, LONGEST
        for _ in range(OTHERS):
            if left <= 0 or needed.reserved_bytes <= aimed_bytes(needed.allocated_bytes, expandable):
                break
            asked, left = asked - step, left - share
            try:
                tried = self.attempt(asked, share)
            except BudgetError:
                break
            share = share if _cost(tried) <= dearest else min(1.0, 2 * share)
            if tried.over_bytes <= 0 and _cost(tried) <= dearest:
                other = self._least(tried.found.schedule)
                if other.reserved_bytes < needed.reserved_bytes:
                    best, needed = tried, other
        return best

    def smallest(self) -> _Try:
        """What is left to try: the schedule of the smallest peak known.

        Raises:
            BudgetError: not even that fits.
        """
        minimum = smallest_placed(self.prepared)
        found = solution(self.prepared.problem, minimum.schedule, "minimum")
        tried = self.measured(minimum.minimum_bytes, found)
        if tried.over_bytes <= 0:
            return tried
        needed = self._least(found.schedule)
        raise BudgetError(
            f"the step does not fit: the smallest plan known allocates {needed.allocated_bytes / MIB:,.1f} MiB, for "
            f"which torch's allocator reserves {needed.reserved_bytes / MIB:,.1f} MiB of the device; the limits are "
            f"{'no budget' if self.budget_bytes is None else f'{self.budget_bytes / MIB:,.1f} MiB'} and "
            f"{self.room_bytes / MIB:,.1f} MiB of the device. Take a smaller batch, free memory there, or set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, with which less is reserved.",
            budget_bytes=self.budget_bytes, minimum_bytes=needed.allocated_bytes, floor_bytes=minimum.floor_bytes,
        )  # fmt: skip

    def noted(self, tried: _Try, first: _Try) -> Solution:
        """The answer, saying that the device's memory and not the budget decided, where that is so."""
        found = _proved_by(self.prepared, tried.found, first.found)
        if first.over_bytes <= 0 or (self.budget_bytes is not None and self.budget_bytes <= self.room_bytes):
            return found
        reserved_bytes = self._least(found.schedule).reserved_bytes
        size = f"{reserved_bytes / MIB:,.1f} of the device's {self.room_bytes / MIB:,.1f} MiB"
        return replace(found, notes=(*found.notes, f"planned to reserve {size}"))

    def measured(self, asked_bytes: int, found: Solution) -> _Try:
        """What a solution needs of the device."""
        return _Try(asked_bytes, found, self._over(self._needed(found.schedule)))

    def _over(self, needed: Footprint) -> int:
        over = needed.reserved_bytes - self.room_bytes
        return over if self.budget_bytes is None else max(over, needed.allocated_bytes - self.budget_bytes)

    def _needed(self, schedule: Schedule) -> Footprint:
        """Without what is asked for besides, where that fits."""
        plain = self.prepared.worst_footprint(schedule)
        return plain if self._over(plain) <= 0 else self._least(schedule)

    def _least(self, schedule: Schedule) -> Footprint:
        """With what is asked for besides."""
        reservation = self.prepared.reservation(schedule, self.budget_bytes)
        return self.prepared.worst_footprint(schedule, reservation)


def _cost(tried: _Try) -> int:
    return tried.found.added_cost
