"""The families, the published instances' format, and what the two commands judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from solvers import Op, Problem, Tensor
from tests.bench.families import FAMILIES
from tests.bench.problems import plain_peak_bytes
from tests.bench.published import Measured, load, measure
from tests.bench.stress import grid, measured, worse


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.endswith(("-6", "-12", "-2", "-20", "small"))])
def test_a_family_is_a_step_with_a_backward_for_what_reaches_the_loss(name: str) -> None:
    problem = FAMILIES[name]()
    assert problem == FAMILIES[name]()
    read = {t for op in problem.ops for t in op.inputs}
    assert [i for i in problem.forward if problem.ops[i].outputs[0] not in read] in ([], [problem.num_forward - 1])
    assert len(problem.backward) >= problem.num_forward - 1
    assert plain_peak_bytes(problem) > 0


GRAPH = {
    "directed": True, "multigraph": False,
    "nodes": [{"name": n, "cost_cpu": cost, "cost_ram": size, "id": i}
              for i, (n, cost, size) in enumerate((("a", 5, 4), ("b", 3, 2), ("c", 1, 8)))],
}  # fmt: skip
EXPECTED = Problem(
    (Op("a", (), (0,), 5), Op("b", (0,), (1,), 3), Op("c", (0, 1), (2,), 1)),
    (Tensor("a", 4), Tensor("b", 2), Tensor("c", 8)), 3,
)  # fmt: skip


def test_both_formats_of_an_instance(tmp_path: Path) -> None:
    """Checkmate's graphs name their ends, the layered ones number them and bring an order."""
    links = [{"source": 0, "target": 1}, {"source": 0, "target": 2}, {"source": 1, "target": 2}]
    checkmate = GRAPH | {"graph": {"name": "x"}, "links": links}
    nodes = [{"name": n, "out_cost": o, "duration": d} for n, o, d in ((0, 4, 5), (1, 8, 1), (2, 2, 3))]
    links = [{"0": 0, "1": 2}, {"0": 0, "1": 1}, {"0": 2, "1": 1}]
    layered = {"graph": {"name": "y", "order": [0, 2, 1]}, "nodes": nodes, "links": links}
    problems = []
    for data in (checkmate, layered):
        (tmp_path / "graph.json").write_text(json.dumps(data))
        problems.append(load(tmp_path / "graph.json"))
    assert problems[0] == EXPECTED
    assert [(op.inputs, op.cost) for op in problems[1].ops] == [(op.inputs, op.cost) for op in EXPECTED.ops]
    assert [t.bytes for t in problems[1].tensors] == [4, 2, 8]


def test_a_refusal_is_a_row() -> None:
    found = measure(EXPECTED, 13)
    assert found.overhead is None and found.status == "from 100.00 %, floor 100.00 %"


def test_more_time_that_costs_more_is_counted() -> None:
    def row(limit: float, overhead: float | None) -> tuple[str, float, Measured]:
        return "40", limit, Measured(overhead, 0.0, "feasible", limit)

    assert worse([row(1, 10.0), row(5, 10.9), row(30, 9.0)], 0.01) == 0
    assert worse([row(1, 10.0), row(5, 11.1), row(30, None)], 0.01) == 2
    assert worse([row(1, None), row(5, 11.1), ("20", 30, Measured(50.0, 0.0, "feasible", 1.0))], 0.01) == 0


def test_the_minimum_works_and_more_memory_costs_no_more() -> None:
    """In miniature what `tests.bench.stress` asks of every family."""
    problem = FAMILIES["unit-dag-20"]()
    rows = list(measured(problem, ["40", "min"], [2.0], 0.01))
    assert [r for r in rows if r[0] == "min" and r[2].overhead is None] == []
    found = grid(problem, 0.3, 0.01)
    assert found.budgets > 40 and found.breaks == found.warm_rises == 0
