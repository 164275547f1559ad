"""`python -m tests.bench.stress [families] [--shares 60,40,20,min] [--time-limit 60]`: steps that are hard on a solver.

A budget is a share of the plain peak; `min` is the smallest budget that `minimum_budget` finds. Where a share is below
what can work, the row says from which share on it works and below which none can.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from solvers import Problem, minimum_budget

from .families import FAMILIES
from .problems import plain_peak_bytes
from .published import Measured, measure

LATE_SHARE, LATE_SECONDS = 0.1, 1.0


def measured(problem: Problem, shares: list[str], time_limit: float, gap: float) -> Iterator[tuple[str, Measured]]:
    """Each share with its solve; the search for the minimum is a row of its own."""
    plain = plain_peak_bytes(problem)
    for share in shares:
        budget = 0 if share == "min" else plain * int(share) // 100
        if share == "min":
            begin = time.monotonic()
            smallest = minimum_budget(problem, time_limit=time_limit)
            budget = smallest.minimum_bytes
            found, floor = (f"{100 * size / plain:.2f} %" for size in (budget, smallest.floor_bytes))
            yield "minimum", Measured(None, None, f"{found}, floor {floor}", time.monotonic() - begin)
        yield share, measure(problem, budget, time_limit=time_limit, gap=gap)


def main() -> int:
    """Print the table; 1 when a solve took more than its time limit, a tenth of it and a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--shares", default="60,40,20,min")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--gap", type=float, default=0.01)
    options = parser.parse_args()
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        parser.error(f"no family is named {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    allowed = (1 + LATE_SHARE) * options.time_limit + LATE_SECONDS
    table = Table("family", "ops", "budget", "recompute %", "bound", "gap", "status", "seconds")
    late = 0
    for name in options.families or FAMILIES:
        problem = FAMILIES[name]()
        for share, found in measured(problem, options.shares.split(","), options.time_limit, options.gap):
            row = (name, str(len(problem.ops)), share, *found.cells())
            print(*row, sep="\t", flush=True)
            table.add_row(*row)
            late += found.seconds > allowed
    Console(width=150).print(table)
    print(f"{late} rows took more than {allowed:.1f} s")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
