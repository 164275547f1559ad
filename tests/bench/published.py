"""`python -m tests.bench.published DIR [names] [--budgets 90,80,70] [--reorder]`: published instances, and ours.

DIR holds node-link graphs in JSON as the repository `haoming-codes/moccasin` keeps them in `data/`; they are under a
licence of their own and are not part of this one. A budget is a share of the peak of the instance's own order, a
result is let go after its last reader, any node may run again, and overhead is in percent of the graph's cost.
`--reorder` lets the solver choose the order, too (`solvers.anneal`); budgets stay shares of the instance's own.

The published columns are percent (seconds) as Bartan et al. 2023, "Moccasin: Efficient Tensor Rematerialization for
Neural Networks", print them for Checkmate's program and their own; `-` is a time-out or a budget that they leave out.
With `--reorder` it is percent as FastSA, which chooses the order too, is reported to reach.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import networkx as nx
from rich.console import Console
from rich.table import Table

from solvers import BudgetError, Op, Problem, Tensor, solve
from solvers.anneal import lighter_order
from solvers.order import in_order

from .problems import plain_peak_bytes

NAMES = {
    "RLG1": "random_layered_n100_*.json", "RLG2": "random_layered_n250_*.json", "RLG3": "random_layered_n500_*.json",
    "RLG4": "random_layered_n1000_*.json", "CM1": "fcn_8_vgg*_train_nx.json", "CM2": "ResNet50*_train_nx.json",
}  # fmt: skip
CHECKMATE: dict[tuple[str, float], str] = {
    ("RLG1", 90): "0.8 (18)", ("RLG1", 80): "2.3 (23)", ("RLG2", 90): "0.9 (685)", ("CM1", 90): "0.0 (434-485)",
    ("CM1", 80): "0.1 (434-485)", ("CM2", 90): "0.1 (434-485)", ("CM2", 80): "0.3 (434-485)",
}  # fmt: skip
MOCCASIN: dict[tuple[str, float], str] = {
    ("RLG1", 90): "0.8 (9)", ("RLG1", 80): "2.3 (9)", ("RLG2", 90): "0.9 (55)", ("RLG2", 80): "4.9 (640)",
    ("RLG3", 90): "0.7 (1803)", ("RLG3", 80): "3.4 (1805)", ("RLG4", 90): "0.7 (3613)", ("RLG4", 80): "3.4 (3612)",
    ("CM1", 90): "0.0 (65)", ("CM1", 80): "0.1 (65)", ("CM2", 90): "0.2 (65)", ("CM2", 80): "0.3 (65)",
}  # fmt: skip
FASTSA: dict[tuple[str, float], str] = {
    ("RLG1", 90): "0", ("RLG1", 80): ".3", ("RLG1", 70): "2.2", ("RLG2", 90): "0", ("RLG2", 80): "0",
    ("RLG2", 70): "2.6", ("RLG3", 90): ".03", ("RLG3", 80): "2.3", ("RLG3", 73.5): "4.8", ("RLG4", 90): ".4",
    ("RLG4", 80): "2.5", ("RLG4", 70): "7.4",
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One solve: shares of the step's cost and of the plain peak in percent; `overhead` is None where nothing fits."""

    overhead: float | None
    bound: float | None
    status: str
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """Overhead, bound, gap, status and seconds for a table."""
        figures: tuple[str, ...] = ("-", "-", "-")
        if self.overhead is not None and self.bound is not None:
            figures = tuple(f"{x:.3f}" for x in (self.overhead, self.bound, self.overhead - self.bound))
        return *figures, self.status, f"{self.seconds:.1f}"


def measure(problem: Problem, budget_bytes: int, **options: Any) -> Measured:
    """Solve once; a refusal is a row that says from which share on it works, and below which nothing can."""
    begin = time.monotonic()
    try:
        found = solve(problem, budget_bytes, **options)
    except BudgetError as error:
        plain = plain_peak_bytes(problem) or 1
        shares = [f"{100 * (size or 0) / plain:.2f}" for size in (error.minimum_bytes, error.floor_bytes)]
        status = f"from {shares[0]} %, floor {shares[1]} %"
        return Measured(None, None, status, time.monotonic() - begin)
    bound = None if found.bound is None else 100 * problem.overhead(found.bound)
    return Measured(100 * problem.overhead(found.added_cost), bound, found.status.value, time.monotonic() - begin)


def load(path: Path) -> Problem:
    """The instance in its own order; every node may run again, and none is an output that stays."""
    data = json.loads(path.read_text())
    nodes = {node.get("id", node["name"]): node for node in data["nodes"]}
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    for link in data["links"]:
        graph.add_edge(link.get("source", link.get("0")), link.get("target", link.get("1")))
    order = data["graph"].get("order") or list(nx.topological_sort(graph))
    place = {node: i for i, node in enumerate(order)}
    ops, tensors = [], []
    for node in order:
        about = nodes[node]
        size, cost = about.get("cost_ram", about.get("out_cost")), about.get("cost_cpu", about.get("duration"))
        reads = tuple(sorted(place[p] for p in graph.predecessors(node)))
        tensors.append(Tensor(str(about["name"]), int(size)))
        ops.append(Op(str(about["name"]), reads, (place[node],), int(cost)))
    return Problem(tuple(ops), tuple(tensors), len(ops))


Row = tuple[str, ...]


def rows(
    folder: Path, names: list[str], budgets: list[float], time_limit: float, gap: float, reorder: bool
) -> Iterator[Row]:
    """A table row for each instance found and each budget; a new order is found once, within each row's time limit."""
    for name in names:
        for path in sorted(folder.glob(NAMES[name])):
            problem = load(path)
            plain, begin = plain_peak_bytes(problem), time.monotonic()
            if reorder:
                problem = in_order(problem, lighter_order(problem, range(len(problem.ops))))
            left = time_limit - (time.monotonic() - begin)
            for share in budgets:
                found = measure(problem, math.ceil(plain * share / 100), time_limit=left, gap=gap)
                found = replace(found, seconds=found.seconds + time_limit - left)
                key = name, share
                published = (FASTSA.get(key, "-"),) if reorder else (CHECKMATE.get(key, "-"), MOCCASIN.get(key, "-"))
                yield name, str(len(problem.ops)), f"{share:g} %", *published, *found.cells()


def main() -> int:
    """Print the table; 1 when DIR holds none of the instances."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--budgets", default="90,80,70")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--reorder", action="store_true", help="choose the order of the ops, too")
    options = parser.parse_intermixed_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"no instance is named {unknown[0]!r}; known: {', '.join(NAMES)}")
    budgets = [float(share) for share in options.budgets.split(",")]
    published = ("FastSA",) if options.reorder else ("Checkmate", "Moccasin")
    columns = ("graph", "ops", "budget", *published, "ours", "bound", "gap", "status", "seconds")
    table = Table(*columns)
    names = options.names or list(NAMES)
    for row in rows(options.folder, names, budgets, options.time_limit, options.gap, options.reorder):
        table.add_row(*row)
        print(*row, sep="\t", flush=True)
    if not table.row_count:
        print(f"{options.folder} holds none of the instances: {', '.join(NAMES.values())}")
        return 1
    Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
