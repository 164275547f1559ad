"""Every solver of the registry against brute force and against itself."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import solvers
from solvers import ilp, known, minimum
from solvers.base import Effort
from solvers.end_slots import first_ends
from solvers.engine import solve_staged
from solvers.errors import BudgetError, SolverUnavailable
from solvers.minimum import smallest_peak
from solvers.problem import Problem
from solvers.schedule import plain_order, with_frees
from solvers.simulate import simulate
from solvers.solution import Solution, Status
from solvers.staged import StagedModel
from solvers.stages import cost_unit
from tests.bench.families import FAMILIES, transformer
from tests.solvers.oracles import Frontier, brute_force, replay
from tests.solvers.problems import SOLVED, Solved
from tests.solvers.random_problems import wrongs
from tests.solvers.strategies import scaled, seeded_problem

NAMES = tuple(name for name in solvers.SOLVERS if name != "rotor")  # it takes chains only: test_rotor.py
EXACT = ("auto", "ilp")  # these prove what they can; the others only search
GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]


def _trades(seed: int) -> bool:
    return len(frontier(seed).points) > 1


@cache
def frontier(seed: int) -> Frontier:
    return brute_force(seeded_problem(seed))


# Problems whose cost depends on the budget, and a few where it does not.
SEEDS = (*[seed for seed in range(80) if _trades(seed)], *[seed for seed in range(20) if not _trades(seed)])


def plain_peak(problem: Problem) -> int:
    return simulate(problem, with_frees(problem, plain_order(problem))).peak_bytes


def solve(name: str, problem: Problem, budget_bytes: int) -> Solution | BudgetError:
    """The answer, checked for what any answer must be."""
    try:
        found = solvers.get_solver(name).solve(problem, budget_bytes, time_limit=20.0, gap=0.0)
    except BudgetError as error:
        check_refusal(problem, budget_bytes, error)
        return error
    again = replay(problem, found.schedule)
    assert (found.peak_bytes, found.added_cost) == (again.peak_bytes, again.added_cost)
    assert found.peak_bytes <= budget_bytes
    assert found.solver == name
    assert found.schedule == with_frees(problem, [s.index for s in found.schedule if s.kind == "compute"])
    if found.bound is None:
        assert found.status is Status.FEASIBLE
    else:
        assert 0 <= found.bound <= found.added_cost
        assert found.family, "a bound is proved over a family of schedules; it must be named"
        assert (found.status is Status.OPTIMAL) == (found.bound == found.added_cost)
    return found


def check_refusal(problem: Problem, budget_bytes: int, error: BudgetError) -> None:
    assert error.budget_bytes == budget_bytes
    assert error.minimum_bytes is not None, "the smallest budget known to work must be stated"
    assert error.minimum_bytes > budget_bytes
    assert error.floor_bytes is None or error.floor_bytes <= error.minimum_bytes
    assert error.minimum_bytes <= plain_peak(problem), "the plain step always works"


def cost(answer: Solution | BudgetError) -> int | None:
    return None if isinstance(answer, BudgetError) else answer.added_cost


def check_against_best(name: str, answer: Solution | BudgetError, best: int | None) -> None:
    """`best` is brute force's cost over all schedules, None where none fits."""
    if isinstance(answer, BudgetError):
        assert best is None or name not in EXACT, f"nothing found, yet a schedule of cost {best} fits"
        return
    assert best is not None, "a schedule within a budget that brute force cannot meet"
    assert answer.added_cost >= best
    if answer.family == "all schedules":
        assert answer.bound is None or answer.bound <= best, f"claims a bound above the optimum {best}"
    if answer.status is Status.OPTIMAL and name in EXACT:
        assert answer.added_cost == best, f"claims to be optimal at {answer.added_cost}, brute force has {best}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("solved", SOLVED, ids=lambda s: s.name)
