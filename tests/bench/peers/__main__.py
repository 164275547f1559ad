"""`python -m tests.bench.peers [--full] [--models a b] [--peers block mincut]`: ours against the peers, in one run.

Each model is measured in a process of its own, where the peers and our plans at the peers' own peaks take turns. A
row per point is appended to the results file; `--show` prints and draws what is there without measuring.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from .models import BENCH, LONG
from .point import Point, read, versions, write
from .show import draw, print_duels, print_points

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE / "results" / "peers.jsonl"
FIGURE = HERE.parents[1] / "notebooks" / "peers.png"
METHODS = ("block", "sqrt", "selective", "mincut", "ours")
TRIED = ("sac_ilp", "rockmate")  # do not run on a CPU: the results file keeps why
SHORT_BUDGETS, FULL_BUDGETS = (0.1, 0.5), (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)
FULL_SHARES = (0.03, 0.1, 0.2, 0.4, 0.6, 0.8)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = f"of {', '.join(BENCH)}; without --full {', '.join(LONG)} only if named"
    parser.add_argument("--models", nargs="+", metavar="NAME", help=named)
    parser.add_argument("--peers", nargs="+", choices=METHODS + TRIED, help="what to measure")
    parser.add_argument("--full", action="store_true", help="all budgets and knapsacks, more rounds, our whole curve")
    parser.add_argument("--rounds", type=int, help="timed rounds (3, or 9 with --full)")
    parser.add_argument("--time-limit", type=float, help="seconds of each of our solves (5, or 30 with --full)")
    parser.add_argument("--cpu-time", action="store_true", help="time in processor seconds, for a machine that is busy")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, appended to")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--show", action="store_true", help="measure nothing: print and draw the results file")
    parser.add_argument("--problems", type=Path, help="folder for our problems as JSON, with the peers' peaks")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, append, print, draw; exit 1 when a model could not be measured at all."""
    chosen = options()
    chosen.models = chosen.models or [m for m in BENCH if chosen.full or m not in LONG]
    unknown = [m for m in chosen.models if m not in BENCH and not m.startswith("zoo:")]
    if unknown:
        raise SystemExit(f"--models {' '.join(unknown)}: unknown; choose of {', '.join(BENCH)}")
    chosen.peers = chosen.peers or [*METHODS, *TRIED * chosen.full]
    if chosen.worker is not None:
        _work(chosen)
        return 0
    failed = 0
    if not chosen.show:
        chosen.results.parent.mkdir(parents=True, exist_ok=True)
        for model in chosen.models:
            points = _measure(chosen, model)
            failed += not any(p.ok for p in points)
            write(chosen.results, points, append=True)
    if not chosen.results.exists():
        raise SystemExit(f"{chosen.results} does not exist: measure first, without --show, or name it with --results")
    points = read(chosen.results)
    console = Console(width=190)
    print_points(points, console)
    print_duels(points, console)
    draw(points, chosen.figure)
    return 1 if failed else 0


def _measure(chosen: argparse.Namespace, model: str) -> list[Point]:
    """One model in a process of its own; what had been measured before a crash is kept beside the crash."""
    start = time.perf_counter()
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder) / "points.jsonl", Path(folder) / "stderr"
        command = [sys.executable, "-m", "tests.bench.peers", "--worker", str(results), "--models", model,
                   "--peers", *chosen.peers]  # fmt: skip
        command += [*["--full"] * chosen.full, *["--cpu-time"] * chosen.cpu_time]
        for name in ("rounds", "time_limit", "problems"):
            value = getattr(chosen, name)
            command += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
        with log.open("w") as stderr:
            code = subprocess.run(command, check=False, stderr=stderr).returncode
        points = read(results) if results.exists() else []
        if code:
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
            where = points[-1].label if points else "the start"
            error = f"the process ended with code {code} after {where}: {' '.join(last)[:300]}"
            points.append(Point(model, "process", error=error, versions=versions()))
    for point in points:
        point.run = began
    print(f"== {model}: {time.perf_counter() - start:.0f} s", flush=True)
    return points


def _work(chosen: argparse.Namespace) -> None:
    from .worker import Task, run

    (model,) = chosen.models
    full = chosen.full
    if chosen.problems is not None:
        chosen.problems.mkdir(parents=True, exist_ok=True)
    task = Task(
        model=model,
        methods=tuple(chosen.peers),
        budgets=FULL_BUDGETS if full else SHORT_BUDGETS,
        knapsacks=("dp", "ilp", "greedy") if full else ("dp",),
        shares=FULL_SHARES if full else (),
        clock="processor" if chosen.cpu_time else "wall",
        rounds=chosen.rounds or (9 if full else 3),
        time_limit=chosen.time_limit or (30.0 if full else 5.0),
        problem=None if chosen.problems is None else chosen.problems / f"{model.replace(':', '-')}.json",
    )
    start = time.perf_counter()
    run(task, chosen.worker, lambda text: print(f"{time.perf_counter() - start:6.1f} s  {text}", flush=True))


if __name__ == "__main__":
    raise SystemExit(main())
