"""Simulated annealing over sets of recomputes, which may exceed the budget on the way to a plan.

Where most of what is held must be recomputed, a plan and a cheaper one are far apart: every set between them peaks too
high. So the budget is a penalty here: one move adds, takes away or shifts a recompute, and is accepted with the
probability of Metropolis et al. (1953) for what it adds to cost and penalty, while the temperature falls and the
penalty rises. Costs count in those of an average op, bytes in those of an average tensor, so that one schedule of
temperatures serves all problems. The random numbers are seeded: the clock alone can make two runs differ.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from .descent import Taste, descend, drop_unneeded
from .live import Live, Move, Recompute
from .problem import Problem

COOLING = 10.0
MILDEST, STRICTEST = 0.1, 20.0
WORST = 5.0  # the weight of the worst slot's excess beside that of all slots' sum
TIGHT = 0.98  # of the budget: slots for whose sake something is recomputed
LOOK = 256  # moves between looks at the clock, and at which slots are tight
TRIES = 20
LONGEST = 12  # recomputes of one move
SHORTEST = 20  # moves of a first run for each op
MOST_OPS = 500  # that are counted for it
GROWTH = 4
FASTEST = 1e9  # until a first run has told
FEWEST = 0.2  # of its turn: a shorter run is not worth it
TURNS = 2  # of all ways: then the dearest is left out, and runs grow no longer
SEARCH_GROWTH = 2
WITH_ITS_OWN = 0.5  # of all shifts take along what serves the recompute alone


@dataclass(frozen=True)
class Way:
    """How a run goes about it: from no recompute or from the best plan, how hot it begins, how mild the penalty is."""

    plain: bool
    hottest: float
    mildest: float = MILDEST


WAYS = (Way(False, 0.5), Way(True, 0.5), Way(False, 0.1), Way(False, 2.0, 1.0))
SEARCH = Way(True, 10.0, 1.0)  # so hot that cost hardly counts: finds dear plans where the others find none


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
    *, moves: int, deadline: float, seed: int = 0,
) -> Annealed:  # fmt: skip
    """Try so many moves from `live`, which is changed and need not fit, at temperatures that fall from the hottest
    while the weight of the penalty rises from the mildest.
    """
    walk = _Walk(live, budget_bytes - live.problem.static_bytes, random.Random(seed))
    done = walk.run(moves, hottest, mildest, deadline) if walk.candidates else moves
    best = Live(live.problem, walk.best) if walk.best is not None else live
    if walk.best is None and not descend(live, budget_bytes, Taste(0.3), deadline=deadline):
        return Annealed(None, done)
    drop_unneeded(best, budget_bytes, deadline)
    return Annealed(best, done)


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

    def next(self, best: Live | None, deadline: float) -> Live | None:
        """What another run finds, of as many moves as its turn is or the time allows."""
        if self.number - self.searches == TURNS * len(WAYS) and len(self.costs) == len(WAYS):
            del self.costs[max(self.costs, key=lambda way: self.costs[way])]
        way = self._way(best)
        start = Live(self.problem, () if way.plain or best is None else best.recomputes())
        begin = time.monotonic()
        wanted = self._wanted(way)
        moves = int(min(wanted, self.pace * max(0.0, deadline - begin)))
        self.number += 1
        run = anneal(
            start, self.budget_bytes, way.hottest, way.mildest, moves=moves, deadline=deadline, seed=self.number
        )  # fmt: skip
        self.pace = max(1, run.moves) / (time.monotonic() - begin)
        self.hurried |= run.moves < wanted
        if way == SEARCH:
            self.searches += 1
        else:
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
        return shortest * GROWTH ** min((self.number - self.searches) // len(WAYS), TURNS)


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


class _Walk:
    def __init__(self, live: Live, room: int, rng: random.Random) -> None:
        problem = live.problem
        self.live, self.room, self.rng = live, room, rng
        self.candidates = live.evictable
        self.recomputes = _Recomputes(live.recomputes())
        self.op_cost = problem.step_cost / max(1, len(problem.ops)) or 1.0
        self.tensor_bytes = float(np.mean([b for b in live.bytes if b] or [1]))
        self.tight = np.zeros(0, dtype=np.int64)
        self.best: list[Recompute] | None = None
        self.best_cost = math.inf

    def run(self, moves: int, hottest: float, mildest: float, deadline: float) -> int:
        """Walk; returns how many moves were tried."""
        live, rng = self.live, self.rng
        cost, excess = live.cost / self.op_cost, self._excess()
        temperature = weight = 0.0
        for number in range(moves):
            if number % LOOK == 0:
                if time.monotonic() > deadline:
                    return number
                done = number / moves
                temperature = hottest * COOLING**-done
                weight = mildest * (STRICTEST / mildest) ** done
                self.tight = np.nonzero(live.total > TIGHT * self.room)[0]
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
            self.recomputes.update(move)
            if not excess and live.cost < self.best_cost:
                self.best, self.best_cost = list(self.recomputes.items), live.cost
        return moves

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
            near = int(tight[self.rng.randrange(len(tight))]) if kind < 0.35 and len(tight) else -1
            return self._addition(near)
        if not self.recomputes.items:
            return []
        slot, op = self.recomputes.items[self.rng.randrange(len(self.recomputes.items))]
        return [(-1, slot, i) for i in self._own(slot, op)] if kind < 0.75 else self._shift(slot, op)

    def _addition(self, near: int) -> Move:
        """Let a tensor go after one of its events (the last before slot `near`, if any) until its next read."""
        live, rng = self.live, self.rng
        for _ in range(TRIES):
            t = self.candidates[rng.randrange(len(self.candidates))]
            events = live.events[t]
            if len(events) < 2:
                continue
            j = rng.randrange(1, len(events)) if near < 0 else bisect_left(events, 2 * live.key(near, 0))
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
        far = rng.randint(first, last) if rng.random() < 0.5 else slot + rng.choice((-3, -2, -1, 1, 2, 3))
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
        """Whether there is a read, but for some, of what a recompute writes before it is written again."""
        written = 2 * self.live.key(slot, op) + 1
        for t in self.live.outputs[op]:
            events = self.live.events[t]
            j = bisect_left(events, written) + 1
            while j < len(events) and events[j] in but:
                j += 1
            if j < len(events) and not events[j] & 1:
                return True
        return False
