"""Pictures of a plan as ordinary matplotlib figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.decided import Decided
from planner.timeline import CATEGORIES
from planner.units import show_bytes
from solvers.errors import MIB

from .curve import plain_curve, planned_curve, thin
from .regions import bands
from .tables import OpRow, module_rows, op_rows, place, unknown_module, within
from .words import verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLORS = {
    "parameters": "#8b929c", "gradients": "#9a7fd1", "saved": "#3f86e8", "recomputed": "#f09a36",
    "temporary": "#4fae74",
}  # fmt: skip
BUDGET, PLAIN, TEXT = "#d6453d", "#7d6b5d", "#7f858d"
NEITHER = "#b9bfc7"
COLUMNS = 1500


def plot(plan: Decided, width: float = 9.0, height: float = 4.6) -> Figure:
    """The memory curve: planned stacked by category, plain as an outline, budget and peaks marked. Sizes in inches."""
    figure, axes = figure_with_axes(width, height)
    planned, plain = planned_curve(plan), plain_curve(plan)
    xs, rows = thin(planned, COLUMNS)
    stacks = [[value / MIB for value in rows[c]] for c in CATEGORIES]
    axes.stackplot(xs, stacks, labels=CATEGORIES, colors=[COLORS[c] for c in CATEGORIES], step="post", linewidth=0)
    xs, rows = thin(plain, COLUMNS)
    outline = [sum(values) / MIB for values in zip(*rows.values(), strict=True)]
    axes.step(xs, outline, where="post", color=PLAIN, linewidth=1.1, linestyle=(0, (4, 2)), label="plain step")
    axes.axvline(planned.backward_at, color=TEXT, linewidth=0.8, linestyle=":")
    top = max(plan.baseline_peak_bytes, plan.peak_bytes, plan.budget_bytes or 0) / MIB
    if plan.budget_bytes is not None and plan.budget_bytes / MIB < 2 * top:
        label = f"budget {show_bytes(plan.budget_bytes)}"
        axes.axhline(plan.budget_bytes / MIB, color=BUDGET, linewidth=1.2, label=label)
    for left, right, _ in bands(plan, planned.starts):
        axes.axvspan(left, right, ymax=0.012, color=TEXT, alpha=0.6, linewidth=0)
    _mark_peak(axes, plan, planned.starts, top)
    axes.set_xlim(0, max(planned.end, plain.end))
    axes.set_ylim(0, top * 1.22)
    axes.set_xlabel("forward, then backward (dotted line), in shares of the plain step's cost")
    axes.set_ylabel("MiB")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=8.5)
    axes.set_title(verdict(plan).headline, fontsize=10, loc="left")
    return figure


def plot_graph(plan: Decided, module: str | None = None) -> Figure:
    """The module tree as bars of bytes saved and recomputed; with `module`, that block's ops as a graph.

    Raises:
        PlannerError: no op belongs to `module`; the message names modules that have some.
    """
    return _plot_tree(plan) if module is None else _plot_block(plan, module)


def _mark_peak(axes: Axes, plan: Decided, starts: tuple[float, ...], top: float) -> None:
    # In the room above all curves, so that it hides none of them; a thin line leads to the point.
    step, label, size = plan.timeline.peak
    x = (starts[step] + starts[step + 1]) / 2
    left = x > starts[-1] * 0.5
    axes.plot([x], [size / MIB], marker="o", color=BUDGET, markersize=5, zorder=5)
    axes.plot([x, x], [size / MIB, top * 1.13], color=BUDGET, linewidth=0.7, zorder=4)
    axes.annotate(
        f"peak {show_bytes(size)} at {place(plan, label)}", (x, top * 1.13), xytext=(-5 if left else 5, 0),
        textcoords="offset points", ha="right" if left else "left", va="center", fontsize=8.5, zorder=6,
        parse_math=False,
    )  # fmt: skip


def figure_with_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of that many inches with one pair of axes."""
    from planner.figure import figure

    made = figure(width, height)
    axes = made.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return made, axes


# The module tree ------------------------------------------------------------------------------------------------------


