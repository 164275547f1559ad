"""Taking back the recomputes that a budget does not need."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .live import Live
from .schedule import Recompute


def drop_unneeded(live: Live, budget_bytes: int, deadline: float = float("inf")) -> None:
    """Take back every recompute without which the step still fits, dearest first, until none is left."""
    before = -1
    while live.cost != before and time.monotonic() < deadline:
        before = live.cost
        drop_among(live, budget_bytes, live.recomputes(), deadline)


def drop_among(
    live: Live, budget_bytes: int, recomputes: Sequence[Recompute], deadline: float = float("inf")
) -> None:
    """One pass of `drop_unneeded` over some of the recomputes."""
    ops = live.problem.ops
    for slot, op in sorted(recomputes, key=lambda r: (-ops[r[1]].cost, r)):
        if time.monotonic() > deadline:
            break
        if not live.has(slot, op):
            continue
        live.remove(slot, op)
        if live.peak_bytes > budget_bytes:
            live.add(slot, op)
        else:
            drop_dead(live, op, slot)


def drop_dead(live: Live, op: int, slot: int) -> None:
    """Take back the recomputes that only served `op` in `slot`."""
    producer = live.problem.producer
    stack = [producer[t] for t in live.replays[op]]
    while stack:
        i = stack.pop()
        for s in list(live.slots_of[i]):
            if s <= slot and _is_dead(live, s, i):
                live.remove(s, i)
                stack.extend(producer[t] for t in live.replays[i])


def _is_dead(live: Live, slot: int, op: int) -> bool:
    """Whether nothing reads what the recompute writes before it is written again or the step ends."""
    key = live.key(slot, op)
    for t in live.outputs[op]:
        after = live.around(t, key + 1)[1]
        if after >= 0 and not after & 1:
            return False
    return True
