"""Local search on a plan that fits: take some recomputes away, let greedy evictions repair, keep what is cheaper.

One step removes a handful of recomputes - neighbours in time, neighbours in the forward, or any - brings the peak
back under the budget with blurred greedy evictions (which may recompute a tensor again, or elsewhere), drops what
is not needed, and accepts the result when it costs no more than the current plan plus a falling tolerance. All on
the incremental simulator; a rejected step is rolled back. The random numbers are seeded, so the clock alone can
make two runs differ, and `improve` says when it did.
"""

from __future__ import annotations

import random
import time

from .descent import KEEP_RATIOS, Taste, descend
from .live import Live
from .schedule import Recompute
from .unneeded import drop_among, drop_dead

NOISES = (0.0, 0.5, 2.0)
TOLERANCE = 0.02
SUSPECTS = 400


def improve(live: Live, budget_bytes: int, *, steps: int, deadline: float, target_cost: int = 0, seed: int = 0) -> bool:
    """Make a fitting `live` cheaper, in place, for at most `steps` steps or until it costs `target_cost`.

    Returns:
        Whether the clock ended it.
    """
    rng = random.Random(seed)
    best, best_cost = live.recomputes(), live.cost
    for step in range(steps):
        if best_cost <= target_cost or not best:
            break
        if time.monotonic() > deadline:
            restore(live, best)
            return True
        tolerance = TOLERANCE * best_cost * (1 - step / steps) * rng.random() ** 2
        ruin_and_repair(live, budget_bytes, rng, best_cost + tolerance, deadline)
        if live.cost < best_cost:
            best, best_cost = live.recomputes(), live.cost
    restore(live, best)
    return False


def ruin_and_repair(
    live: Live, budget_bytes: int, rng: random.Random, cost_limit: float, deadline: float = float("inf")
) -> None:
    """One step; leaves `live` as it was unless the result fits and costs at most `cost_limit`."""
    live.journal = []
    for slot, op in choose_victims(live, rng):
        if live.has(slot, op):
            live.remove(slot, op)
            drop_dead(live, op, slot)
    taste = Taste(rng.choice(KEEP_RATIOS), rng.choice(NOISES), rng=rng)
    fits = descend(live, budget_bytes, taste, 1.3 * cost_limit, deadline)
    if fits:
        drop_among(live, budget_bytes, _suspects(live, rng), deadline)
    if not fits or live.cost > cost_limit:
        live.rollback()
    live.journal = None


def _suspects(live: Live, rng: random.Random) -> list[Recompute]:
    """Recomputes that may have become unneeded: what the step added, and others as far as time allows."""
    others = live.recomputes()
    if len(others) <= SUSPECTS:
        return others
    added = [(slot, op) for sign, slot, op in live.journal or () if sign > 0 and live.has(slot, op)]
    return list(dict.fromkeys((*added, *rng.sample(others, SUSPECTS))))


def choose_victims(live: Live, rng: random.Random) -> list[Recompute]:
    """Recomputes to take away: near one in time, near one in the forward, or anywhere."""
    recomputes = live.recomputes()
    if not recomputes:
        return []
    size = 1 + int(rng.random() ** 3 * min(len(recomputes), 60))
    slot, op = rng.choice(recomputes)
    how = rng.randrange(3)
    if how == 0:
        return sorted(recomputes, key=lambda r: (abs(r[0] - slot), r))[:size]
    if how == 1:
        return sorted(recomputes, key=lambda r: (abs(r[1] - op), r))[:size]
    return rng.sample(recomputes, size)


def restore(live: Live, recomputes: list[Recompute]) -> None:
    """Make `recomputes` the recomputes of `live`."""
    wanted = set(recomputes)
    current = live.recomputes()
    for slot, op in current:
        if (slot, op) not in wanted:
            live.remove(slot, op)
    held = set(current)
    live.add_all(r for r in recomputes if r not in held)
