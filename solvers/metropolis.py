"""Simulated annealing over sets of recomputes, which may exceed the budget on the way to a plan.

Where most of what is held must be recomputed, a plan and a cheaper one are far apart: every set between them peaks too
high. So the budget is a penalty here: one move adds, takes away or shifts a recompute, and is accepted with the
probability of Metropolis et al. (1953) for what it adds to cost and penalty, while the temperature falls and the
penalty rises. Costs count in those of an average op, bytes in those of an average tensor, so that one schedule of
temperatures serves all problems. The random numbers are seeded: the clock alone can make two runs differ.

Where it could be compiled, the walk is that of `walk.c`, which does the same moves many times as fast.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass, field
from functools import partial
from threading import Event

import numpy as np

from .compiled import CompiledWalk, library_for
from .descent import Taste, descend
from .live import Live, Move
from .schedule import Recompute
from .splitmix import SplitMix
from .unneeded import drop_unneeded

COOLING = 10.0
MILDEST, STRICTEST = 0.1, 20.0
WORST = 5.0  # the weight of the worst slot's excess beside that of all slots' sum
TIGHT = 0.98  # of the budget: slots for whose sake something is recomputed
LOOK = 256  # moves between looks at the clock, and at which slots are tight
TRIES = 20
LONGEST = 12  # recomputes of one move
STEPS = (-3, -2, -1, 1, 2, 3)
WITH_ITS_OWN = 0.5  # of all shifts take along what serves the recompute alone


@dataclass
class Annealed:
    """A run of annealing.

    Attributes:
        live: the cheapest state that fits; None where none was seen.
        moves: tried, until the deadline.
    """

    live: Live | None
    moves: int


def anneal(
    live: Live, budget_bytes: int, hottest: float, mildest: float = MILDEST,
    *, moves: int, deadline: float, stop: Event | None = None, seed: int = 0,
) -> Annealed:  # fmt: skip
    """Try so many moves from `live`, which may be changed and need not fit, at temperatures that fall from the hottest
    while the weight of the penalty rises from the mildest.

    Args:
        stop: ends it as the deadline does.
    """
    walk = walk_from(live, budget_bytes - live.problem.static_bytes, seed, library_for(live.problem))
    ended = partial(_is_time, deadline, stop)
    done = _run(walk, moves, hottest, mildest, ended) if live.problem.evictable else moves
    found = walk.recomputes(best=True)
    if found is not None:
        best = Live(live.problem, found)
    elif ended():
        return Annealed(None, done)
    else:
        best = Live(live.problem, walk.recomputes(best=False) or ())
        if not descend(best, budget_bytes, Taste(0.3), deadline=deadline):
            return Annealed(None, done)
    drop_unneeded(best, budget_bytes, deadline)
    return Annealed(best, done)


def walk_from(live: Live, room: int, seed: int, lib: CDLL | None) -> CompiledWalk | Walk:
    """A walk that begins with a state, which it may change.

    Args:
        room: the budget without the static bytes.
        lib: what it runs in; None for Python.
    """
    walk = Walk if lib is None else partial(CompiledWalk, lib)
    op_cost = live.problem.step_cost / max(1, len(live.problem.ops)) or 1.0
    tensor_bytes = float(np.mean([b for b in live.bytes if b] or [1]))
    return walk(live, room, seed, op_cost, tensor_bytes)


def _is_time(deadline: float, stop: Event | None) -> bool:
    return time.monotonic() > deadline or (stop is not None and stop.is_set())


def _run(walk: CompiledWalk | Walk, moves: int, hottest: float, mildest: float, ended: Callable[[], bool]) -> int:
    """Walk; returns how many moves were tried."""
    for number in range(0, moves, LOOK):
        if ended():
            return number
        done = number / moves
        walk.moves(min(LOOK, moves - number), hottest * COOLING**-done, mildest * (STRICTEST / mildest) ** done)
    return moves


@dataclass
class _Recomputes:
    """A set from which one is drawn in constant time."""

    items: list[Recompute]
    place: dict[Recompute, int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {item: i for i, item in enumerate(self.items)}

    def update(self, move: Move) -> None:
        for sign, slot, op in move:
            if sign > 0:
                self.place[slot, op] = len(self.items)
                self.items.append((slot, op))
                continue
            i, last = self.place.pop((slot, op)), self.items.pop()
            if last != (slot, op):
                self.items[i] = last
                self.place[last] = i


class Walk:
    def __init__(self, live: Live, room: int, seed: int, op_cost: float, tensor_bytes: float) -> None:
        self.live, self.room, self.rng = live, room, SplitMix(seed)
        self.op_cost, self.tensor_bytes = op_cost, tensor_bytes
        self.candidates = live.problem.evictable
        self.current = _Recomputes(live.recomputes())
        self.tight = np.zeros(0, dtype=np.int64)
        self.best: list[Recompute] | None = None
        self.best_cost = math.inf

    def recomputes(self, best: bool) -> list[Recompute] | None:
        """Those of the state that the walk is in, or of the cheapest that fits; None where none was seen."""
        return self.best if best else list(self.current.items)

    def moves(self, count: int, temperature: float, weight: float) -> None:
        """So many moves at one temperature, with the slots that are tight when they begin."""
        live, rng = self.live, self.rng
        cost, excess = live.cost / self.op_cost, self._excess()
        self.tight = np.nonzero(live.total > TIGHT * self.room)[0]
        for _ in range(count):
            move = self._draw()
            if not move:
                continue
            before = live.levels()
            live.apply(move)
            then, over = live.cost / self.op_cost, self._excess()
            worse = then - cost + weight * (over - excess)
            if worse > 0 and rng.random() >= math.exp(-worse / temperature):
                live.take_back(move, before)
                continue
            cost, excess = then, over
            self.current.update(move)
            if not excess and live.cost < self.best_cost:
                self.best, self.best_cost = list(self.current.items), live.cost

    def _excess(self) -> float:
        """Bytes above the budget, summed over the slots, and those of the worst one again."""
        over = self.live.total - self.room
        worst = int(over.max(initial=0))
        return (float(np.maximum(over, 0).sum()) + WORST * worst) / self.tensor_bytes if worst > 0 else 0.0

    def _draw(self) -> Move:
        """Half of all moves recompute something more, most of them for a tight slot."""
        kind = self.rng.random()
        if kind < 0.5:
            tight = self.tight
            near = int(tight[self.rng.below(len(tight))]) if kind < 0.35 and len(tight) else -1
            return self._addition(near)
        if not self.current.items:
            return []
        slot, op = self.current.items[self.rng.below(len(self.current.items))]
        return [(-1, slot, i) for i in self._own(slot, op)] if kind < 0.75 else self._shift(slot, op)

    def _addition(self, near: int) -> Move:
        """Let a tensor go after one of its events (the last before slot `near`, if any) until its next read."""
        live, rng = self.live, self.rng
        for _ in range(TRIES):
            t = self.candidates[rng.below(len(self.candidates))]
            events = live.events[t]
            if len(events) < 2:
                continue
            j = 1 + rng.below(len(events) - 1) if near < 0 else bisect_left(events, 2 * live.key(near, 0))
            if j == 0 or j == len(events) or events[j] & 1:
                continue
            before, slot = map(live.slot, events[j - 1 : j + 1])
            op = live.problem.producer[t]
            if slot - before < 2 or op >= slot or live.has(slot, op):
                continue
            return self._chain(slot, op) if rng.random() < 0.5 else [(1, slot, op)]
        return []

    def _chain(self, slot: int, op: int) -> Move:
        """With some of what the recompute reads recomputed as well, where that would have to be held for it."""
        live, rng = self.live, self.rng
        ops, producer = live.problem.ops, live.problem.producer
        share, chosen, stack = 0.7 * rng.random(), set[int](), [op]
        while stack:
            i = stack.pop()
            if i in chosen or live.has(slot, i):
                continue
            chosen.add(i)
            if len(chosen) > LONGEST:
                return [(1, slot, op)]
            moment = live.key(slot, i)
            for t in live.replays[i]:
                p = producer[t]
                if ops[p].recomputable and not live.pinned[t] and not live.is_live(t, moment) and rng.random() < share:
                    stack.append(p)
        return [(1, slot, i) for i in sorted(chosen)]

    def _shift(self, slot: int, op: int) -> Move:
        """Recompute it earlier or later, between the neighbouring events of what it writes."""
        live, rng = self.live, self.rng
        events = live.events[live.problem.ops[op].outputs[0]]
        j = bisect_left(events, 2 * live.key(slot, op) + 1)
        first = max(op + 1, live.slot(events[j - 1]) if j else 0)
        last = live.slot(events[j + 1]) if j + 1 < len(events) else slot
        if last <= first:
            return []
        far = first + rng.below(last - first + 1) if rng.random() < 0.5 else slot + STEPS[rng.below(len(STEPS))]
        there = max(first, min(last, far))
        if there == slot or not live.items[there] or live.has(there, op):
            return []
        moved = self._own(slot, op) if rng.random() < WITH_ITS_OWN else [op]
        return [(-1, slot, i) for i in moved] + [(1, there, i) for i in moved if i < there and not live.has(there, i)]

    def _own(self, slot: int, op: int) -> list[int]:
        """A recompute and those of its slot that serve it alone."""
        live, producer = self.live, self.live.problem.producer
        found, stack = [op], [op]
        reads = {2 * live.key(slot, op)}
        while stack:
            for t in live.replays[stack.pop()]:
                p = producer[t]
                if p not in found and live.has(slot, p) and not self._is_read(slot, p, reads):
                    found.append(p)
                    stack.append(p)
                    reads.add(2 * live.key(slot, p))
        return found

    def _is_read(self, slot: int, op: int, but: set[int]) -> bool:
        """Whether there is a read, except for some, of what a recompute writes before it is written again."""
        written = 2 * self.live.key(slot, op) + 1
        for t in self.live.outputs[op]:
            events = self.live.events[t]
            j = bisect_left(events, written) + 1
            while j < len(events) and events[j] in but:
                j += 1
            if j < len(events) and not events[j] & 1:
                return True
        return False
