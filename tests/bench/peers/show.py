"""The results as tables and as the README's figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

from .point import Point
from .verdict import Duel, duels, lowest, summary

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

MIB = 1 << 20
STYLES = {
    "block": ("per block", "s", "#c44e52"), "sqrt": ("every sqrt(n)", "D", "#dd8452"),
    "selective": ("selective", "^", "#8172b3"), "mincut": ("min-cut", "v", "#4c72b0"),
    "ours": ("this planner", "o", "#1b7f3b"),
}  # fmt: skip


def print_points(points: Sequence[Point], console: Console) -> None:
    """A row per point; shares are of plain eager."""
    table = Table("model", "method", "peak MiB", "share", "activations", "FLOPs", "bytes moved", "time", "plan s",
                  "numbers", "note")  # fmt: skip
    for model in dict.fromkeys(p.model for p in points):
        mine = [p for p in points if p.model == model]
        plain = next((p for p in mine if p.method == "plain" and p.ok), None)
        for point in mine:
            table.add_row(point.model, point.label, *_cells(point, plain))
        table.add_section()
    console.print(table)


def _cells(point: Point, plain: Point | None) -> tuple[str, ...]:
    if not point.ok or plain is None:
        return (*["-"] * 8, point.error or "")
    return (
        f"{point.peak_bytes / MIB:.1f}", f"{point.peak_bytes / plain.peak_bytes:.3f}",
        f"{point.activation_bytes / max(1, plain.activation_bytes):.3f}", f"{point.flops / plain.flops:.3f}",
        f"{point.moved_bytes / plain.moved_bytes:.3f}", "-" if point.ratio is None else f"{point.ratio:.2f}",
        f"{point.planning_seconds:.1f}", _numbers(point), point.note,
    )  # fmt: skip


def print_duels(points: Sequence[Point], console: Console) -> None:
    """A row per peer point, ours at that peak beside it, then the summary."""
    table = Table("model", "peer", "numbers", "peak MiB", "added FLOPs", "ours", "bound", "time", "ours", "losses")
    for duel in duels(points):
        table.add_row(*_duel(duel))
    console.print(table)
    low = Table("model", "per block MiB", "ours MiB", "ratio", "no schedule below", title="lowest total peak")
    for x in lowest(points):
        floor = "-" if x.floor is None else f"{x.floor / x.block:.3f}"
        low.add_row(x.model, f"{x.block / MIB:.1f}", f"{x.ours / MIB:.1f}", f"{x.ours / x.block:.3f}", floor)
    console.print(low)
    for line in summary(points):
        console.print(line)


def _duel(duel: Duel) -> tuple[str, ...]:
    peer, ours = duel.peer, duel.ours
    head = (peer.model, peer.label, _numbers(peer), f"{peer.peak_bytes / MIB:.1f}",
            f"{duel.peer_added:.1%}")  # fmt: skip
    if not ours.ok:
        return (*head, "-", "-", _time(peer), "-", f"does not fit: {ours.error}")
    bound = "-" if ours.bound is None else f"{ours.overhead or 0:.1%} / {ours.bound:.1%}"
    return (*head, f"{duel.added:.1%}", bound, _time(peer), _time(ours), ", ".join(duel.losses))


def _numbers(point: Point) -> str:
    if not point.different:
        return "equal"
    return f"{'rounding' if point.correct else 'WRONG'}: {len(point.different)} by {point.difference:.0e}"


def _time(point: Point) -> str:
    return "-" if point.ratio is None else f"{point.ratio:.2f}"


def draw(points: Sequence[Point], path: Path) -> None:
    """Memory against time and against FLOPs: two rows of panels a model, every peer's points and our curve."""
    models = [m for m in dict.fromkeys(p.model for p in points)
              if any(p.model == m and p.method == "plain" and p.ok for p in points)]  # fmt: skip
    columns = min(4, max(1, len(models)))
    bands = -(-len(models) // columns)
    figure, axes = plt.subplots(2 * bands, columns, figsize=(3.3 * columns, 4.6 * bands), squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    for i, model in enumerate(models):
        mine = [p for p in points if p.model == model and p.ok]
        top, below = axes[2 * (i // columns)][i % columns], axes[2 * (i // columns) + 1][i % columns]
        _panel(top, mine, lambda p, plain: p.ratio or float("nan"), "step time / eager")
        _panel(below, mine, lambda p, plain: p.flops / plain.flops, "FLOPs / eager")
        top.set_title(model, fontsize=10)
    _legend(figure)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / (4.6 * bands)))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _panel(ax: Axes, points: Sequence[Point], value: Callable[[Point, Point], float], label: str) -> None:
    ax.set_visible(True)
    plain = next(p for p in points if p.method == "plain")
    for method, (_, marker, colour) in STYLES.items():
        own = sorted((p for p in points if p.method == method), key=lambda p: p.peak_bytes)
        xs, ys = [p.peak_bytes / MIB for p in own], [value(p, plain) for p in own]
        if method == "ours":
            ax.plot(xs, ys, "-", color=colour, linewidth=1.2, zorder=2)
        right = [p.correct for p in own]
        faces = [colour if r else "none" for r in right]
        ax.scatter(xs, ys, marker=marker, facecolors=faces, edgecolors=colour, s=26, linewidths=1.1, zorder=3)
    ax.scatter([plain.peak_bytes / MIB], [1], marker="*", color="black", s=60, zorder=4)
    ax.set_xlabel("peak MiB", fontsize=8)
    ax.set_ylabel(label, fontsize=8)
    ax.tick_params(labelsize=7)
    ax.grid(alpha=0.25)


def _legend(figure: plt.Figure) -> None:
    handles = [plt.Line2D([], [], marker="*", color="black", linestyle="", markersize=9, label="plain eager")]
    handles += [
        plt.Line2D([], [], marker=m, color=c, linestyle="-" if k == "ours" else "", label=name, markersize=6)
        for k, (name, m, c) in STYLES.items()
    ]
    handles.append(
        plt.Line2D([], [], marker="o", markerfacecolor="none", color="grey", linestyle="",
                   label="hollow: wrong gradients or buffers")
    )  # fmt: skip
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), fontsize=8, frameon=False)
