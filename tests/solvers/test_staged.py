"""The staged program holds for every schedule: its indicators break no row, wherever the end slots are."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from solvers.engine import solve_staged
from solvers.problem import Op, Problem, Tensor
from solvers.schedule import Schedule, with_frees
from solvers.staged import StagedModel, first_ends, forward_binds

from .oracles import brute_force, replay
from .strategies import make_order, seeded_problem


def forward_graph(seed: int) -> Problem:
    """A small graph whose own peak binds: mostly forward, some results read much later, some ops in place."""
    rng = random.Random(seed)
    ops: list[Op] = []
    tensors: list[Tensor] = []
    count = rng.randint(4, 9)
    for i in range(count):
        known = list(range(len(tensors)))
        inputs = tuple(rng.choice(known[-rng.choice((2, 4, 9)) :]) for _ in range(rng.choice((1, 1, 2, 3)) if i else 0))
        outputs = tuple(range(len(tensors), len(tensors) + rng.choice((1, 1, 1, 2))))
        tensors += [Tensor(f"t{t}", rng.choice((0, 1, 2, 3, 4, 5, 8))) for t in outputs]
        same = tuple(t for t in dict.fromkeys(inputs) if tensors[t].bytes == tensors[outputs[0]].bytes)
        ops.append(
            Op(f"f{i}", inputs, outputs, rng.choice((0, 1, 1, 2, 5)), rng.choice((0, 0, 1, 3)), rng.random() < 0.9,
               reuse=same if rng.random() < 0.4 else ())
        )  # fmt: skip
    num_forward = count if rng.random() < 0.6 else rng.randint(count // 2, count)
    ops = [op if i < num_forward else replace(op, recomputable=False) for i, op in enumerate(ops)]
    outputs = tuple(t for t in range(len(tensors)) if rng.random() < 0.1)
    return Problem(tuple(ops), tuple(tensors), num_forward, outputs, static_bytes=rng.randint(0, 3))


def any_problem(seed: int) -> Problem:
    return forward_graph(seed) if seed % 3 else seeded_problem(seed)


def any_ends(problem: Problem, rng: random.Random) -> tuple[int, ...]:
    last = len(problem.ops) - 1
    slots = [s for s in range(last) if not problem.ops[s].optional]
    return tuple(sorted({last, *rng.sample(slots, rng.choice((0, len(slots), rng.randint(0, len(slots)))))}))


def order_end(problem: Problem) -> int:
    """The last required op: what is recomputed after it is no part of any stage."""
    return max(problem.required())


def indicators(model: StagedModel, schedule: Schedule) -> dict[str, float]:
    """What the variables stand for, read off a schedule; H and U are the smallest that their rows allow."""
    stage, done, live = 0, set(), set()
    again: set[tuple[int, int]] = set()
    resident: set[tuple[int, int]] = set()
    for (kind, i), following in pairwise((*schedule, ("compute", -1))):
        if kind == "free":
            live.discard(i)
        else:
            if i in done:
                again.add((i, stage))
            done.add(i)
            live.update(model.problem.ops[i].outputs)
        if following[0] == "compute" and stage < len(model.ends) - 1 and model.ends[stage] in done:
            stage += 1
            resident.update((t, stage) for t in live)
    values = {v.name: float(key in again) for key, v in model.R.items()}
    values |= {v.name: float(key in resident) for key, v in model.A.items()}
    for (t, k), v in model.H.items():
        values[v.name] = float((t, k + 1) in resident and (model.problem.producer[t], k) not in again)
    for (i, k), v in model.U.items():
        values[v.name] = float(any(j == i and later >= k for j, later in again & set(model.R)))
    return values


@pytest.mark.parametrize("seed", range(200))
def test_no_schedule_breaks_a_row(seed: int) -> None:
    """At a budget of its own peak, and at moments that are slots as at those that are runs of recomputes."""
    problem, rng = any_problem(seed), random.Random(seed)
    for _ in range(5):
        order = make_order(rng.randint, problem, rng.randint(0, 8))
        schedule = with_frees(problem, order[: order.index(order_end(problem)) + 1])
        peak = replay(problem, schedule).peak_bytes
        model = StagedModel(problem, peak, any_ends(problem, rng))
        values = indicators(model, schedule)
        vector = np.array([values[name] for name in model.column])
        assert model.surely_live(vector).max(initial=0) <= peak
        runs = range(len(problem.ops), len(problem.ops) + len(model.R))
        rows = model.peak_rows(np.array([*problem.required(), *runs]))
        for j, (first, stop) in enumerate(pairwise(rows.starts.tolist())):
            assert rows.coefficients[first:stop] @ vector[rows.columns[first:stop]] <= rows.limits[j]
        for variable in model.program.variables():
            variable.varValue = values[variable.name]
        broken = [c for c in model.program.constraints.values() if not c.valid(1e-9)]
        assert not broken


@pytest.mark.parametrize("seed", range(12))
def test_cuts_in_the_forward_bound_its_recompute(seed: int) -> None:
    """Every budget of a small graph: never above the optimum, and never called impossible where something fits."""
    problem = any_problem(seed)
    best, rng = brute_force(problem), random.Random(seed)
    for _, budget_bytes in best.points[-2:]:
        ends = any_ends(problem, rng) if seed % 2 else first_ends(problem, 4, budget_bytes)
        model = StagedModel(problem, budget_bytes, ends)
        answer = solve_staged(model, 10.0, 0)
        optimum = best.best(budget_bytes)
        assert optimum is not None and not answer.infeasible
        assert answer.bound is None or answer.bound * model.cost_unit <= optimum


def test_a_run_needs_its_own_memory() -> None:
    """Two late readers of a source: recomputing it is cheap, but between them nothing has room for its own input."""
    reads = ((), (0,), (1,), (2,), (1, 3))
    sizes = (6, 3, 1, 6, 1)
    ops = tuple(Op(f"f{i}", r, (i,), 1) for i, r in enumerate(reads))
    problem = Problem(ops, tuple(Tensor(f"t{i}", s) for i, s in enumerate(sizes)), len(ops))
    best = brute_force(problem)
    for budget_bytes in range(best.minimum_bytes, 13):
        assert forward_binds(problem, budget_bytes) == (best.best(budget_bytes) != 0)
        model = StagedModel(problem, budget_bytes, tuple(range(len(ops))))
        answer = solve_staged(model, 10.0, 0)
        assert answer.bound is not None and answer.bound * model.cost_unit == best.best(budget_bytes)
