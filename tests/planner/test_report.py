"""What a plan shows: figures agree with the plan, pages stand alone, nothing is left in matplotlib's global state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import fx

from passes.memory import round_up
from passes.profile import profile
from planner import BudgetError, Plan, PlannerError, auto_checkpoint, frontier, max_batch, minimum_budget, prepared
from planner.session import open_session
from planner.show.curve import plain_curve, planned_curve, thin
from planner.show.explain import peak_if_kept
from planner.show.tables import live_at_peak, module_rows, op_rows
from solvers.errors import MIB
from tests.planner.small import conv_net, mlp, plan_at, python


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_at(mlp(), 0.3)


@pytest.fixture(scope="module")
def loose() -> Plan:
    return plan_at(conv_net(), 1.0)


def test_curves_agree_with_the_plan(plan: Plan) -> None:
    planned, plain = planned_curve(plan), plain_curve(plan)
    assert max(planned.timeline.total) == plan.peak_bytes
    assert max(plain.timeline.total) == plan.baseline_peak_bytes
    assert planned.end == pytest.approx(1 + plan.overhead)
    assert plain.end == pytest.approx(1.0)
    for columns in (1, 7, 50, 10_000):
        _, rows = thin(planned, columns)
        assert max(map(sum, zip(*rows.values(), strict=True))) == plan.peak_bytes


def test_rows_agree_with_the_plan(plan: Plan) -> None:
    rows = op_rows(plan)
    sizes = {t.name: t.bytes for t in plan.problem.tensors}
    assert sum(r.saved_bytes for r in rows) == sum(sizes[name] for name in plan.saved)
    assert sum(r.again_cost for r in rows) == plan.solution.added_cost
    assert sum(r.runs > 1 for r in rows) == len(plan.recomputed)
    total = module_rows(rows)[0]
    assert total.module == "" and total.saved_bytes == sum(r.saved_bytes for r in rows)


def test_what_is_live_at_the_peak_adds_up(plan: Plan, loose: Plan) -> None:
    for each in (plan, loose):
        assert each.static_bytes + sum(r.bytes for r in live_at_peak(each)) == each.peak_bytes


def test_tables(plan: Plan) -> None:
    found = plan.tables()
    assert set(found) == {"modules", "ops", "peak"}
    assert found["ops"]["recompute_share"].sum() == pytest.approx(plan.overhead)
    assert found["modules"].loc["(model)", "recompute_share"] == pytest.approx(plan.overhead)
    assert "3" in found["modules"].index
    assert found["peak"]["mib"].sum() == pytest.approx((plan.peak_bytes - plan.static_bytes) / MIB)
    assert len(plan.table_by_module(depth=0)) == 1
    with pytest.raises(PlannerError, match="depth=-1"):
        plan.table_by_module(depth=-1)


def test_figures(plan: Plan, loose: Plan, tmp_path: Path) -> None:
    figures = [plan.plot(), loose.plot(), plan.plot_graph(), plan.plot_graph("3"), loose.plot_graph()]
    for i, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 5000
    texts = [t.get_text() for t in plan.plot().axes[0].texts]
    assert any(text.startswith("peak ") and plan.timeline.peak[1] in text for text in texts)


def test_figures_leave_pyplot_alone() -> None:
    done = python("""
