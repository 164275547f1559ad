"""Steps of repeated parts: what repeats, figures of options against a naive replay, plans and their bounds."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from solvers import Problem
from solvers.auto import Auto
from solvers.base import Effort
from solvers.descent import Taste, descend
from solvers.greedy import Greedy
from solvers.live import Live
from solvers.parts import Parts, solve_parts
from solvers.repeats import Run, backward_of, repeats
from solvers.schedule import computes
from tests.bench.families import FAMILIES, lstm, transformer
from tests.bench.problems import plain_peak_bytes
from tests.solvers.oracles import replay
from tests.solvers.strategies import seeded_problem

SMALL = {"transformer": lambda: transformer(16), "lstm": lambda: lstm(32)}


@cache
def small(name: str) -> Problem:
    return SMALL[name]()


@pytest.mark.parametrize("name", ["transformer-200", "lstm-200", "transformer-12"])
def test_every_block_and_every_step_is_in_a_run(name: str) -> None:
    problem = FAMILIES[name]()
    runs = repeats(problem)
    assert len({(run.kind, len(run.forward)) for run in runs}) == 1
    assert problem.num_forward - sum(len(run.forward) for run in runs) < 5


def test_runs_are_apart_and_in_order() -> None:
    for problem in (*(seeded_problem(seed) for seed in range(40)), *map(small, SMALL), FAMILIES["experts-64"]()):
        runs = repeats(problem)
        for a, b in pairwise(runs):
            assert a.forward.stop <= b.forward.start
            assert b.backward.stop <= a.backward.start
        assert all(run.forward.stop <= problem.num_forward <= run.backward.start for run in runs)


def test_nothing_repeats_where_all_ops_differ() -> None:
    assert repeats(FAMILIES["layered-small"]()) == ()


def slot_peaks(problem: Problem, live: Live) -> np.ndarray:
    """The naive replay's highest bytes from one required op to the next."""
    schedule = live.schedule()
    peaks, slot, done = np.zeros(len(problem.ops), dtype=np.int64), 0, set()
    order, moments = iter(computes(schedule)), replay(problem, schedule).moment_bytes
    pending = 0
    for step, moment in zip(schedule, moments, strict=True):
        if step.kind != "compute":
            continue
        pending = max(pending, moment)
        i = next(order)
        if i not in done:
            done.add(i)
            slot, peaks[i], pending = i, pending, 0
    assert slot == len(problem.ops) - 1
    return peaks


@pytest.mark.parametrize("name", SMALL)
def test_figures_of_options_are_those_of_a_naive_replay(name: str) -> None:
    problem, rng = small(name), random.Random(0)
    parts = Parts(problem, repeats(problem), plain_peak_bytes(problem), time.monotonic() + 100)
    for kind in parts.kinds.values():
        for rung in (*kind.ladder(kind.highest)[::3], *kind.lower(int(kind.model.plain.max()) * 7 // 8)):
            kind.ask(rung, 10, time.monotonic() + 100)
    menus = [list(parts._menu(part, key)) for part, key in zip(parts.parts, parts.keys, strict=True)]
    for _ in range(6):
        taken = [rng.choice(menu) for menu in menus]
        live = Live(problem)
        for part, (_, option, _) in zip(parts.parts, taken, strict=True):
            live.add_all(part.in_step(option))
        peaks = slot_peaks(problem, live)
        assert live.cost == sum(figures.cost for _, _, figures in taken) > 0
        for r, (run, (_, _, figures)) in enumerate(zip(parts.runs, taken, strict=True)):
            before = [figures for _, _, figures in taken[:r]]
            told = [figures.peaks[half] - sum(f.freed[half] for f in before) for half in (0, 1)]
            assert told == [int(peaks[ops.start : ops.stop].max()) for ops in (run.forward, run.backward)]


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "share"), [("transformer", 60), ("lstm", 45)])
def test_a_composed_plan_is_close_to_its_bound(name: str, share: int) -> None:
    problem = small(name)
    budget = plain_peak_bytes(problem) * share // 100
    found = solve_parts(problem, repeats(problem), budget, Effort(20.0, 0.02))
    greedy = Greedy().solve(problem, budget)
    assert found is not None
    assert found.bound is not None
    again = replay(problem, found.schedule)
    assert again.peak_bytes == found.peak_bytes <= budget
    assert again.added_cost == found.added_cost <= greedy.added_cost
    assert problem.overhead(found.added_cost - found.bound) < 0.02


def test_a_warm_start_is_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small("transformer")
    budget = plain_peak_bytes(problem) * 60 // 100
    start = Greedy().solve(problem, budget)
    lowest = Live(problem)
    descend(lowest, 0, Taste(0.0))
    monkeypatch.setattr(Parts, "search", lambda self, deadline: lowest)
    monkeypatch.setattr(Parts, "deepen", lambda self, deadline: None)
    found = solve_parts(problem, repeats(problem), budget, Effort(10.0, 1.0, (start.schedule,)))
    assert found is not None
    assert found.added_cost <= start.added_cost < lowest.cost


def test_auto_takes_runs_that_are_known() -> None:
    """The blocks by themselves, their outputs run once: as regions of a model are."""
    problem = small("transformer")
    ends = range(14, 16 * 14 + 1, 14)
    ops = tuple(replace(op, recomputable=op.recomputable and i not in ends) for i, op in enumerate(problem.ops))
    regions = replace(problem, ops=ops)
    pieces = [range(end - 13, end + 1) for end in ends]
    runs = tuple(Run(piece, ops, 0) for piece, ops in zip(pieces, backward_of(regions, pieces), strict=True))
    budget = plain_peak_bytes(regions) // 2
    lines: list[str] = []
    found = Auto(runs=runs).solve(regions, budget, gap=0.02, report=lines.append)
    assert lines[0].startswith("repeated parts")
    assert found.bound is not None
    assert regions.overhead(found.added_cost - found.bound) <= 0.02
    assert replay(regions, found.schedule).peak_bytes <= budget
