"""Steps of many repeated parts: options for one part of each kind, and a choice of one option for each run.

An option is a set of recomputes within a run. It costs something, it frees bytes while other runs run (in the forward
and in the backward), and it changes what is live while the run itself runs. Options are found by descents and local
search on the run's own small problem (`solvers.part`), as rungs of a ladder from nothing freed to all there is; a
small program (`solvers.choice`) takes one for each run. Rungs are added on both sides of those that its relaxation
takes, and with lower peaks of their own where the budget binds while a run itself runs. The middle of the step, often
the loss, is a part of its own: nothing runs between its halves, and its peak is all that counts.

The plan is composed of the options and judged by `simulate` like any other. Nothing here proves anything; the bound
is that of the staged program (`solvers.ilp`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .base import CLOCK, Effort
from .bounds import floor_bytes
from .choice import Choice, Figures, Relaxed
from .climb import bound_by_relaxation
from .descent import Taste, cheapest_descent, descend, repair
from .end_slots import first_ends
from .hunt import Hunt
from .ilp import ALL_SCHEDULES
from .live import Live
from .local import improve
from .mip import Worker
from .part import Part, parts_of
from .problem import Problem
from .repeats import MIDDLE, Run
from .schedule import Recompute
from .solution import Solution, cheapest_fit, solution

RUNGS = 12
LOWER = 3
STEPS = 150
DEEP_STEPS = 400
POLISH_STEPS = 60
USED = 1e-6
PRICED = 1e-9
WORTH = 0.002
FINEST = 128
ROUNDED = 0.001
ABOUT = 0.95
ASK_SHARE = 0.3
COMPOSE_SHARE = 0.5
CHOICE_SHARE = 0.3
DEEP_SHARE = 0.6
POLISH_SHARE = 0.7
BOUND_SHARE = 0.5

Option = tuple[Recompute, ...]
Menu = list[tuple["Rung", Option, Figures]]


class Rung(NamedTuple):
    """What an option is asked for.

    Attributes:
        freed_bytes: to be freed while other runs run.
        lag_bytes: so much less in the forward.
        most_bytes: the peak of its own that it may have.
    """

    freed_bytes: int
    lag_bytes: int
    most_bytes: int


class Kind:
    """Runs of one kind, and the options found for the part that most of them are.

    Attributes:
        options: what was found, by rung; the first is nothing at all.
        asked: how often each was asked for.
    """

    def __init__(self, parts: Sequence[Part], deadline: float) -> None:
        counts: dict[object, int] = {}
        for part in parts:
            counts[part.key] = counts.get(part.key, 0) + 1
        self.model = max(parts, key=lambda part: counts[part.key])
        self.highest = 2 * int(self.model.plain.max(initial=0)) + 1
        self.options: dict[Rung, Option | None] = {Rung(0, 0, self.highest): ()}
        self.asked: dict[Rung, int] = {}
        lowest = Live(self.model.holding((self.highest, self.highest), self.highest))
        descend(lowest, 0, Taste(0.0), deadline=deadline)
        change = Live(self.model.problem, lowest.recomputes()).total - self.model.plain
        self.most_bytes = max(0, -int(change[self.model.away + 1]))
        self.lowest_bytes = floor_bytes(self.model.problem)

    def ladder(self, most_bytes: int) -> list[Rung]:
        """Rungs to begin with under a peak of the part's own."""
        if not self.model.has_between:
            return []
        lags = dict.fromkeys((0, min(self.model.lag_bytes, self.most_bytes)))
        return [Rung(self.most_bytes * j // RUNGS, lag, most_bytes) for lag in lags for j in range(1, RUNGS + 1)]

    def lower(self, room_bytes: int) -> Iterator[Rung]:
        """Rungs of peaks of the part's own from about `room_bytes` down to the lowest."""
        for j in range(LOWER + 1):
            most_bytes = room_bytes - (room_bytes - self.lowest_bytes) * j // (LOWER + 1)
            known = any(most_bytes * ABOUT < rung.most_bytes <= most_bytes for rung in self.options)
            if most_bytes >= self.lowest_bytes and not known:
                yield Rung(0, 0, most_bytes)
                yield from self.ladder(most_bytes)[LOWER - 1 :: LOWER]

    def between(self, rung: Rung) -> list[Rung]:
        """Rungs halfway to those next to this one."""
        same = sorted(r.freed_bytes for r in self.options if r[1:] == rung[1:])
        j = same.index(rung.freed_bytes)
        near = [same[i] for i in (j - 1, j + 1) if 0 <= i < len(same)]
        return [rung._replace(freed_bytes=(rung.freed_bytes + other) // 2) for other in near
                if abs(other - rung.freed_bytes) * FINEST > self.most_bytes]  # fmt: skip

    def ask(self, rung: Rung, steps: int, deadline: float) -> None:
        """Look for an option of that rung by a descent and local search; the next time, by more local search."""
        if time.monotonic() > deadline:
            return
        less = max(0, rung.freed_bytes - rung.lag_bytes), rung.freed_bytes
        problem, known = self.model.holding(less, rung.most_bytes), self.options.get(rung)
        if known is None:
            live = cheapest_descent(problem, rung.most_bytes, deadline=deadline)
        else:
            live = Live(problem, known)
        if live is not None:
            seed = self.asked.get(rung, 0)
            improve(live, rung.most_bytes, steps=steps, deadline=deadline, seed=seed)
            self.asked[rung] = seed + 1
        self.options[rung] = None if live is None else tuple(live.recomputes())


class Parts:
    """A step of runs, the menu of each and the choice among them.

    Attributes:
        deadline: for asking; what is known by then is chosen from.
    """

    def __init__(self, problem: Problem, runs: Sequence[Run], budget_bytes: int, deadline: float) -> None:
        self.problem, self.budget_bytes, self.deadline = problem, budget_bytes, deadline
        self.parts = sorted(parts_of(problem, _with_middle(problem, runs)), key=lambda part: part.run.forward.start)
        self.runs = [part.run for part in self.parts]
        numbers = dict.fromkeys(run.kind for run in self.runs)
        self.kinds = {n: Kind([part for part in self.parts if part.run.kind == n], deadline) for n in numbers}
        self.plain = Live(problem).total + problem.static_bytes
        keys: dict[object, int] = {}
        self.keys = [keys.setdefault(part.key, len(keys)) for part in self.parts]
        self.known: dict[tuple[int, Option], tuple[int, np.ndarray]] = {}
        self.menus: list[Menu] = []

    def search(self, deadline: float) -> Live | None:
        """The cheapest plan found that is composed of options and fits, or None."""
        for kind in self.kinds.values():
            for rung in kind.ladder(kind.highest):
                kind.ask(rung, 0, self.deadline)
        return self._settled(STEPS, deadline)

    def deepen(self, deadline: float) -> Live | None:
        """Such a plan after longer searches for options like those taken."""
        return self._settled(DEEP_STEPS, deadline)

    def _settled(self, steps: int, deadline: float) -> Live | None:
        """Refine the menus until the relaxation gains little; then compose a plan."""
        cost = math.inf
        while True:
            self.menus = [list(self._menu(part, key)) for part, key in zip(self.parts, self.keys, strict=True)]
            figures = [[figures for _, _, figures in menu] for menu in self.menus]
            choice = Choice(self.runs, figures, self.plain, self.problem.num_forward, self.budget_bytes)
            relaxed = choice.relaxed()
            if relaxed is None:
                return None
            if relaxed.cost > (1 - WORTH) * cost or not self._refine(relaxed, steps):
                return self._composed(choice, relaxed, deadline)
            cost = relaxed.cost

    def _refine(self, relaxed: Relaxed, steps: int) -> bool:
        """Ask again for the rungs taken, for those near them, and for lower peaks where they bind; False where the time
        is up.
        """
        wanted: dict[tuple[int, Rung], None] = {}
        for run, menu, shares in zip(self.runs, self.menus, relaxed.shares, strict=True):
            for (rung, _, _), share in zip(menu, shares, strict=True):
                if share > USED:
                    near = (rung, *self.kinds[run.kind].between(rung))
                    wanted.update(((run.kind, rung), None) for rung in near)
        wanted.update((found, None) for found in self._lower(relaxed))
        for number, rung in wanted:
            self.kinds[number].ask(rung, steps, self.deadline)
        return time.monotonic() < self.deadline

    def _lower(self, relaxed: Relaxed) -> Iterator[tuple[int, Rung]]:
        """Of each kind, rungs of a lower peak for the run at which the budget binds most while it runs itself."""
        tight: dict[int, tuple[float, int]] = {}
        for r, (run, prices) in enumerate(zip(self.runs, relaxed.prices, strict=True)):
            price = float(prices.max())
            if price > max(PRICED, tight.get(run.kind, (0.0, 0))[0]):
                tight[run.kind] = price, r
        for number, (_, r) in tight.items():
            kind, room = self.kinds[number], self._own_room(r, relaxed.room_bytes[r])
            yield from ((number, rung) for rung in kind.lower(room))

    def _own_room(self, r: int, room_bytes: np.ndarray) -> int:
        """What the small problem of a run may peak at."""
        part = self.parts[r]
        others = np.split(self.plain[part.places] - part.plain[part.own], [len(part.run.forward)])
        return min(int(room) - int(half.max(initial=0)) for room, half in zip(room_bytes, others, strict=True))

    def _menu(self, part: Part, key: int) -> Iterator[tuple[Rung, Option, Figures]]:
        for rung, option in self.kinds[part.run.kind].options.items():
            if option is not None and all(slot < len(part.slots) for slot, _ in option):
                if (key, option) not in self.known:
                    live = Live(part.problem, option)
                    self.known[key, option] = live.cost, live.total - part.plain
                yield rung, option, self._figures(part, *self.known[key, option])

    def _figures(self, part: Part, cost: int, change: np.ndarray) -> Figures:
        own = np.split(self.plain[part.places] + change[part.own], [len(part.run.forward)])
        freed = -int(change[part.away]), -int(change[part.away + 1])
        return Figures(cost, freed, (int(own[0].max(initial=0)), int(own[1].max(initial=0))))

    def _composed(self, choice: Choice, relaxed: Relaxed, deadline: float) -> Live | None:
        """A plan of one option for each run: the relaxation rounded, or the integers where that costs much more."""
        rounded = [_rounded(menu, shares) for menu, shares in zip(self.menus, relaxed.shares, strict=True)]
        live = self._plan(rounded, deadline)
        if live is not None and live.cost - relaxed.cost <= ROUNDED * self.problem.step_cost:
            return live
        worker = Worker()
        try:
            taken = choice.taken(worker, time.monotonic() + CHOICE_SHARE * (deadline - time.monotonic()))
        finally:
            worker.end()
        other = None if taken is None else self._plan(taken, deadline)
        return min((found for found in (live, other) if found is not None), key=lambda found: found.cost, default=None)

    def _plan(self, taken: Sequence[int], deadline: float) -> Live | None:
        live = Live(self.problem)
        chosen = zip(self.parts, self.menus, taken, strict=True)
        live.add_all(recompute for part, menu, o in chosen for recompute in part.in_step(menu[o][1]))
        return live if repair(live, self.budget_bytes, deadline) else None


def _with_middle(problem: Problem, runs: Sequence[Run]) -> list[Run]:
    """The runs, and what lies between the last of their forwards and the first of their backwards: often the loss."""
    first = max(run.forward.stop for run in runs)
    stop = min(run.backward.start for run in runs)
    middle = Run(range(first, problem.num_forward), range(problem.num_forward, stop), MIDDLE)
    return [*runs, middle] if middle.forward and middle.backward else list(runs)


def _rounded(menu: Menu, shares: np.ndarray) -> int:
    """Of the options of which the relaxation takes a share, the one that frees most."""
    return max(np.flatnonzero(shares > USED).tolist(), key=lambda o: menu[o][2].freed[1])


def solve_parts(
    problem: Problem, runs: Sequence[Run], budget_bytes: int, effort: Effort, solver: str = "auto"
) -> Solution | None:
    """A plan composed of options for the runs and polished, and a bound over all schedules; None where none was found.

    Runs do not overlap; ops between them are not recomputed but by the polish.
    """
    state = Hunt(problem, budget_bytes, effort.until(), int(effort.gap * problem.step_cost), effort.report)
    parts = Parts(problem, runs, budget_bytes, effort.until(ASK_SHARE))
    state.offer(parts.search(effort.until(COMPOSE_SHARE)))
    state.start_from(effort.warm_starts, effort.until(COMPOSE_SHARE))
    if state.live is None:
        return None
    bound_by_relaxation(state, first_ends(problem, 0, budget_bytes), BOUND_SHARE)
    _polish(state, effort)
    if not state.finished:
        bound_by_relaxation(state, first_ends(problem, 1, budget_bytes), BOUND_SHARE)
    if not state.finished and time.monotonic() < effort.until(DEEP_SHARE):
        parts.deadline = effort.until(DEEP_SHARE)
        state.offer(parts.deepen(effort.until(POLISH_SHARE)))
        _polish(state, effort)
    if time.monotonic() > parts.deadline:
        state.notes[CLOCK] = None
    best = cheapest_fit(problem, budget_bytes, solver, (state.live.schedule(), *effort.warm_starts))
    notes = tuple(state.notes)
    return best and solution(problem, best.schedule, solver, bound=state.bound, family=ALL_SCHEDULES, notes=notes)


def _polish(state: Hunt, effort: Effort) -> None:
    assert state.live is not None
    if improve(state.live, state.budget_bytes, steps=POLISH_STEPS, deadline=effort.until(POLISH_SHARE)):
        state.notes[CLOCK] = None
    state.tell("repeated parts")