def _plot_tree(plan: Decided, limit: int = 40) -> Figure:
    rows = [r for r in module_rows(op_rows(plan)) if r.saved_bytes or r.dropped_bytes]
    depth = max((r.depth for r in rows), default=0)
    while len([r for r in rows if r.depth <= depth]) > limit and depth > 1:
        depth -= 1
    rows = [r for r in rows if r.depth <= depth][:limit]
    figure, axes = figure_with_axes(8.5, 1.2 + 0.24 * max(1, len(rows)))
    places = range(len(rows))
    saved, dropped = [r.saved_bytes / MIB for r in rows], [r.dropped_bytes / MIB for r in rows]
    axes.barh(places, saved, color=COLORS["saved"], label="saved", height=0.72)
    axes.barh(places, dropped, left=saved, color=COLORS["recomputed"], label="dropped and recomputed", height=0.72)
    for y, r in enumerate(rows):
        if r.again_cost:
            share = r.again_cost / (plan.problem.step_cost or 1)
            axes.text(saved[y] + dropped[y], y, f"  +{share:.2%}", va="center", fontsize=7.5, color=TEXT)
    names = ["    " * r.depth + (r.module.rpartition(".")[2] or "(model)") for r in rows]
    axes.set_yticks(list(places), names, fontsize=8.5, family="monospace", ha="left", parse_math=False)
    width = max((len(n) for n in names), default=1)
    axes.tick_params(axis="y", length=0, pad=6.2 * width)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel("MiB of activations, modules with all below them\n(the figure: recompute, share of the step)")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8.5)
    return figure


# One block ------------------------------------------------------------------------------------------------------------


def _plot_block(plan: Decided, module: str) -> Figure:
    rows = {r.name: r for r in op_rows(plan) if not r.backward and r.aten and within(r.module, module)}
    if not rows:
        raise unknown_module(plan, module)
    graph = plan.graph.subgraph(rows)
    layers = _layers(graph, list(rows))
    columns = max(len(names) for names in layers)
    figure, axes = figure_with_axes(max(5.0, 3.3 * columns), 0.9 + 0.62 * len(layers))
    spots = {
        n: ((i - (len(names) - 1) / 2) * 3.2, float(-y)) for y, names in enumerate(layers) for i, n in enumerate(names)
    }
    margin = _arrows(axes, list(graph.edges), spots)
    for name, (x, y) in spots.items():
        _box(axes, x, y, rows[name])
    axes.set_xlim(-1.7 * columns - 0.3, max(1.7 * columns, margin) + 0.2)
    axes.set_ylim(-len(layers) + 0.4, 0.6)
    axes.set_axis_off()
    title = f"{module}: saved blue, recomputed orange, both striped, neither grey"
    axes.set_title(title, fontsize=9.5, parse_math=False)
    return figure


def _layers(graph: Any, order: list[str]) -> list[list[str]]:
    depth: dict[str, int] = {}
    for name in order:
        depth[name] = 1 + max((depth[p] for p in graph.predecessors(name)), default=-1)
    layers: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in order:
        layers[depth[name]].append(name)
    return layers


def _arrows(axes: Axes, edges: list[tuple[str, str]], spots: dict[str, tuple[float, float]]) -> float:
    """Neighbouring rows are joined straight; longer ways run down a rail of their own, right of all boxes they pass.

    Returns the rightmost rail.
    """
    rails: list[tuple[float, float, float]] = []  # x, upper y, lower y
    for source, target in sorted(edges, key=lambda e: (spots[e[0]][1] - spots[e[1]][1], -spots[e[0]][1])):
        (x, y), (to_x, to_y) = spots[source], spots[target]
        if y - to_y < 1.5:
            _arrow(axes, (x, y - 0.24), (to_x, to_y + 0.24))
            continue
        rail = 1.6 + max(x for x, level in spots.values() if to_y <= level <= y)
        while any(abs(rail - other) < 0.1 and y > low and to_y < high for other, high, low in rails):
            rail += 0.16
        rails.append((rail, y, to_y))
        out, into = y - 0.36, to_y + 0.36
        axes.plot([x + 1.1, x + 1.1, rail, rail, to_x + 1.1], [y - 0.24, out, out, into, into], color=TEXT, lw=0.9)
        _arrow(axes, (to_x + 1.1, into), (to_x + 1.1, to_y + 0.24))
    return max((rail for rail, _, _ in rails), default=0.0)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    arrow: Any = {"arrowstyle": "-|>", "color": TEXT, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=arrow)


def _box(axes: Axes, x: float, y: float, row: OpRow) -> None:
    from matplotlib.patches import FancyBboxPatch

    color = COLORS["saved"] if row.saved_bytes else COLORS["recomputed"] if row.runs > 1 else NEITHER
    axes.add_patch(FancyBboxPatch(
        (x - 1.4, y - 0.22), 2.8, 0.44, boxstyle="round,pad=0.02,rounding_size=0.08", facecolor=color, edgecolor="none",
        alpha=0.9 if color != NEITHER else 0.6, hatch="//" if row.saved_bytes and row.runs > 1 else None,
    ))  # fmt: skip
    size = row.saved_bytes or row.dropped_bytes
    text = f"{_short(row.aten)}  {show_bytes(size)}" if size else _short(row.aten)
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color="#101418")


def _short(aten: str, longest: int = 24) -> str:
    """`aten._native_batch_norm_legit_functional.default` as `batch_norm`."""
    name = aten.removeprefix("aten.").removesuffix(".default").removesuffix("_legit_functional")
    name = name.removeprefix("_").removeprefix("native_")
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
