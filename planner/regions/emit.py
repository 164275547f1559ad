"""emit: a flat schedule cut into one schedule per run of a region, each rewritten, proved and bound to its runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from solvers.problem import Problem
from solvers.replay import replay
from solvers.schedule import Schedule, computes, with_frees

from .compose import Composed


def settled(composed: Composed, schedule: Schedule) -> Schedule:
    """The same recomputes, each within its own region: right before its first reader, where it stood elsewhere."""
    order = tuple(_settle(composed, computes(schedule)))
    return with_frees(composed.problem, order)


def _settle(composed: Composed, order: Sequence[int]) -> Iterator[int]:
    problem, done, now = composed.problem, set[int](), None
    waiting: dict[int, dict[int, None]] = {}
    for i in order:
        place = composed.local[i]
        if i not in done:
            done.add(i)
            now = None if place is None else (place[0], i in composed.backward[place[0]])
            if now and now[1]:
                yield from _needed(problem, i, waiting.get(now[0], {}))
            yield i
        elif place is None or now is None or place[0] != now[0] or _at_its_start(composed, place[0], done):
            waiting.setdefault(place[0] if place else -1, {})[i] = None
        else:
            yield from _needed(problem, i, waiting.get(place[0], {}))
            waiting.get(place[0], {}).pop(i, None)
            yield i


def _at_its_start(composed: Composed, run: int, done: set[int]) -> bool:
    """Whether the run's forward is over and its backward has not begun."""
    forward, backward = composed.forward[run], composed.backward[run]
    return forward[-1] in done and backward[0] not in done


def _needed(problem: Problem, i: int, waiting: dict[int, None]) -> Iterator[int]:
    """What waits and is read by op `i`, first what that reads."""
    op = problem.ops[i]
    for t in (*op.inputs, *op.replay_inputs):
        producer = problem.producer[t]
        if producer in waiting:
            del waiting[producer]
            yield from _needed(problem, producer, waiting)
            yield producer


def cut(composed: Composed, schedule: Schedule, problems: Sequence[Problem]) -> list[Schedule]:
    """The schedule of each run, in its own Problem."""
    orders: list[list[int]] = [[0] for _ in problems]  # each begins with the inputs that it is given
    for i in computes(schedule):
        place = composed.local[i]
        if place is not None and not composed.problem.ops[i].optional:
            orders[place[0]].append(place[1])
    return [with_frees(problem, order) for problem, order in zip(problems, orders, strict=True)]


def own_peaks(
    composed: Composed, schedule: Schedule, problems: Sequence[Problem], schedules: Sequence[Schedule]
) -> list[int]:
    """For each run how many bytes it may hold, by the count of its own Problem, before the step's peak grows."""
    peak, held = 0, list[list[int]]([] for _ in problems)
    for moment in replay(composed.problem, schedule):
        kind, i = moment.step
        peak = max(peak, moment.moment_bytes)
        place = composed.local[i] if kind == "compute" else None
        if place is not None:
            held[place[0]].append(moment.moment_bytes)
    own = (
        [m.moment_bytes for m in replay(problem, part) if m.step.kind == "compute"][1:]
        for problem, part in zip(problems, schedules, strict=True)
    )
    return [
        peak - max((whole - alone for whole, alone in zip(*run, strict=True)), default=0)
        for run in zip(held, own, strict=True)
    ]
