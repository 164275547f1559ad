"""The greedy eviction itself; `greedy`, `minimum` and `local` are built on it.

While the step peaks above the budget: of the tensors held across the peak moment without being read at it, evict
the one whose recompute costs least per byte it frees *at that moment*, and recompute it right before its next
read. What the recompute itself reads must be resident there: it is, or it is kept longer, or it is recomputed too.
Which of the latter two is the `keep_ratio`'s choice: an input is kept when its bytes are at most that share of the
evicted tensor's. Recomputes that turn out not to be needed are taken back at the end.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from .live import Live
from .problem import LARGE, Problem
from .schedule import Recompute
from .splitmix import SplitMix
from .unneeded import drop_unneeded

STALL_LIMIT = 60
KEEP_RATIOS = (0.3, 1.0, 0.0)
OVERTAKEN = 2.0
SKIPPED = 0.15
HOPELESS = 5


@dataclass(frozen=True, slots=True)
class Taste:
    """How evictions are chosen.

    Attributes:
        keep_ratio: an input of a recompute is kept when it has at most this share of the evicted tensor's bytes.
        noise: how far scores are blurred, for local search.
        promising: how many of the tensors that are cheapest per byte are looked at closely.
    """

    keep_ratio: float
    noise: float = 0.0
    promising: int = 48
    rng: random.Random | SplitMix = field(default_factory=lambda: SplitMix(0))

    def blur(self) -> float:
        """A factor for a score."""
        return 1.0 + self.noise * self.rng.random() if self.noise else 1.0


@dataclass(frozen=True, slots=True)
class Eviction:
    """Recomputes that free `gain` bytes (in `Problem.unit`s) at one moment for `cost`."""

    recomputes: tuple[Recompute, ...]
    gain: int
    cost: int

    @property
    def score(self) -> float:
        return self.cost / self.gain


@dataclass
class Descent:
    """The states a greedy descent passed through: a log of recomputes and its best prefix."""

    live: Live
    log: list[Recompute]
    best_peak: int
    best_length: int
    deadline: float

    @classmethod
    def start(cls, live: Live, deadline: float) -> Descent:
        return cls(live, [], live.peak_bytes, 0, deadline)

    def apply(self, eviction: Eviction) -> None:
        for slot, op in eviction.recomputes:
            self.live.add(slot, op)
            self.log.append((slot, op))
        if self.live.peak_bytes < self.best_peak:
            self.best_peak, self.best_length = self.live.peak_bytes, len(self.log)

    def rewind(self) -> None:
        """Go back to the smallest peak seen."""
        while len(self.log) > self.best_length:
            self.live.remove(*self.log.pop())


@dataclass
class Reached:
    """How low several descents came.

    Attributes:
        early_until: what is reached by then is reached again by descents that have the same time.
        known_bytes: the smallest peak reached by then; infinite where none was.
        live: the state of smallest peak.
    """

    early_until: float
    known_bytes: float = float("inf")
    live: Live | None = None

    def note(self, peak_bytes: int, *, surely: bool) -> None:
        if surely or time.monotonic() <= self.early_until:
            self.known_bytes = min(self.known_bytes, peak_bytes)

    def take(self, live: Live) -> None:
        if self.live is None or live.peak_bytes < self.live.peak_bytes:
            self.live = live


def descend(
    live: Live, budget_bytes: int, taste: Taste, cost_limit: float = float("inf"), deadline: float = float("inf"),
    reached: Reached | None = None, at_least: int = 0,
) -> bool:  # fmt: skip
    """Evict until `live` fits the budget, nothing helps or a limit is passed; ends at its smallest peak.

    Args:
        reached: told how low it comes, and when.
        at_least: recomputes that are added whatever the clock says.

    Returns:
        Whether it fits.
    """
    descent = Descent.start(live, deadline)
    stalled = 0
    while live.peak_bytes > budget_bytes and stalled < STALL_LIMIT and live.cost <= cost_limit:
        if len(descent.log) >= at_least and time.monotonic() > deadline:
            break
        best_before = descent.best_peak
        if not relieve(descent, budget_bytes, taste, cost_limit):
            break
        stalled = 0 if descent.best_peak < best_before else stalled + 1
        if reached is not None:
            reached.note(descent.best_peak, surely=len(descent.log) < at_least)
    descent.rewind()
    if reached is not None:
        reached.take(live)
    return live.peak_bytes <= budget_bytes


def relieve(descent: Descent, budget_bytes: int, taste: Taste, cost_limit: float = float("inf")) -> bool:
    """Bring the worst moment down with as many evictions as it takes; False when none helps within the limit."""
    live = descent.live
    if not len(live.total):
        return False
    slot = int(live.total.argmax())
    key = live.worst_key(slot)
    queue = _ranked(live, key, taste, cost_limit)
    target = budget_bytes - live.problem.static_bytes
    large = len(live.problem.ops) > LARGE  # then one moment is brought under the budget before the next is looked at
    if not large:
        target = max(target, _second_peak(live, slot))
    applied = False
    following = [score for score, _ in queue[1:]] + [float("inf")]
    for index, (_, t) in enumerate(queue):
        eviction = plan_eviction(live, t, key, taste.keep_ratio, cost_limit - live.cost)
        if eviction is None or (applied and eviction.score > OVERTAKEN * following[index]):
            continue
        if applied and eviction.score > OVERTAKEN * queue[0][0] + 1e-9:
            break
        descent.apply(eviction)
        applied = True
        if live.total[slot] <= target or (not large and int(live.total.argmax()) != slot):
            break
        if time.monotonic() > descent.deadline:
            break
    return applied


def _ranked(live: Live, key: int, taste: Taste, cost_limit: float) -> list[tuple[float, int]]:
    """Tensors worth evicting at `key` by score; only the most promising are planned for, unless none of them helps."""
    held = held_across(live, key)
    while part := list(islice(_skipping(held, taste), taste.promising)):
        queue = sorted(
            (eviction.score * taste.blur(), t)
            for t in part
            if (eviction := plan_eviction(live, t, key, taste.keep_ratio, cost_limit - live.cost)) is not None
        )
        if queue:
            return queue
    return []


def _skipping(tensors: Iterator[int], taste: Taste) -> Iterator[int]:
    """Leave some out at random, in proportion to the noise."""
    return (t for t in tensors if not taste.noise or taste.rng.random() > SKIPPED * taste.noise)


def _second_peak(live: Live, slot: int) -> int:
    before, after = live.total[:slot], live.total[slot + 1 :]
    return max(int(part.max()) if len(part) else 0 for part in (before, after))


def held_across(live: Live, key: int) -> Iterator[int]:
    """Tensors live at `key` only for a later read, that may be recomputed; cheapest per byte first."""
    event = 2 * key
    for t in live.problem.evictable:
        events = live.events[t]
        if events[0] < event < events[-1]:
            after = events[bisect_left(events, event)]
            if not after & 1 and after != event:
                yield t


def plan_eviction(
    live: Live, tensor: int, key: int, keep_ratio: float, cost_limit: float = float("inf")
) -> Eviction | None:
    """The recomputes that drop `tensor` before `key` and bring it back at its next read.

    None if nothing is gained, or if they cost more than the limit.
    """
    after = live.around(tensor, key + 1)[1]
    if after < 0 or after & 1:
        return None
    slot = live.slot(after)
    limit = live.bytes[tensor] * keep_ratio
    ops, producer = live.problem.ops, live.problem.producer
    chosen: dict[int, None] = {}
    gain = cost = 0
    stack = [producer[tensor]]
    while stack:
        i = stack.pop()
        if i in chosen or live.has(slot, i):
            continue
        moment = live.key(slot, i)
        if moment <= key:
            return None
        chosen[i] = None
        cost += ops[i].cost
        if cost > cost_limit:
            return None
        for t in ops[i].outputs:
            if _spans(live, t, key, moment):
                gain += live.bytes[t]
        for t in live.replays[i]:
            if live.is_live(t, moment):
                continue
            if live.bytes[t] <= limit or not ops[producer[t]].recomputable:
                gain -= live.bytes[t] if live.events[t] and live.around(t, moment)[0] < 2 * key else 0
            else:
                stack.append(producer[t])
    if gain <= 0:
        return None
    return Eviction(tuple((slot, i) for i in sorted(chosen)), gain // live.problem.unit, cost)


def _spans(live: Live, tensor: int, key: int, moment: int) -> bool:
    """Whether writing the tensor anew at `moment` frees it at `key`."""
    events = live.events[tensor]
    if live.pinned[tensor] or events[-1] < 2 * moment:
        return False
    j = bisect_left(events, 2 * moment)
    return not events[j] & 1 and j > 0 and events[j - 1] < 2 * key


def repair(live: Live, budget_bytes: int, deadline: float = float("inf")) -> bool:
    """Add what the budget asks for besides, and take back what it does not need; returns whether `live` fits."""
    fits = descend(live, budget_bytes, Taste(KEEP_RATIOS[0]), deadline=deadline)
    if fits:
        drop_unneeded(live, budget_bytes, deadline)
    return fits


def cheapest_descent(
    problem: Problem,
    budget_bytes: int,
    keep_ratios: tuple[float, ...] = KEEP_RATIOS,
    deadline: float = float("inf"),
    first_by: float = float("inf"),
    reached: Reached | None = None,
) -> Live | None:
    """The cheapest of the descents that fit the budget, or None. What the deadline leaves undone is left out.

    Args:
        first_by: the deadline as long as none has fitted.
        reached: told how low they come.
    """
    best: Live | None = None
    for keep_ratio in keep_ratios:
        until = deadline if best is not None else max(deadline, first_by)
        if time.monotonic() > until:
            break
        live = Live(problem)
        limit = float("inf") if best is None else HOPELESS * best.cost
        if descend(live, budget_bytes, Taste(keep_ratio), limit, until, reached):
            drop_unneeded(live, budget_bytes, until)
            if best is None or live.cost < best.cost:
                best = live
    return best
