"""`python -m tests.bench.solver [names] [--shares 80,60,50,40]`: recompute share, proved bound and seconds per budget.

A budget is a share of the simulated no-recompute peak of everything the step allocates (gradients included,
parameters and inputs not), the outputs besides the loss being dropped (`.loss`); the cost is the roofline with
ridge 10 FLOP per byte.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table

from passes.alias import alias
from passes.capture import bind_sample, capture
from passes.lower import lower
from passes.profile import profile, roofline
from solvers import BudgetError, Problem, Solution, plain_order, simulate, solve, with_frees
from tests.zoo.models import ZOO, build

# Issue targets: recompute share of step cost, in percent, by model and budget share.
TARGETS = {
    "gpt2": {80: 1.8, 60: 3.9, 50: 7.0, 40: 11.0, 30: 16.0, 25: 19.0},
    "resnet50": {80: 2.2, 60: 5.6, 50: 9.0},
}


def problem_of(name: str) -> Problem:
    """The zoo model's step, with measured workspace."""
    model, sample = build(name)
    traced = capture(model, bind_sample(model, sample))
    graph = traced.graph_module.graph
    cpu = torch.device("cpu")
    return lower(traced, alias(graph), profile(graph), roofline, device=cpu, keep_outputs=False).problem


def budget_of(problem: Problem, share: int) -> int:
    """`share` % of what the plain step allocates, on top of the static bytes."""
    plain = simulate(problem, with_frees(problem, plain_order(problem))).peak_bytes
    return problem.static_bytes + (plain - problem.static_bytes) * share // 100


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ZOO))
    parser.add_argument("--shares", default="80,60,50,40")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--compare", action="store_true", help="every solver beside the ILP's bound")
    options = parser.parse_args()
    if options.compare:
        compare(options.names or list(ZOO), [int(s) for s in options.shares.split(",")], options.time_limit)
        return
    table = Table("model", "ops", "budget", "recompute", "target", "bound", "gap", "status", "seconds")
    for name in options.names or list(ZOO):
        problem = problem_of(name)
        for share in map(int, options.shares.split(",")):
            table.add_row(name, str(len(problem.ops)), f"{share} %", *_solve(problem, share, name, options))
    Console(width=140).print(table)


def compare(names: list[str], shares: list[int], time_limit: float) -> None:
    """Chen's and greedy's plans beside the ILP's plan and proved bound."""
    table = Table("model", "budget", "chen", "greedy", "ilp", "bound of the ilp")
    for name in names:
        problem = problem_of(name)
        for share in shares:
            found = {s: _answer(problem, share, s, time_limit) for s in ("chen", "greedy", "ilp")}
            bound = None if isinstance(found["ilp"], str) else found["ilp"].bound
            costs = [a.added_cost for a in found.values() if not isinstance(a, str)]
            assert bound is None or all(cost >= bound for cost in costs), (name, share)
            cells = [a if isinstance(a, str) else f"{problem.overhead(a.added_cost):.2%}" for a in found.values()]
            table.add_row(name, f"{share} %", *cells, "-" if bound is None else f"{problem.overhead(bound):.2%}")
    Console(width=140).print(table)


def _answer(problem: Problem, share: int, solver: str, time_limit: float) -> Solution | str:
    """The solution, or the smallest share of the plain peak that the solver reaches."""
    try:
        return solve(problem, budget_of(problem, share), solver=solver, time_limit=time_limit)
    except BudgetError as error:
        whole = budget_of(problem, 100) - problem.static_bytes
        return f"min {((error.minimum_bytes or 0) - problem.static_bytes) / whole:.1%}"


def _solve(problem: Problem, share: int, name: str, options: argparse.Namespace) -> tuple[str, ...]:
    target = TARGETS.get(name, {}).get(share)
    start = time.perf_counter()
    try:
        found = solve(problem, budget_of(problem, share), solver=options.solver, time_limit=options.time_limit)
    except BudgetError as error:
        seconds = time.perf_counter() - start
        return "-", "-" if target is None else f"{target} %", "-", "-", f"refused: {error}", f"{seconds:.1f}"
    seconds = time.perf_counter() - start
    overhead = problem.overhead(found.added_cost)
    bound = None if found.bound is None else problem.overhead(found.bound)
    return (
        f"{overhead:.2%}", "-" if target is None else f"{target} %", "-" if bound is None else f"{bound:.2%}",
        "-" if bound is None else f"{overhead - bound:.2%}", found.status.value, f"{seconds:.1f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
