"""`python -m tests.bench.stress [families] [--shares 60,40,20,min] [--limits 60]`: steps that are hard on a solver.

A budget is a share of the plain peak; `min` is the smallest budget that `minimum_budget` finds. Where a share is below
what can work, the row says from which share on it works and below which none can. With several limits (`1,5,30`) each
budget is solved under each. The exit code is 1 when a solve takes more than its limit, a tenth of it and a second, or
when a longer limit costs more than a shorter one by more than the gap asked.

`--grid` takes every share from the minimum up in steps of one percent instead, by itself and from the plan of the share
below, as `frontier` does, and counts where a larger budget costs more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.console import Console
from rich.table import Table

from solvers import BudgetError, Problem, Solution, minimum_budget, solve

from .families import FAMILIES
from .problems import plain_peak_bytes
from .published import Measured, measure

LATE_SHARE, LATE_SECONDS = 0.1, 1.0
Labelled = tuple[str, float, Measured]


def measured(problem: Problem, shares: list[str], limits: list[float], gap: float) -> Iterator[Labelled]:
    """Each share under each limit; the search for the minimum is a row of its own."""
    plain = plain_peak_bytes(problem)
    for share in shares:
        if share == "min":
            begin = time.monotonic()
            smallest = minimum_budget(problem, time_limit=limits[0])
            budget = smallest.minimum_bytes
            found, floor = (f"{100 * size / plain:.2f} %" for size in (budget, smallest.floor_bytes))
            yield "minimum", limits[0], Measured(None, None, f"{found}, floor {floor}", time.monotonic() - begin)
        else:
            budget = plain * int(share) // 100
        for limit in limits:
            yield share, limit, measure(problem, budget, time_limit=limit, gap=gap)


def worse(rows: list[Labelled], gap: float) -> int:
    """How often a longer limit costs more than a shorter one, by more than the gap asked, or finds nothing."""
    count = 0
    for share, limit, found in rows:
        shorter = [r.overhead for s, shortly, r in rows if s == share and shortly < limit]
        costs = [overhead for overhead in shorter if overhead is not None]
        count += bool(costs) and (found.overhead is None or found.overhead > min(costs) + 100 * gap)
    return count


@dataclass(frozen=True)
class Grid:
    """What a grid of budgets shows.

    Attributes:
        budgets: how many.
        rises: how often one by itself costs more than a smaller one does, which its proved gap allows.
        breaks: how often its bound is above what a smaller one costs, which nothing allows.
        warm_rises: how often one costs more than the one below, from whose plan it started.
    """

    budgets: int
    rises: int
    breaks: int
    warm_rises: int


def grid(problem: Problem, limit: float, gap: float) -> Grid:
    """Every percent of the plain peak from the minimum up, by itself and from the plan of the one below."""
    plain, smallest = plain_peak_bytes(problem), minimum_budget(problem, time_limit=limit)
    budgets = [b for b in (plain * share // 100 for share in range(1, 101)) if b >= smallest.minimum_bytes]
    cold: list[Solution] = []
    warm: list[Solution] = []
    for budget in budgets:
        with suppress(BudgetError):  # too little time on a busy machine
            cold.append(solve(problem, budget, time_limit=limit, gap=gap))
        starts = (warm[-1].schedule if warm else smallest.schedule,)
        warm.append(solve(problem, budget, time_limit=limit, gap=gap, warm_starts=starts))
    least = list(accumulate((s.added_cost for s in cold), min))
    rises = sum(found.added_cost > cost for cost, found in zip(least, cold, strict=True))
    breaks = sum((found.bound or 0) > cost for cost, found in zip(least, cold, strict=True))
    return Grid(len(budgets), rises, breaks, sum(b.added_cost > a.added_cost for a, b in pairwise(warm)))


def main() -> int:
    """Print the tables; 1 when a limit is not kept, or more time or more memory costs more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--shares", default="60,40,20,min")
    parser.add_argument("--limits", default="60", help="seconds, ascending")
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--grid", action="store_true")
    options = parser.parse_args()
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        parser.error(f"no family is named {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    limits = [float(limit) for limit in options.limits.split(",")]
    names = options.families or list(FAMILIES)
    if options.grid:
        return _print_grid(names, limits[-1], options.gap)
    return _print_rows(names, options.shares.split(","), limits, options.gap)


def _print_grid(names: list[str], limit: float, gap: float) -> int:
    total = 0
    for name in names:
        found = grid(FAMILIES[name](), limit, gap)
        print(f"{name}: {found.budgets} budgets, {found.rises} rises within the proved gap, {found.breaks} beyond it; "
              f"{found.warm_rises} from the plan of the one below", flush=True)  # fmt: skip
        total += found.breaks + found.warm_rises
    return 1 if total else 0


def _print_rows(names: list[str], shares: list[str], limits: list[float], gap: float) -> int:
    table = Table("family", "ops", "budget", "limit", "recompute %", "bound", "gap", "status", "seconds")
    late = dearer = 0
    for name in names:
        problem, rows = FAMILIES[name](), []
        for share, limit, found in measured(problem, shares, limits, gap):
            row = (name, str(len(problem.ops)), share, f"{limit:g}", *found.cells())
            print(*row, sep="\t", flush=True)
            table.add_row(*row)
            rows.append((share, limit, found))
            late += found.seconds > (1 + LATE_SHARE) * limit + LATE_SECONDS
        dearer += worse(rows, gap)
    Console(width=150).print(table)
    print(f"{late} solves took more than their limit, a tenth of it and a second; {dearer} cost more with more time")
    return 1 if late or dearer else 0


if __name__ == "__main__":
    raise SystemExit(main())