def test_solved_by_hand(solved: Solved, name: str) -> None:
    for budget_bytes, best in solved.optimum.items():
        answer = solve(name, solved.problem, budget_bytes)
        check_against_best(name, answer, best)
        if name in EXACT and not solved.in_forward:
            assert cost(answer) == best


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_budget_against_brute_force(seed: int, name: str) -> None:
    """Every budget at which the optimum changes, and the byte below each; costs fall as the budget rises."""
    problem, best = seeded_problem(seed), frontier(seed)
    budgets = sorted({peak - less for _, peak in best.points for less in (0, 1)} | {plain_peak(problem)})
    met: dict[int, int] = {}
    for budget_bytes in budgets:
        answer = solve(name, problem, budget_bytes)
        check_against_best(name, answer, best.best(budget_bytes))
        if isinstance(answer, BudgetError):
            assert answer.floor_bytes is None or answer.floor_bytes <= best.minimum_bytes
            assert answer.minimum_bytes is not None
            assert answer.minimum_bytes >= best.minimum_bytes
            assert not met, f"fits {met} but not the larger {budget_bytes}"
        else:
            met[budget_bytes] = answer.added_cost
    assert list(met.values()) == sorted(met.values(), reverse=True), f"a larger budget costs more: {met}"
    assert met[plain_peak(problem)] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_stated_minimum_works(seed: int, name: str) -> None:
    problem = seeded_problem(seed)
    for budget_bytes in (0, frontier(seed).minimum_bytes - 1, frontier(seed).minimum_bytes):
        answer = solve(name, problem, budget_bytes)
        if isinstance(answer, BudgetError):
            assert answer.minimum_bytes is not None
            assert isinstance(solve(name, problem, answer.minimum_bytes), Solution)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_floor_is_below_every_schedule(seed: int) -> None:
    assert solvers.floor_bytes(seeded_problem(seed)) <= frontier(seed).minimum_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_beats_a_bound(seed: int) -> None:
    """What one solver proves holds for what the others find."""
    problem = seeded_problem(seed)
    for _, budget_bytes in frontier(seed).points:
        answers = {name: solve(name, problem, budget_bytes) for name in NAMES}
        found = {name: answer for name, answer in answers.items() if isinstance(answer, Solution)}
        for prover, answer in found.items():
            beaten = {name: other.added_cost for name, other in found.items() if other.added_cost < (answer.bound or 0)}
            assert not beaten, f"{prover} proved {answer.bound} over {answer.family!r} at {budget_bytes}: {beaten}"
        heuristics = [answer.added_cost for name, answer in found.items() if name in ("greedy", "chen")]
        if heuristics:
            assert "auto" in found
            assert found["auto"].added_cost <= min(heuristics)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [3, 64, 7 * GIB])
@pytest.mark.parametrize("seed", SEEDS[::6])
def test_the_unit_of_bytes_does_not_matter(
    seed: int, factor: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "_schedules", OrderedDict())  # of the small ones other tests know more
    problem = seeded_problem(seed)
    for _, peak in frontier(seed).points:
        for budget_bytes in (peak - 1, peak):
            small = solve(name, problem, budget_bytes)
            big = solve(name, scaled(problem, factor), budget_bytes * factor)
            assert cost(small) == cost(big)
            if isinstance(small, BudgetError) and isinstance(big, BudgetError) and small.minimum_bytes is not None:
                assert big.minimum_bytes == small.minimum_bytes * factor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS[::3])
