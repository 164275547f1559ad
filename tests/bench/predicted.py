"""`python -m tests.bench.predicted [names] [--shares 60,40]`: `cost="measured"` against the clock.

Predicted is the plan's overhead, from each op timed by itself; measured is the planned step's time over that of the
same model planned without recompute (the plan's own denominator) and, beside it, over plain eager's. The allocator is
told to keep what is freed, as CUDA's does: page faults, of which the larger step has more, can outweigh recompute.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import statistics
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from planner import BudgetError
from planner.session import Session, open_session
from tests.bench.peers.measure import Subject, interleaved_seconds
from tests.bench.peers.models import BENCH, build
from tests.bench.step_time import WARM_UP

POINTS = 0.05
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # glibc's malloc.h


@dataclass(frozen=True)
class Row:
    """One plan: predicted and measured overhead over the plan without recompute, and over plain eager."""

    name: str
    share: int
    predicted: float
    measured: float
    over_plain: float

    @property
    def agrees(self) -> bool:
        return abs(self.measured - self.predicted) <= POINTS


def keep_freed_memory() -> None:
    """glibc: no block is mapped by itself, and the heap is never given back."""
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_MAX, 0)
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)


def plan_budget(session: Session, share: int) -> int:
    """`share` % of the way from static bytes to the plain peak, or the smallest that works."""
    static = session.problem.static_bytes
    budget = static + (session.plain_peak_bytes - static) * share // 100
    try:
        session.solve(budget)
    except BudgetError as error:
        return error.minimum_bytes or budget
    return budget


def measure(name: str, shares: list[int], rounds: int, cpu_time: bool, time_limit: float) -> list[Row]:
    """All shares of a model, timed in turns with the plan without recompute and plain eager."""
    model, sample = build(name)
    plain = copy.deepcopy(model)
    session = open_session(model, sample, cost="measured", keep_outputs=False, progress=False, time_limit=time_limit)
    plans = [session.plan(plan_budget(session, share)) for share in shares]
    free = session.plan(None)
    subjects = [Subject(plain, plain), Subject(free.module, model), *(Subject(p.module, model) for p in plans)]
    clock = time.process_time if cpu_time else time.perf_counter
    taken = interleaved_seconds(subjects, sample, WARM_UP + rounds, clock)
    medians = [statistics.median(t[WARM_UP:]) for t in taken]
    return [
        Row(name, share, plan.overhead, seconds / medians[1] - 1, seconds / medians[0] - 1)
        for share, plan, seconds in zip(shares, plans, medians[2:], strict=True)
    ]


def main() -> int:
    """Print the table; exit 1 when a row misses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(BENCH), help="of the peers' benchmark, or zoo:NAME")
    parser.add_argument("--shares", default="60,40")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--cpu-time", action="store_true", help="count processor seconds instead of wall clock")
    options = parser.parse_args()
    keep_freed_memory()
    shares = [int(s) for s in options.shares.split(",")]
    console = Console(width=120)
    table = Table("model", "budget", "predicted", "measured", "over plain eager", f"within {POINTS * 100:.0f} points")
    agree = True
    for name in options.names or list(BENCH):
        for row in measure(name, shares, options.rounds, options.cpu_time, options.time_limit):
            agree &= row.agrees
            cells = (name, f"{row.share} %", f"{row.predicted:.1%}", f"{row.measured:+.1%}", f"{row.over_plain:+.1%}")
            console.print("  ".join(cells))
            table.add_row(*cells, "yes" if row.agrees else "NO")
    console.print(table)
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
