"""A plan in a terminal: the verdict, the memory curve in blocks, the table by module, what binds at the peak."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from planner.decided import Decided
from planner.units import show_bytes

from .curve import Curve, plain_curve, planned_curve, thin
from .explain import at_peak
from .regions import lines
from .tables import ModuleRow, module_rows, op_rows
from .words import verdict

if TYPE_CHECKING:

    from .console import Group, Table

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 24


def to_text(plan: Decided, width: int = 100) -> str:
    """The whole story as plain text of at most `width` columns."""
    from .console import Console

    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, force_terminal=False).print(renderable(plan, width))
    return stream.getvalue().rstrip("\n")


def renderable(plan: Decided, width: int = 100) -> Group:
    """The same for a rich console."""
    from .console import Group, Text

    parts: list[Any] = [Text(verdict(plan).sentence, style="bold"), *(Text(f"note: {n}") for n in plan.notes)]
    parts += [Text(plan.checked.line), Text("")]
    parts += [Text(line, no_wrap=True) for line in curves(plan, width - 20)]
    parts += [Text(""), module_table(plan), Text(""), *(Text(line) for line in _regions(plan))]
    parts += [Text(line) for line in at_peak(plan)]
    return Group(*parts)


def _regions(plan: Decided, most: int = 20) -> list[str]:
    found = lines(plan)
    more = [f"- ... and {len(found) - most} more: plan.regions lists all of them"] if len(found) > most else []
    return [*found[:most], *more, ""] if found else []


def curves(plan: Decided, columns: int) -> list[str]:
    """Two sparklines on one scale: the plain step, then the planned one."""
    plain, planned = plain_curve(plan), planned_curve(plan)
    end, top = max(plain.end, planned.end) or 1.0, max(plan.baseline_peak_bytes, plan.peak_bytes)
    return [f"{name:8}{_spark(curve, columns, end, top)} {show_bytes(max(curve.timeline.total))}"
            for name, curve in (("plain", plain), ("planned", planned))]  # fmt: skip


def _spark(curve: Curve, columns: int, end: float, top: int) -> str:
    own = max(1, round(columns * curve.end / end))
    xs, rows = thin(curve, own)
    total = [sum(values) for values in zip(*rows.values(), strict=True)]
    levels = [0] * own
    current = 0
    for column in range(own):
        here = [t for x, t in zip(xs, total, strict=True) if int(x / (curve.end or 1) * own) == column]
        current = max(here) if here else current
        levels[column] = current
    return "".join(BLOCKS[max(1, round(level / (top or 1) * 8))] for level in levels).ljust(columns)


def module_table(plan: Decided) -> Table:
    """The table by module, as deep as fits on a screen."""
    from .console import Table, Text

    rows = _fitting([r for r in module_rows(op_rows(plan)) if r.saved_bytes or r.recomputed_ops])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module")
    for name in ("saved", "dropped", "recomputed ops", "recompute"):
        table.add_column(name, justify="right")
    for row in rows:
        share = row.again_cost / (plan.problem.step_cost or 1)
        name = "  " * row.depth + (row.module.rpartition(".")[2] or "(model)")
        sizes = show_bytes(row.saved_bytes), show_bytes(row.dropped_bytes)
        table.add_row(Text(name), *sizes, str(row.recomputed_ops), f"{share:.2%}")
    return table


def _fitting(rows: list[ModuleRow]) -> Iterable[ModuleRow]:
    depth = max((r.depth for r in rows), default=0)
    while depth > 1 and sum(r.depth <= depth for r in rows) > ROWS:
        depth -= 1
    return [r for r in rows if r.depth <= depth]

