"""hunt: the state of a search for plans and for their proof, and what it does to find cheaper plans."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

from .base import CLOCK, Effort, Report
from .compiled import library_for
from .descent import Reached, repair
from .engine import Answer
from .exact import exact_schedule
from .interruptible import Beside
from .known import remember
from .live import Live
from .local import improve
from .minimum import smallest_peak
from .problem import LARGE, Problem
from .schedule import Schedule, recomputes_of
from .simulate import peak_and_cost
from .staged import StagedModel
from .turns import WAYS, Runs
from .unneeded import drop_unneeded

LOCAL_STEPS = 100
COMPILED_STEPS = 8  # times as many where they are compiled
FRUITLESS_ROUNDS = 120
LOWEST_SHARE = 0.95
LOWEST_EXACT_SHARE = 0.4  # more than `minimum_budget` takes, so that it is found again
LEAST_SECONDS = 0.5
WIDE_SHARE = 0.02
SMALL = 128  # ops of a step whose programs are solved for integers whatever they leave open
ANNEAL_EVERY = 5  # fruitless rounds of local search; each where annealing is compiled
CLOSE = 10  # of the gap asked for: less than a tenth is not worth a run of annealing
FRUITLESS_RUNS = 3 * len(WAYS)


@dataclass
class Hunt:
    """The best plan so far, the best bound so far, and what is left to spend.

    Attributes:
        known_bytes: the smallest budget known to work, where no plan has been found for this one.
        impossible: it is proved that there is none.
        lowest: the schedule of smallest peak, where the exact search has told it.
        rounds: of local search so far; each has random numbers of its own.
        runs: of annealing so far.
        reached: how low greedy came.
    """

    problem: Problem
    budget_bytes: int
    deadline: float
    gap_cost: int
    report: Report | None
    live: Live | None = None
    bound: int = 0
    known_bytes: int = -1
    impossible: bool = False
    lowest: tuple[Schedule, ...] = ()
    notes: dict[str, None] = field(default_factory=dict)
    rounds: int = 0
    runs: Runs | None = None
    reached: Reached = field(default_factory=lambda: Reached(math.inf))

    @property
    def cost(self) -> int:
        return self.live.cost if self.live is not None else -1

    @property
    def finished(self) -> bool:
        return self.live is not None and self.live.cost - self.bound <= self.gap_cost

    @property
    def wide(self) -> bool:
        """Whether so much is open between a plan of a larger step and the bound that integers would close little."""
        much = self.cost - self.bound > WIDE_SHARE * self.problem.step_cost
        return self.live is not None and much and len(self.problem.ops) > SMALL

    @property
    def fast(self) -> bool:
        """Whether annealing is compiled, and the step small enough for relaxations beside it."""
        return library_for(self.problem) is not None and len(self.problem.ops) <= LARGE

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def until(self, share: float) -> float:
        """When a share of the time left will be used up."""
        return time.monotonic() + share * self.seconds_left

    def offer(self, live: Live | None) -> None:
        """Take `live` if it fits and is cheaper."""
        if live is not None and live.peak_bytes <= self.budget_bytes and (self.live is None or live.cost < self.cost):
            self.live = live

    def start_from(self, schedules: Iterable[Schedule], until: float) -> None:
        """Offer schedules made for another budget or other sizes, repaired for this one."""
        for schedule in schedules:
            live = Live(self.problem, recomputes_of(self.problem, schedule))
            repair(live, self.budget_bytes, until)
            self.offer(live)

    def take_bound(self, model: StagedModel, answer: Answer) -> None:
        """Take what a program proved if it is more."""
        if answer.bound is not None:
            self.bound = max(self.bound, math.floor(min(answer.bound * model.cost_unit, model.cost_limit)))

    def tell(self, stage: str) -> None:
        if self.report is not None and self.live is not None:
            overhead, bound = self.problem.overhead(self.cost), self.problem.overhead(self.bound)
            self.report(f"{stage}: {overhead:.2%} recompute, at least {bound:.2%} needed")

    def polish(self, share: float = 1.0, start: Live | None = None) -> None:
        """A round of local search on the best plan, or on another, for at most a share of the time left."""
        live = start or self.live
        if live is None:
            return
        self.rounds += 1
        steps, seed = local_steps(self.problem), self.rounds
        deadline = self.until(share)
        if improve(live, self.budget_bytes, steps=steps, deadline=deadline, target_cost=self.bound, seed=seed):
            self.notes[CLOCK] = None
        self.offer(live)
        self.tell("local search")

    def anneal(self, until: float, start: Live | None = None, *, wanted: bool = False) -> bool:
        """A run of annealing, if there is time for one until then; whether it found anything.

        Args:
            start: a state that need not fit, where there is no plan.
            wanted: also where the gap is met.
        """
        self.runs = self.runs or Runs(self.problem, self.budget_bytes)
        known = self.cost
        if self.finished and not wanted:
            return False
        if not self.runs.worth_it(self.live or start, until):
            self.notes[CLOCK] = None
            return False
        self.offer(self.runs.next(self.live or start, until))
        if self.runs.hurried:
            self.notes[CLOCK] = None
        self.tell("annealing")
        return self.cost != known


def look_exactly(state: Hunt, effort: Effort) -> None:
    """The schedule of smallest peak, where the exact search can tell."""
    until = time.monotonic() + LOWEST_EXACT_SHARE * effort.time_limit
    exact = exact_schedule(state.problem, deadline=min(until, state.deadline)).schedule
    if exact is None:
        return
    remember(state.problem, exact)
    state.lowest = (exact,)  # its state may peak higher
    state.known_bytes = peak_and_cost(state.problem, exact)[0]
    state.impossible = state.known_bytes > state.budget_bytes
    state.offer(Live(state.problem, recomputes_of(state.problem, exact)))
    if state.live is not None:
        drop_unneeded(state.live, state.budget_bytes, state.deadline)


def look_lower(state: Hunt, until: float, again: bool = False) -> None:
    """The state of smallest peak, rid of what the budget does not need, where that fits.

    Args:
        again: what is left out then will be looked at later, if there is a later.
    """
    lowest = smallest_peak(state.problem, state.budget_bytes, until)
    if not again or time.monotonic() < until or state.seconds_left <= 0:
        state.known_bytes = lowest.known_bytes
    if lowest.live.peak_bytes <= state.budget_bytes:
        drop_unneeded(lowest.live, state.budget_bytes, state.deadline)
        state.offer(lowest.live)


def local_steps(problem: Problem) -> int:
    """Steps of local search per round: work, not time, so that the answer does not depend on the machine."""
    steps = LOCAL_STEPS if len(problem.ops) <= LARGE else LOCAL_STEPS // 30
    return steps if library_for(problem) is None else COMPILED_STEPS * steps


def polish_on(state: Hunt) -> None:
    """Rounds of local search and runs of annealing until many in a row find nothing or the time is up."""
    fruitless, every = 0, ANNEAL_EVERY if library_for(state.problem) is None else 1
    while fruitless < FRUITLESS_ROUNDS and not state.finished and state.seconds_left > LEAST_SECONDS:
        if state.live is None:
            return
        cost = state.cost
        state.polish()
        fruitless = fruitless + 1 if state.cost == cost else 0
        if fruitless % every == every - 1 and state.anneal(state.deadline):
            fruitless = 0


@contextmanager
def annealing_beside(state: Hunt) -> Iterator[Callable[[], None]]:
    """Runs of annealing from the best plan so far, in a thread, while the block waits for programs.

    The block is given what offers the cheapest plan that they have found by then; that happens at its end, too.
    """
    runs = state.runs = state.runs or Runs(state.problem, state.budget_bytes)
    cheapest = [state.live and Live(state.problem, state.live.recomputes())]  # the block may change its own

    def work(stop: Event) -> None:
        while not stop.is_set() and runs.worth_it(best := cheapest[-1], state.deadline):
            found = runs.next(best, state.deadline, stop)
            if found is not None and (best is None or found.cost < best.cost):
                cheapest.append(found)

    with Beside(work) as side:
        yield lambda: state.offer(cheapest[-1])
    side.result()
    state.offer(cheapest[-1])
    if runs.hurried:
        state.notes[CLOCK] = None
    state.tell("annealing")


def anneal_each_way(state: Hunt, until: float) -> None:
    """A run of annealing each way, also where the gap is met, while more than a little is open."""
    for _ in range(len(WAYS) // 2):  # two side by side
        if state.cost - state.bound > state.gap_cost // CLOSE:
            state.anneal(until, wanted=True)


def anneal_for(state: Hunt, share: float) -> None:
    """Runs of annealing for a share of the time left, or until three turns have found nothing."""
    until, fruitless = state.until(share), 0
    while fruitless < FRUITLESS_RUNS:
        fruitless = 0 if state.anneal(until) else fruitless + 1
