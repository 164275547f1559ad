"""Relaxations of more and more stages: what they prove, and the plans that they are rounded to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from .end_slots import first_ends
from .engine import Answer, bound_staged, relax_staged
from .hunt import Hunt, anneal_for, annealing_beside
from .problem import LARGE
from .rounding import rounded
from .staged import StagedModel

CLIMB = (3, 6, 12, 24, 48)
CLIMB_SHARE = 0.6
BESIDE_SHARE = 0.85  # while annealing goes on beside it
CLIMB_GROWTH = 2.5
CHEAP = 6000
WIDE_POLISH_SHARE = 0.1
ROUNDING_SECONDS, ROUNDING_SHARE = 1.0, 0.5  # beside what the relaxation took
HARDLY_MORE = 1.05
ANNEAL_SHARE = 0.25

Offer = Callable[[StagedModel, Answer, float], None]


def bound_by_relaxation(state: Hunt, ends: tuple[int, ...], share: float) -> None:
    """The bound of a program's relaxation, in a share of the time left."""
    until, cost_limit = state.until(share), math.inf if state.live is None else state.cost
    with suppress(TimeoutError):
        model = StagedModel(state.problem, state.budget_bytes, ends, until, cost_limit)
        state.take_bound(model, relax_staged(model, until - time.monotonic()))


def climb_and_anneal(state: Hunt) -> tuple[int, ...]:
    """`climb` and a share of annealing: after it where much is open, since its relaxations lead to cheaper plans.

    Where the walk is compiled and much is open, runs beside it find cheaper plans than those would lead to.
    """
    if state.wide and state.fast:
        with annealing_beside(state) as offer:
            return climb(state, CLIMB[2:], BESIDE_SHARE, lambda *_: offer())
    late = state.wide
    if not late:
        anneal_for(state, ANNEAL_SHARE)
    cheap = climb(state, CLIMB[1:], CLIMB_SHARE, partial(offer_rounded, state))
    if late:
        anneal_for(state, ANNEAL_SHARE)
    return cheap


def climb(state: Hunt, counts: tuple[int, ...], share: float, offer: Offer) -> tuple[int, ...]:
    """Bounds of relaxations with windows, of more and more stages, until two in a row gain nothing.

    Args:
        share: of the time left.
        offer: is told of each, and of the seconds that a plan of it may take.

    Returns:
        The end slots of the last that was cheap enough to be solved for integers, if there are any.
    """
    until, seconds, fruitless, cheap = state.until(share), 0.0, 0, tuple[int, ...]()
    ends = set(first_ends(state.problem, CLIMB[0], state.budget_bytes))
    for count in counts if len(state.problem.ops) <= LARGE else ():
        begin, known = time.monotonic(), state.bound
        if state.finished or fruitless == 2 or begin + CLIMB_GROWTH * seconds > until:
            break
        ends.update(first_ends(state.problem, count, state.budget_bytes))
        chosen = tuple(sorted(ends))
        with suppress(TimeoutError):
            model = StagedModel(state.problem, state.budget_bytes, chosen, until, state.cost, windows=True)
            answer = bound_staged(model, until - time.monotonic())
            seconds = time.monotonic() - begin
            state.take_bound(model, answer)
            cheap = chosen if len(model.column) < CHEAP else cheap
            offer(model, answer, ROUNDING_SECONDS + ROUNDING_SHARE * seconds)
        state.tell(f"{len(ends)} stages, relaxed")
        fruitless = fruitless + 1 if state.bound == known else 0
    return cheap


def offer_rounded(state: Hunt, model: StagedModel, answer: Answer, seconds: float) -> None:
    """Round a relaxation's solution; where that costs hardly more than the best plan, local search goes on from it."""
    if answer.values is None or state.finished:
        return
    live = rounded(model, answer.values, min(state.deadline, time.monotonic() + seconds))
    if live is not None and live.cost < HARDLY_MORE * state.cost:
        state.offer(live)
        state.polish(WIDE_POLISH_SHARE, live)
