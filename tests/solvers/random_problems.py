"""`python -m tests.solvers.random_problems --count 2000 [--first SEED]`: small problems against an exact search.

The exact search is `oracles.brute_force`, which shares nothing with `solvers.exact`, `simulate` or `with_frees`; every
schedule is judged by `oracles.replay`. At each budget where the optimum changes, and a byte below it, every solver's
cost, bound, status, refusal and floor are checked, `minimum_budget` against the true minimum, and the bound of the
staged program without the exact search before it. Prints what is wrong; the exit code is 1 if anything is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from solvers import (
    SOLVERS,
    BudgetError,
    Problem,
    Solution,
    SolverUnavailable,
    Status,
    floor_bytes,
    minimum_budget,
    solve,
)
from solvers.end_slots import first_ends
from solvers.engine import bound_staged, solve_staged
from solvers.solution import EVERY
from solvers.staged import StagedModel
from tests.bench.problems import plain_peak_bytes
from tests.solvers.oracles import Frontier, brute_force, replay
from tests.solvers.strategies import seeded_problem

EXACT = ("auto", "ilp")
SECONDS = 20.0


def wrongs(seed: int, solvers: tuple[str, ...] = tuple(SOLVERS)) -> list[str]:
    """What the solvers get wrong on the problem of a seed."""
    problem = seeded_problem(seed)
    best = brute_force(problem)
    budgets = sorted({peak - less for _, peak in best.points for less in (0, 1)})
    found = [*_minimum(problem, best)]
    for budget_bytes in budgets:
        for name in solvers:
            found += [f"{name} at {budget_bytes}: {wrong}" for wrong in _answer(problem, best, name, budget_bytes)]
        if budget_bytes < plain_peak_bytes(problem):
            found += [f"program at {budget_bytes}: {wrong}" for wrong in _program(problem, best, budget_bytes)]
    return [f"seed {seed}, {wrong}" for wrong in found]


def _minimum(problem: Problem, best: Frontier) -> Iterator[str]:
    true, smallest = best.minimum_bytes, minimum_budget(problem, time_limit=SECONDS)
    if smallest.minimum_bytes != true:
        yield f"minimum_budget says {smallest.minimum_bytes}, true is {true}"
    if replay(problem, smallest.schedule).peak_bytes != smallest.minimum_bytes:
        yield "minimum_budget's schedule has another peak"
    if max(smallest.floor_bytes, floor_bytes(problem)) > true:
        yield f"floors {smallest.floor_bytes}, {floor_bytes(problem)} above the true minimum {true}"


def _answer(problem: Problem, best: Frontier, name: str, budget_bytes: int) -> Iterator[str]:
    optimum = best.best(budget_bytes)
    try:
        answer = solve(problem, budget_bytes, solver=name, gap=0.0, time_limit=SECONDS)
    except SolverUnavailable:
        return
    except BudgetError as error:
        yield from _refusal(best, name, budget_bytes, error)
        return
    again = replay(problem, answer.schedule)
    claim, true = (answer.peak_bytes, answer.added_cost), (again.peak_bytes, again.added_cost)
    if claim != true or again.peak_bytes > budget_bytes:
        yield f"peak and cost {claim} where the replay has {true}"
    if optimum is None or answer.added_cost < optimum:
        yield f"cost {answer.added_cost} where brute force has {optimum}"
    elif name in EXACT and answer.added_cost > optimum:
        yield f"cost {answer.added_cost}, optimum {optimum}"
    else:
        yield from _proof(answer, optimum)


def _proof(answer: Solution, optimum: int) -> Iterator[str]:
    if answer.status is Status.OPTIMAL and answer.added_cost != optimum:
        yield f"claims that {answer.added_cost} is optimal, brute force has {optimum}"
    everywhere = answer.family.startswith(EVERY)
    if everywhere and answer.bound is not None and answer.bound > optimum:
        yield f"bound {answer.bound} above the optimum {optimum}"


def _refusal(best: Frontier, name: str, budget_bytes: int, error: BudgetError) -> Iterator[str]:
    true = best.minimum_bytes
    if name in EXACT and (budget_bytes >= true or error.minimum_bytes != true):
        yield f"refused, minimum {error.minimum_bytes}; true is {true}"
    if error.minimum_bytes is None or error.minimum_bytes < true or error.minimum_bytes <= budget_bytes:
        yield f"calls {error.minimum_bytes} enough; true is {true}"
    if error.floor_bytes is not None and error.floor_bytes > true:
        yield f"floor {error.floor_bytes} above the true minimum {true}"


def _program(problem: Problem, best: Frontier, budget_bytes: int) -> Iterator[str]:
    optimum = best.best(budget_bytes)
    for windows in (False, True):
        model = StagedModel(problem, budget_bytes, first_ends(problem, 5, budget_bytes), windows=windows)
        answers = [solve_staged(model, SECONDS, 0)]
        if windows:
            answers.append(bound_staged(StagedModel(problem, budget_bytes, model.ends, windows=True), SECONDS))
        for answer in answers if optimum is not None else ():
            if answer.infeasible or answer.certified:
                yield f"impossible, yet a schedule of cost {optimum} fits"
            if answer.bound is not None and answer.bound * model.cost_unit > (optimum or 0):
                yield f"bound {answer.bound * model.cost_unit} above the optimum {optimum}"


def main() -> int:
    """Print every wrong and how many problems were looked at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    wrong = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        check = partial(wrongs, solvers=tuple(options.solvers.split(",")))
        for done, found in enumerate(pool.map(check, seeds, chunksize=10), 1):
            wrong += bool(found)
            print(*found, sep="\n", end="\n" if found else "", flush=True)
            if done % 100 == 0:
                print(f"{done} problems, {wrong} of them wrong", flush=True)
    print(f"{options.count} problems, {wrong} of them wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
