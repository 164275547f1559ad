"""Local search on a plan that fits: take some recomputes away, let greedy evictions repair, keep what is cheaper.

One step removes a handful of recomputes - neighbours in time, neighbours in the forward, or any - brings the peak
back under the budget with blurred greedy evictions (which may recompute a tensor again, or elsewhere), drops what
is not needed, and accepts the result when it costs no more than the best plan plus a falling tolerance. All on
the incremental simulator; a rejected step is rolled back. The random numbers are seeded, so the clock alone can
make two runs differ, and `improve` says when it did.

Where it could be compiled, the search is that of `walk.c`, which takes the same steps many times as fast.
"""

from __future__ import annotations

import time
from ctypes import CDLL
from threading import Event

from .compiled import CompiledWalk, library_for
from .descent import KEEP_RATIOS, Taste, descend
from .live import Live
from .schedule import Recompute
from .splitmix import SplitMix
from .unneeded import drop_among, drop_dead

NOISES = (0.0, 0.5, 2.0)
TOLERANCE = 0.02
SUSPECTS = 400
MOST_VICTIMS = 60
OPS_BETWEEN_LOOKS = 4000  # of a step of the problem, times steps of the search: looks at the clock


def improve(
    live: Live, budget_bytes: int, *, steps: int, deadline: float, target_cost: int = 0, stop: Event | None = None,
    seed: int = 0,
) -> bool:  # fmt: skip
    """Make a fitting `live` cheaper, in place, for at most `steps` steps or until it costs `target_cost`.

    Args:
        stop: ends it as the deadline does.

    Returns:
        Whether the clock ended it.
    """
    lib = library_for(live.problem)
    search = search_from(live, budget_bytes, seed, lib, deadline)
    look = 1 if lib is None else max(1, OPS_BETWEEN_LOOKS // max(1, len(live.problem.ops)))
    hurried = False
    for step in range(0, steps, look):
        hurried = time.monotonic() > deadline or (stop is not None and stop.is_set())
        if hurried or search.improve(step, min(look, steps - step), steps, target_cost):
            break
    best = search.recomputes(best=True)
    if best is not None:
        restore(live, best)
    return hurried


def search_from(
    live: Live, budget_bytes: int, seed: int, lib: CDLL | None, deadline: float = float("inf")
) -> CompiledWalk | Search:
    """A local search that begins with a plan.

    Args:
        lib: what it runs in; None for Python, where it changes the plan.
        deadline: ends a step in Python.
    """
    if lib is None:
        return Search(live, budget_bytes, seed, deadline)
    return CompiledWalk(lib, live, budget_bytes - live.problem.static_bytes, seed, 1.0, 1.0)


class Search:
    def __init__(self, live: Live, budget_bytes: int, seed: int, deadline: float = float("inf")) -> None:
        self.live, self.budget_bytes, self.rng, self.deadline = live, budget_bytes, SplitMix(seed), deadline
        self.best, self.best_cost = live.recomputes(), live.cost

    def recomputes(self, best: bool) -> list[Recompute] | None:
        """Those of the state that the search is in, or of the cheapest."""
        return self.best if best else self.live.recomputes()

    def improve(self, first: int, count: int, steps: int, target_cost: int) -> bool:
        """So many steps of all; whether the best plan costs the target, or there is nothing to take away."""
        for step in range(first, first + count):
            if self.best_cost <= target_cost or not self.best:
                return True
            random = self.rng.random()
            tolerance = TOLERANCE * self.best_cost * (1 - step / steps) * random * random
            self._ruin_and_repair(self.best_cost + tolerance)
            if self.live.cost < self.best_cost:
                self.best, self.best_cost = self.live.recomputes(), self.live.cost
        return False

    def _ruin_and_repair(self, cost_limit: float) -> None:
        """One step; leaves the state as it was unless the result fits and costs at most `cost_limit`."""
        live, rng = self.live, self.rng
        live.journal = []
        for slot, op in self._victims():
            if live.has(slot, op):
                live.remove(slot, op)
                drop_dead(live, op, slot)
        keep_ratio = KEEP_RATIOS[rng.below(len(KEEP_RATIOS))]
        taste = Taste(keep_ratio, NOISES[rng.below(len(NOISES))], rng=rng)
        fits = descend(live, self.budget_bytes, taste, 1.3 * cost_limit, self.deadline)
        if fits:
            drop_among(live, self.budget_bytes, self._suspects(), self.deadline)
        if not fits or live.cost > cost_limit:
            live.rollback()
        live.journal = None

    def _suspects(self) -> list[Recompute]:
        """Recomputes that may have become unneeded: what the step added, and others as far as time allows."""
        live, others = self.live, self.live.recomputes()
        if len(others) <= SUSPECTS:
            return others
        added = [(slot, op) for sign, slot, op in live.journal or () if sign > 0 and live.has(slot, op)]
        self.rng.draw_some(others, SUSPECTS)
        return list(dict.fromkeys((*added, *others[:SUSPECTS])))

    def _victims(self) -> list[Recompute]:
        """Recomputes to take away: near one in time, near one in the forward, or anywhere."""
        recomputes, rng = self.live.recomputes(), self.rng
        if not recomputes:
            return []
        random = rng.random()
        size = 1 + int(random * random * random * min(len(recomputes), MOST_VICTIMS))
        slot, op = recomputes[rng.below(len(recomputes))]
        how = rng.below(3)
        if how == 0:
            recomputes.sort(key=lambda r: (abs(r[0] - slot), r))
        elif how == 1:
            recomputes.sort(key=lambda r: (abs(r[1] - op), r))
        else:
            rng.draw_some(recomputes, size)
        return recomputes[:size]


def restore(live: Live, recomputes: list[Recompute]) -> None:
    """Make `recomputes` the recomputes of `live`."""
    wanted = set(recomputes)
    current = live.recomputes()
    for slot, op in current:
        if (slot, op) not in wanted:
            live.remove(slot, op)
    held = set(current)
    live.add_all(r for r in recomputes if r not in held)
