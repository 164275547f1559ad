"""`python -m tests.bench.growth [out.png]`: how the time of a solve grows with the number of ops, and what it proves.

The synthetic family (`tests.bench.problems.synthetic`) from 500 to 20,000 ops, a forward op having two or three of the
backward, at a third of the plain peak; greedy alone, and `auto` until its gap is 0.2 % of the step's cost or the time
limit is reached. Prints the table and draws `notebooks/growth.png`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from solvers import Problem, solve

from .problems import plain_peak_bytes, synthetic

OPS = "500,1000,2000,5000,10000,20000"
OPS_PER_FORWARD_OP = 3.28
GAP = 0.002


@dataclass(frozen=True)
class Point:
    """What one size took: wall-clock seconds, and shares of the step's cost."""

    ops: int
    greedy_seconds: float
    greedy: float
    seconds: float
    overhead: float
    bound: float

    @property
    def gap(self) -> float:
        return self.overhead - self.bound


def measure(ops: int, share: int, time_limit: float) -> Point:
    """Solve the synthetic problem of about `ops` ops, forward and backward together."""
    problem = synthetic(round(ops / OPS_PER_FORWARD_OP))
    budget = plain_peak_bytes(problem) * share // 100
    greedy, greedy_seconds = _timed(problem, budget, "greedy", time_limit)
    found, seconds = _timed(problem, budget, "auto", time_limit)
    return Point(
        len(problem.ops), greedy_seconds, problem.overhead(greedy.added_cost), seconds,
        problem.overhead(found.added_cost), problem.overhead(found.bound or 0),
    )  # fmt: skip


def _timed(problem: Problem, budget: int, solver: str, time_limit: float) -> tuple[Any, float]:
    begin = time.perf_counter()
    found = solve(problem, budget, solver=solver, time_limit=time_limit, gap=GAP)
    return found, time.perf_counter() - begin


def draw(points: list[Point], path: str, time_limit: float) -> None:
    """Seconds on logarithmic axes above, overhead and what is proved of it below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter, ScalarFormatter

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    sizes = [p.ops for p in points]
    above.loglog(sizes, [p.seconds for p in points], "o-", color="C0", label=f"auto, to a gap of {GAP:.1%}")
    above.loglog(sizes, [p.greedy_seconds for p in points], "s--", color="C1", label="greedy alone")
    above.axhline(time_limit, color="0.6", lw=1, ls=":", label="time limit of auto")
    above.set_ylabel("seconds")
    below.plot(sizes, [p.greedy for p in points], "s--", color="C1", label="greedy")
    below.plot(sizes, [p.overhead for p in points], "o-", color="C0", label="auto")
    below.plot(sizes, [p.bound for p in points], "v-", color="C2", label="proved lower bound")
    below.fill_between(sizes, [p.bound for p in points], [p.overhead for p in points], color="C0", alpha=0.15)
    below.set_ylabel("recompute, % of the step")
    below.set_xlabel("ops of the step, forward and backward")
    below.set_ylim(bottom=0)
    below.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    below.set_xticks(sizes)
    below.xaxis.set_major_formatter(ScalarFormatter())
    below.minorticks_off()
    for axes in (above, below):
        axes.grid(True, color="0.9")
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", default="notebooks/growth.png")
    parser.add_argument("--ops", default=OPS, help="sizes, comma separated")
    parser.add_argument("--share", type=int, default=33, help="budget in percent of the plain peak")
    parser.add_argument("--time-limit", type=float, default=120.0)
    options = parser.parse_args()
    points = []
    for ops in map(int, options.ops.split(",")):
        points.append(measure(ops, options.share, options.time_limit))
        print(points[-1], flush=True)
    table = Table("ops", "greedy s", "auto s", "greedy", "auto", "bound", "gap", "ended by")
    for p in points:
        seconds = f"{p.greedy_seconds:.1f}", f"{p.seconds:.1f}"
        shares = f"{p.greedy:.2%}", f"{p.overhead:.2%}", f"{p.bound:.2%}", f"{p.gap:.3%}"
        table.add_row(str(p.ops), *seconds, *shares, "gap" if p.gap <= GAP else "clock")
    Console(width=120).print(table)
    draw(points, options.path, options.time_limit)
    print(f"drawn to {options.path}")


if __name__ == "__main__":
    main()
