"""The staged program holds for every schedule: its indicators break no row, wherever the end slots are."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from solvers import minimum_budget, solve
from solvers.end_slots import first_ends, forward_binds
from solvers.engine import bound_staged, relax_staged, solve_staged
from solvers.problem import Op, Problem, Tensor
from solvers.schedule import Schedule, with_frees
from solvers.simulate import simulate
from solvers.staged import StagedModel
from tests.bench.families import FAMILIES

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
    twice: set[tuple[int, int]] = set()
    resident: set[tuple[int, int]] = set()
    for (kind, i), following in pairwise((*schedule, ("compute", -1))):
        if kind == "free":
            live.discard(i)
        else:
            if i in done:
                (twice if (i, stage) in again else again).add((i, stage))
            done.add(i)
            live.update(model.problem.ops[i].outputs)
        if following[0] == "compute" and stage < len(model.ends) - 1 and model.ends[stage] in done:
            stage += 1
            resident.update((t, stage) for t in live)
    values = {v.name: float(key in again) for key, v in model.R.items()}
    values |= {v.name: float(key in twice) for key, v in model.Q.items()}
    values |= {v.name: float(key in resident) for key, v in model.A.items()}
    for (t, k), v in model.H.items():
        values[v.name] = float((t, k + 1) in resident and (model.problem.producer[t], k) not in again)
    for (i, k, last), v in model.U.items():
        values[v.name] = float(any(j == i and k <= later <= last for j, later in again & set(model.R)))
    return values


@pytest.mark.parametrize("seed", range(200))
def test_no_schedule_breaks_a_row(seed: int) -> None:
    """At a budget of its own peak, and at moments that are slots as at those that are runs of recomputes."""
    problem, rng = any_problem(seed), random.Random(seed)
    for _ in range(5):
        order = make_order(rng.randint, problem, rng.randint(0, 8))
        schedule = with_frees(problem, order[: order.index(order_end(problem)) + 1])
        peak = replay(problem, schedule).peak_bytes
        model = StagedModel(problem, peak, any_ends(problem, rng), windows=True)
        values = indicators(model, schedule)
        vector = np.array([values[name] for name in model.column])
        assert model.surely_live(vector).max(initial=0) <= peak
        runs = range(len(problem.ops), len(problem.ops) + len(model.R))
        rows = model.peak_rows(np.array([*problem.required(), *runs]))
        for j, (first, stop) in enumerate(pairwise(rows.starts.tolist())):
            assert rows.coefficients[first:stop] @ vector[rows.columns[first:stop]] <= rows.limits[j]
        for variable in model.program.variables():
            assert variable.lowBound <= values[variable.name] <= variable.upBound
            variable.varValue = values[variable.name]
        broken = [c for c in model.program.constraints.values() if not c.valid(1e-9)]
        assert not broken


def run_bytes(model: StagedModel, schedule: Schedule) -> dict[tuple[int, int], int]:
    """For each op and stage the least that is live while the op is recomputed there."""
    found: dict[tuple[int, int], int] = {}
    stage, done = 0, set()
    steps = list(zip(schedule, simulate(model.problem, schedule).moment_bytes, strict=True))
    for ((kind, i), live_bytes), ((following, _), _) in pairwise((*steps, (("compute", -1), 0))):
        if kind == "compute" and i in done:
            found[i, stage] = min(live_bytes, found.get((i, stage), live_bytes))
        if kind == "compute":
            done.add(i)
        if following == "compute" and stage < len(model.ends) - 1 and model.ends[stage] in done:
            stage += 1
    return found


def chain(rng: random.Random) -> Problem:
    """Ops that mostly read the one before, and a backward that reads them all: steps that run ops again in a row."""
    count, sizes = rng.randint(4, 8), rng.choice(((1,), (1, 2), (1, 9)))
    tensors = [Tensor(f"t{t}", rng.choice(sizes)) for t in range(count)] + [Tensor("g", 1)] * count
    others = [(rng.randrange(i),) if rng.random() < 0.6 else () for i in range(1, count)]
    reads = [tuple(dict.fromkeys((i, *other))) for i, other in enumerate(others)]
    ops = [Op(f"f{i}", read, (i,), rng.choice((0, 1, 2))) for i, read in enumerate([(), *reads])]
    for j in range(count):
        read = (count - 1 - j, *((count + j - 1,) if j else ()))
        ops.append(Op(f"b{j}", read, (count + j,), 1, recomputable=False))
    return Problem(tuple(ops), tuple(tensors), count, (len(tensors) - 1,))


@pytest.mark.parametrize("seed", range(150))
def test_what_runs_twice_counts_no_more_than_is_live(seed: int) -> None:
    """At each recompute, chains and paths as a few other values of the variables would choose them."""
    rng = random.Random(seed)
    problem = chain(rng) if seed % 4 else any_problem(seed)
    for _ in range(5):
        order = make_order(rng.randint, problem, rng.randint(4, 60))
        schedule = with_frees(problem, order[: order.index(order_end(problem)) + 1])
        model = StagedModel(problem, 0, any_ends(problem, rng))
        values, runs = indicators(model, schedule), run_bytes(model, schedule)
        vector = np.array([values[name] for name in model.column])
        for j, run in enumerate(model.R):
            sides = np.where(np.arange(len(problem.ops) + len(model.R)) == len(problem.ops) + j, 0.0, -np.inf)
            for share in (0.0, 0.5) if run in runs else ():
                other = values | {
                    v: float((v[0] == "Q" or x > 0) and rng.random() < share)
                    for v, x in values.items() if v[0] in "AQ" and v.endswith(f"_{run[1]}")
                }  # fmt: skip
                rows = model.twice.rows(np.array([other[name] for name in model.column]), sides)
                for limit in rows.limits:
                    assert rows.coefficients @ vector[rows.columns] - limit <= runs[run]


def test_an_op_between_two_results_runs_twice() -> None:
    """Results of one and two bytes in turn, all read by the backward: within four bytes six ops run again, where
    without the rows of what runs twice the program says five.
    """
    tensors = (*(Tensor(f"t{i}", 1 + i % 2) for i in range(5)), *(Tensor(f"g{i}", 1) for i in range(5)))
    forward = (Op(f"f{i}", (i - 1,) if i else (), (i,), 1) for i in range(5))
    reads = (*((4 - j, 4 + j) if j else (4,) for j in range(5)),)
    backward = (Op(f"b{j}", read, (5 + j,), 1, recomputable=False) for j, read in enumerate(reads))
    problem = Problem((*forward, *backward), tensors, 5, (9,))
    model = StagedModel(problem, 4, tuple(range(4, 10)))
    assert solve_staged(model, 10.0, 0).bound == brute_force(problem).best(4) == 6


@pytest.mark.parametrize("seed", range(12))
def test_cuts_in_the_forward_bound_its_recompute(seed: int) -> None:
    """Every budget of a small graph: never above the optimum, and never called impossible where something fits."""
    problem = any_problem(seed)
    best, rng = brute_force(problem), random.Random(seed)
    for _, budget_bytes in best.points[-2:]:
        ends = any_ends(problem, rng) if seed % 2 else first_ends(problem, 4, budget_bytes)
        optimum = best.best(budget_bytes)
        assert optimum is not None
        for bounded in (lambda m: solve_staged(m, 10.0, 0), lambda m: bound_staged(m, 10.0)):
            model = StagedModel(problem, budget_bytes, ends, windows=True)
            answer = bounded(model)
            assert not answer.infeasible
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


def test_windows_and_what_does_not_fit_bound_the_relaxation() -> None:
    """A block of a transformer near its minimum: without them the relaxation keeps halves of what does not fit."""
    problem = FAMILIES["transformer-2"]()
    budget_bytes = minimum_budget(problem, time_limit=2.0).minimum_bytes
    ends = first_ends(problem, 16, budget_bytes)
    plan = solve(problem, budget_bytes, gap=0.1, time_limit=5.0).added_cost
    bounds = []
    for windows in (False, True):
        model = StagedModel(problem, budget_bytes, ends, windows=windows)
        bounds.append((relax_staged(model, 20.0).bound or 0) * model.cost_unit)
    whole = (bound_staged(StagedModel(problem, budget_bytes, ends, windows=True), 20.0).bound or 0) * model.cost_unit
    assert 1.3 * bounds[0] < bounds[1] <= plan
    assert abs(whole - bounds[1]) < 1e-3 * bounds[1]  # the rows that were left out say nothing more


def test_a_program_is_made_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert StagedModel(any_problem(1), 1 << 30, any_ends(any_problem(1), random.Random(1))).program.variables()
