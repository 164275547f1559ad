"""Plans from a relaxation of the staged program: its fractions rounded, and what does not fit evicted.

A relaxation with many stages knows which tensors to recompute in which part of the step, which no search from plan to
plan finds out: a plan that differs in this from the one at hand is hundreds of recomputes away. Where its solution is
cut decides how much greedy evictions have to add, so several thresholds are tried and the cheapest plan is the answer.
"""

from __future__ import annotations

import time

from .descent import repair
from .live import Live
from .staged import StagedModel

THRESHOLDS = (0.4, 0.45, 0.5, 0.35, 0.3, 0.6)


def rounded(model: StagedModel, values: dict[str, float], deadline: float) -> Live | None:
    """The cheapest plan that a solution gives when its fractions above a threshold count as ones.

    Args:
        deadline: thresholds not reached by then are left out.
    """
    best: Live | None = None
    for threshold in THRESHOLDS:
        if time.monotonic() > deadline:
            break
        live = model.to_live(values, threshold)
        if repair(live, model.budget_bytes, deadline) and (best is None or live.cost < best.cost):
            best = live
    return best
