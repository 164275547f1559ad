"""Runs of annealing, longer and longer, each way in turn.

Where the walk is compiled, two go side by side, and local search goes on from what each finds, dear as it may be.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from threading import Event

from .compiled import library_for
from .interruptible import Beside
from .live import Live
from .local import improve
from .metropolis import MILDEST, anneal
from .problem import Problem

SHORTEST = 20  # moves of a first run for each op
MOST_OPS = 500  # that are counted for it
COMPILED = 16  # times as many where the walk is compiled, but for searches
GROWTH = 4
MOVES_FOR_A_STEP = 400  # of local search: they take about as long
FASTEST = 1e9  # until a first run has told
FEWEST = 0.2  # of its turn: a shorter run is not worth it
TURNS = 2  # of all ways: then the dearest is left out, and runs grow no longer
SEARCH_GROWTH = 2


@dataclass(frozen=True)
class Way:
    """How a run goes about it: from no recompute or from the best plan, how hot it begins, how mild the penalty is."""

    plain: bool
    hottest: float
    mildest: float = MILDEST


WAYS = (Way(False, 0.5), Way(True, 0.5), Way(False, 0.1, 1.0), Way(False, 2.0, 1.0))
SEARCH = Way(True, 10.0, 1.0)  # so hot that cost hardly counts: finds dear plans where the others find none


@dataclass
class Runs:
    """Runs of more and more moves, each way in turn; the dearest way is left out after two turns.

    Where there is no plan yet every other run is a search for one.

    Attributes:
        number: of runs so far; each has random numbers of its own.
        searches: of them that were for a first plan.
        costs: what the last run of each way came to.
        pace: moves a second.
        hurried: the clock made a run shorter than its turn.
    """

    problem: Problem
    budget_bytes: int
    number: int = 0
    searches: int = 0
    costs: dict[Way, float] = field(default_factory=lambda: dict.fromkeys(WAYS, math.inf))
    pace: float = FASTEST
    hurried: bool = False

    def next(self, best: Live | None, deadline: float, stop: Event | None = None) -> Live | None:
        """What the next runs find, of as many moves as their turn is or the time allows.

        They are two side by side where the walk is compiled, and one where a `stop` is given, which ends it.
        """
        if stop is not None or library_for(self.problem) is None:
            return self._run(best, self._drawn(best), deadline, stop)
        first, second = self._drawn(best), self._drawn(best)
        with Beside(lambda stop: self._run(best, second, deadline, stop)) as side:
            found = self._run(best, first, deadline, None), side.result()
        return min((live for live in found if live is not None), key=lambda live: live.cost, default=None)

    def _drawn(self, best: Live | None) -> tuple[Way, int, int]:
        """The next way, the moves that are its turn, and the number of the run."""
        if self.number - self.searches >= TURNS * len(WAYS) and len(self.costs) == len(WAYS):
            del self.costs[max(self.costs, key=lambda way: self.costs[way])]
        way = self._way(best)
        wanted = self._wanted(way)
        self.number += 1
        self.searches += way == SEARCH
        return way, wanted, self.number

    def _run(
        self, best: Live | None, drawn: tuple[Way, int, int], deadline: float, stop: Event | None
    ) -> Live | None:  # fmt: skip
        way, wanted, seed = drawn
        start = Live(self.problem, () if way.plain or best is None else best.recomputes())
        begin = time.monotonic()
        moves = int(min(wanted, self.pace * max(0.0, deadline - begin)))
        run = anneal(
            start, self.budget_bytes, way.hottest, way.mildest, moves=moves, deadline=deadline, stop=stop, seed=seed
        )  # fmt: skip
        if run.live is not None and library_for(self.problem) is not None:
            steps = run.moves // MOVES_FOR_A_STEP
            if improve(run.live, self.budget_bytes, steps=steps, deadline=deadline, stop=stop, seed=seed):
                self.hurried = True
        self.pace = max(1, run.moves) / (time.monotonic() - begin)
        if run.moves < wanted:  # never set back: another run may end at the same time
            self.hurried = True
        if way in self.costs and (stop is None or not stop.is_set()):
            self.costs[way] = math.inf if run.live is None else run.live.cost
        return run.live

    def worth_it(self, best: Live | None, deadline: float) -> bool:
        """Whether there is time for another run."""
        return self.pace * (deadline - time.monotonic()) > FEWEST * self._wanted(self._way(best))

    def _way(self, best: Live | None) -> Way:
        if (best is None or best.peak_bytes > self.budget_bytes) and self.number % 2:  # the first run tells the pace
            return SEARCH
        return list(self.costs)[(self.number - self.searches) % len(self.costs)]

    def _wanted(self, way: Way) -> int:
        shortest = SHORTEST * min(len(self.problem.ops), MOST_OPS)
        if way == SEARCH:
            return shortest * GROWTH**TURNS * SEARCH_GROWTH**self.searches
        faster = 1 if library_for(self.problem) is None else COMPILED
        return faster * shortest * GROWTH ** min((self.number - self.searches) // len(WAYS), TURNS)