import sys
from tests.planner.small import mlp, plan_at
plan = plan_at(mlp(), 0.3)
assert plan.plot()._repr_png_().startswith(b"\\x89PNG")  # what a notebook shows
plan.plot_graph(), plan._repr_html_(), str(plan)
assert "matplotlib.pyplot" not in sys.modules
""")
    assert done.returncode == 0, done.stderr


def test_notebook_view_stands_alone(plan: Plan) -> None:
    html = plan._repr_html_()
    assert len(html) < 200_000
    assert not re.search(r"https?://|src=|@import|url\(", html)
    svg = re.search(r"<svg.*?</svg>", html, re.DOTALL)
    assert svg is not None
    ElementTree.fromstring(svg[0])
    assert "prefers-color-scheme:dark" in html
    assert plan.timeline.peak[1] in svg[0]
    assert html.count("<details") == html.count("</details>")


def test_report_stands_alone(plan: Plan, tmp_path: Path) -> None:
    page = plan.report(tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|src=|@import|<link", page)
    assert page.count("<script") == page.count("</script>") == 2
    assert "Memory plan of Sequential" in page


def test_terminal_view(plan: Plan, loose: Plan) -> None:
    text = str(plan)
    assert "recompute costs" in text and "planned" in text and "Resident then:" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "nothing is recomputed" in str(loose)
    assert repr(plan).startswith("Plan (")


def test_explain_says_why(plan: Plan) -> None:
    name = plan.recomputed[0]
    told = plan.explain(name)
    assert "recomputed before" in told and "Kept instead" in told
    assert "saved, read by" in plan.explain()
    index = next(i for i, op in enumerate(plan.problem.ops) if op.name == name)
    assert peak_if_kept(plan, index) >= plan.static_bytes
    with pytest.raises(PlannerError, match="no op of the step belongs to 'nothing'"):
        plan.explain("nothing")
    with pytest.raises(PlannerError, match="no op of the step"):
        plan.plot_graph("nothing")


def test_frontier_falls_with_memory(tmp_path: Path) -> None:
    found = frontier(*mlp(), points=4, solver="greedy", time_limit=2, progress=False)
    overheads = [p.overhead for p in found.points]
    assert overheads == sorted(overheads, reverse=True) and overheads[-1] == 0
    assert all(p.peak_bytes <= p.budget_bytes for p in found.points)
    assert found.floor_bytes <= found.minimum_bytes <= found.plain_peak_bytes
    assert list(found.table()["budget_mib"]) == [p.budget_bytes / MIB for p in found.points]
    found.plot().savefig(tmp_path / "frontier.png")
    for points in (1, 2.5, True):
        with pytest.raises(PlannerError, match="points"):
            frontier(*mlp(), points=points)  # type: ignore[arg-type]


def test_what_is_set_aside_counts_as_in_a_plan() -> None:
    """Optimizer state, reserved memory and dropped outputs mean the same to every entry point."""
    model, sample = mlp(depth=1)
    options = {"optimizer": torch.optim.AdamW, "reserve_mb": 0.5, "keep_outputs": False, "progress": False}
    plan = auto_checkpoint(model, sample, **options)
    found = frontier(model, sample, points=2, solver="greedy", **options)
    assert found.plain_peak_bytes == plan.baseline_peak_bytes
    minimum_mb, floor_mb = minimum_budget(model, sample, **options)
    assert (found.minimum_bytes, found.floor_bytes) == (minimum_mb * MIB, floor_mb * MIB)
    without = minimum_budget(model, sample, keep_outputs=False, progress=False)[0]
    sizes = [round_up(p.numel() * p.element_size(), 64) for p in model.parameters()]
    state = 2 * sum(sizes) + 64 * len(sizes)  # two moments and a counter each
    assert found.minimum_bytes - without * MIB == state + MIB // 2
    largest = max_batch(model, lambda n: mlp(batch=n)[1], 1.25, solver="greedy", on_new_shape="error", **options)
    assert largest.plan.static_bytes > state + MIB // 2
    assert largest.plan.peak_bytes <= 1.25 * MIB
    assert largest.plan.module._plan_state.on_new_shape == "error"


def test_max_batch_is_the_largest() -> None:
    model, _ = mlp(depth=2)
    options = {"solver": "greedy", "time_limit": 2, "progress": False}
    found = max_batch(model, lambda n: mlp(batch=n, depth=2)[1], 0.75, **options)
    assert found.plan.peak_bytes <= 0.75 * MIB
    assert found.plain_batch <= found.batch
    tried = dict(found.tried)
    assert tried[found.batch] and not tried[found.batch + 1]
    with pytest.raises(PlannerError, match="not even a batch of one"):
        max_batch(model, lambda n: mlp(batch=n, depth=2)[1], 0.01, **options)


def test_a_step_that_cannot_fit_is_not_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[bool] = []

    def recording(graph: fx.Graph, *, measure: bool = True, **options: Any) -> Any:
        measured.append(measure)
        return profile(graph, measure=measure, **options)

    monkeypatch.setattr(prepared, "profile", recording)
    model, sample = mlp(batch=4096)
    with pytest.raises(BudgetError, match="cannot run below"):
        open_session(model, sample, progress=False, ceiling_bytes=MIB)
    assert measured == [False]
    found = max_batch(model, lambda n: mlp(batch=n**4)[1], 1, solver="greedy", time_limit=2, progress=False)
    assert measured.count(True) < len(found.tried), "every size was run"


def test_max_batch_begins_at_two_where_forward_refuses_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    found = max_batch(model, lambda n: torch.randn(n, 8), 0.004, limit=64, progress=False)
    assert found.tried[:2] == ((1, False), (2, True)) and found.plan.peak_bytes <= 0.004 * (1 << 20)
    with pytest.raises(PlannerError, match="not even a batch of two"):
        max_batch(model, lambda n: torch.randn(n, 8), 0.001, progress=False)
    for limit in (0, True, "8", None):
        with pytest.raises(PlannerError, match=f"limit={limit!r}: the largest batch to try is a whole number"):
            max_batch(model, lambda n: torch.randn(n, 8), 1, limit=limit)  # type: ignore[arg-type]


def test_max_batch_asks_for_a_function() -> None:
    with pytest.raises(PlannerError, match=r"make_sample is a Tensor: pass a function of the batch size"):
        max_batch(torch.nn.Linear(8, 8), torch.randn(4, 8), budget_mb=1)  # type: ignore[arg-type]