def test_tens_of_gib_less_one_byte_never_overshoot(seed: int, name: str) -> None:
    """Sizes with no common factor; a solver that rounds must round to the safe side and still find what fits."""
    problem = scaled(seeded_problem(seed), 5 * GIB)
    odd = {t.bytes: t.bytes and t.bytes + (7 * t.bytes // GIB + seed) % 64 for t in problem.tensors}
    jagged = tuple(replace(t, bytes=odd[t.bytes]) for t in problem.tensors)  # equal sizes stay equal: ops in place
    problem = replace(problem, tensors=jagged)
    best = brute_force(problem)
    for _, peak in best.points:
        for budget_bytes in (peak - 1, peak):
            check_against_best(name, solve(name, problem, budget_bytes), best.best(budget_bytes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS[::6])
def test_a_warm_start_is_a_floor_for_quality(seed: int, name: str) -> None:
    problem = seeded_problem(seed)
    for _, budget_bytes in frontier(seed).points:
        known = solve("greedy", problem, budget_bytes)
        if isinstance(known, Solution):
            answer = solvers.get_solver(name).solve(
                problem, budget_bytes, time_limit=20.0, warm_starts=(known.schedule,)
            )
            assert answer.peak_bytes <= budget_bytes
            assert answer.added_cost <= known.added_cost


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_start_over_the_budget_is_no_answer(name: str) -> None:
    chain = SOLVED[0].problem
    plain = with_frees(chain, plain_order(chain))
    answer = solvers.get_solver(name).solve(chain, 10, time_limit=20.0, warm_starts=(plain,))
    assert answer.peak_bytes == 10
    assert answer.added_cost >= 5


DESCRIBE = """
from solvers import SOLVERS, BudgetError, solve
from tests.solvers.oracles import brute_force
from tests.solvers.strategies import seeded_problem
for seed in (0, 2, 15):
    problem = seeded_problem(seed)
    for _, peak in brute_force(problem).points:
        for name in sorted(set(SOLVERS) - {"rotor"}):
            for budget in (peak - 1, peak):
                try:
                    print(seed, solve(problem, budget, solver=name, gap=0.0))
                except BudgetError as error:
                    print(seed, name, error, error.minimum_bytes, error.floor_bytes)
"""


def test_answers_do_not_depend_on_the_hash_seed() -> None:
    answers = set()
    for hash_seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", DESCRIBE],
            cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers.add(done.stdout)
    assert len(answers) == 1
    assert answers != {""}


def test_an_unknown_solver_is_refused_by_name() -> None:
    with pytest.raises(SolverUnavailable, match="simplex") as caught:
        solvers.get_solver("simplex")
    assert caught.value.solver == "simplex"
    assert set(caught.value.available) == set(solvers.SOLVERS)


@pytest.mark.parametrize("seed", range(2000, 2008))
def test_random_problems_against_the_exact_search(seed: int) -> None:
    """The command of this name looks at thousands; no seed below was looked at while the solvers were made."""
    assert wrongs(seed) == []


@pytest.mark.parametrize("seed", [1778, 1879])
def test_optional_ops_that_do_not_run_need_no_room_in_a_bound(seed: int) -> None:
    """A relaxation of all rows said more than the optimum where an optional op's slot exceeded the budget."""
    assert wrongs(seed) == []


@pytest.mark.parametrize("factor", [7, 1_000_000_007])
@pytest.mark.parametrize("seed", SEEDS[::20])
def test_the_unit_of_cost_does_not_matter(seed: int, factor: int) -> None:
    """The program counts in the costs' common divisor, so that no digit of a large cost is lost to its coefficients."""
    problem = seeded_problem(seed)
    dear = replace(problem, ops=tuple(replace(op, cost=op.cost * factor) for op in problem.ops), step_cost=-1)
    divisor = cost_unit(problem)
    assert cost_unit(dear) == divisor * factor
    for _, budget_bytes in frontier(seed).points[-2:]:
        if budget_bytes < plain_peak(problem):
            ends = first_ends(problem, 5, budget_bytes)
            small = solve_staged(StagedModel(problem, budget_bytes, ends), 20.0, 0)
            big = solve_staged(StagedModel(dear, budget_bytes, ends), 20.0, 0)
            assert small.bound == big.bound, "in units of each"


@pytest.mark.parametrize("seed", SEEDS[::10])
def test_a_plan_bounds_what_its_program_recomputes(seed: int) -> None:
    """With the optimum as the limit the program's bound is at least as tight, and not above the optimum."""
    problem = seeded_problem(seed)
    for cost, budget_bytes in frontier(seed).points[-2:]:
        if budget_bytes < plain_peak(problem):
            ends = first_ends(problem, 5, budget_bytes)
            models = (StagedModel(problem, budget_bytes, ends, cost_limit=limit) for limit in (cost, float("inf")))
            tight, loose = ((solve_staged(m, 20.0, 0).bound or 0) * m.cost_unit for m in models)
            assert loose <= tight <= cost


def test_an_op_dearer_than_the_plan_does_not_blur_the_costs() -> None:
    """Costs are counted in steps of a millionth of the dearest op that a better plan can recompute."""
    problem = FAMILIES["dense-6"]()
    dearest = max(problem.forward, key=lambda i: problem.ops[i].cost)
    ops = tuple(replace(op, cost=10**13) if i == dearest else op for i, op in enumerate(problem.ops))
    dear = replace(problem, ops=ops, step_cost=-1)
    found = solvers.solve(dear, plain_peak(dear) * 6 // 10, solver="ilp", gap=0)
    assert found.bound == found.added_cost > 0


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_the_minimum_is_the_true_one(seed: int) -> None:
    smallest = solvers.minimum_budget(seeded_problem(seed))
    assert smallest.minimum_bytes == smallest.floor_bytes == frontier(seed).minimum_bytes
    assert replay(seeded_problem(seed), smallest.schedule).peak_bytes == smallest.minimum_bytes


@pytest.mark.parametrize("name", ["greedy", "ilp", "auto"])
def test_a_stated_minimum_is_met_again_by_a_search_without_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimum, "SURE_WORK", 0)
    problem = transformer(6)
    stated = smallest_peak(problem, 0).known_bytes
    found = solvers.solve(problem, stated, solver=name, time_limit=0)
    assert simulate(problem, found.schedule).peak_bytes <= stated
    known._schedules.clear()
    with pytest.raises(BudgetError):
        solvers.solve(problem, stated, solver=name, time_limit=0)


def test_a_deep_descent_comes_before_programs_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = FAMILIES["unet-6"]()
    stated = smallest_peak(problem, 0).known_bytes
    monkeypatch.setattr(ilp, "cheapest_descent", lambda *_, **__: None)
    for rest in ("look_exactly", "anneal_for", "refine"):
        monkeypatch.setattr(ilp, rest, lambda *_: None)
    found = ilp.hunt(problem, stated, Effort(60.0, 0.0), bound=0)
    assert found.live is not None and found.live.peak_bytes <= stated
    plan = simulate(problem, found.live.schedule())
    assert plan.peak_bytes <= stated and plan.added_cost < smallest_peak(problem, 0).live.cost


@pytest.mark.parametrize("name", ["greedy", "ilp", "auto"])
def test_a_refusal_without_time_names_less_than_the_plain_peak(name: str) -> None:
    """A fixed amount of work comes before the clock, so another process meets what it names."""
    problem = transformer(6)
    for budget in (0, solvers.floor_bytes(problem)):
        known._schedules.clear()
        with pytest.raises(BudgetError) as caught:
            solvers.solve(problem, budget, solver=name, time_limit=0)
        stated = caught.value.minimum_bytes
        assert stated is not None and stated < 0.7 * plain_peak(problem)
        known._schedules.clear()
        assert solvers.solve(problem, stated, solver=name, time_limit=0).peak_bytes <= stated


@pytest.mark.parametrize("name", ["greedy", "ilp", "auto"])
def test_what_was_planned_is_known_to_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimum, "SURE_WORK", 0)
    problem = transformer(6)
    known._schedules.clear()
    planned = solvers.solve(problem, plain_peak(problem) * 7 // 10, solver=name, time_limit=5.0)
    with pytest.raises(BudgetError) as caught:
        solvers.solve(problem, 0, solver=name, time_limit=0)
    assert caught.value.minimum_bytes == planned.peak_bytes
    assert solvers.minimum_budget(problem, time_limit=0).minimum_bytes == planned.peak_bytes
    again = solvers.solve(problem, planned.peak_bytes, solver=name, time_limit=0)
    assert again.peak_bytes == planned.peak_bytes and minimum.RECALLED in again.notes


@pytest.mark.parametrize("name", ["greedy", "ilp", "auto"])
def test_an_exact_minimum_is_met_again_by_a_search_without_time(name: str) -> None:
    for seed in range(40):
        problem = seeded_problem(seed)
        known._schedules.clear()
        smallest = solvers.minimum_budget(problem).minimum_bytes
        assert solvers.solve(problem, smallest, solver=name, time_limit=0).peak_bytes == smallest


def test_a_stated_minimum_stands_above_it_too() -> None:
    problem = seeded_problem(77)
    smallest = solvers.minimum_budget(problem).minimum_bytes
    costs = [solvers.solve(problem, budget, solver="greedy").added_cost for budget in (smallest, smallest + 2)]
    assert costs[1] <= costs[0]


@pytest.mark.parametrize(("seed", "costs"), [(0, 3), (85, 0), (90, 1)])
def test_a_stated_minimum_is_met_under_other_costs(seed: int, costs: int) -> None:
    """Where costs are measured, no two searches see the same ones."""
    problem, draw = seeded_problem(seed), random.Random(costs)
    ops = tuple(replace(op, cost=draw.choice((1, 1000))) for op in problem.ops)
    dearer = replace(problem, step_cost=sum(op.cost for op in ops), ops=ops)
    known._schedules.clear()
    with pytest.raises(BudgetError) as caught:
        solvers.solve(problem, problem.static_bytes + 1, solver="greedy")
    stated = caught.value.minimum_bytes
    assert stated is not None
    assert solvers.solve(dearer, stated, solver="greedy").peak_bytes <= stated
    known._schedules.clear()
    with pytest.raises(BudgetError):
        solvers.solve(dearer, stated, solver="greedy")
