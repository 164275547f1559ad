"""A plan as HTML: the verdict, the memory curve as inline SVG, and the table by module, without outside resources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from planner.decided import Decided
from planner.timeline import CATEGORIES
from planner.units import show_bytes
from solvers.errors import MIB

from . import regions
from .curve import plain_curve, planned_curve, thin
from .explain import at_peak
from .plots import BUDGET, COLORS, PLAIN
from .tables import ModuleRow, OpRow, module_rows, op_rows, place
from .words import verdict

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 18, 34
STYLE = """
.cp{--ink:#1d2329;--soft:#68717c;--line:#d5dae0;--back:#ffffff;--plain:PLAIN_COLOR;--budget:BUDGET_COLOR;
font:13px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:800px;padding:10px 12px;
border-radius:6px}
@media(prefers-color-scheme:dark){.cp{--ink:#e4e8ec;--soft:#9aa4af;--line:#3b434c;--back:#171b20;--plain:#c7b5a4;
--budget:#ff7b72}}
.cp p{margin:4px 0}.cp .cp-v{font-size:14px;font-weight:600}.cp svg{display:block;width:100%;height:auto}
.cp svg text{fill:var(--soft);font:11px system-ui,sans-serif}.cp svg text.cp-k{fill:var(--ink)}
.cp .cp-l span{display:inline-block;margin-right:12px;white-space:nowrap}
.cp .cp-l i{display:inline-block;width:11px;height:11px;margin-right:4px;vertical-align:-1px;border-radius:2px}
.cp details>details,.cp details>.cp-r{margin-left:14px}.cp summary{cursor:pointer}
.cp .cp-r,.cp summary{border-bottom:1px solid var(--line);padding:1px 0}
.cp .cp-c{float:right;font-variant-numeric:tabular-nums}.cp .cp-c b{display:inline-block;font-weight:400;width:92px;
text-align:right}.cp .cp-h{color:var(--soft)}.cp .cp-r::after,.cp summary::after{content:"";display:block;clear:both}
.cp ul{margin:2px 0;padding-left:20px}.cp code{font-size:12px}
""".replace("PLAIN_COLOR", PLAIN).replace("BUDGET_COLOR", BUDGET)


def repr_html(plan: Decided) -> str:
    """What a notebook shows: self-contained, a few dozen KiB."""
    return f'<div class="cp"><style>{STYLE}</style>{body(plan)}</div>'


def body(plan: Decided, chart: str | None = None) -> str:
    """Verdict, chart, what binds at the peak, table; `chart` replaces the static curve."""
    notes = (f"<p>{escape(note)}</p>" for note in plan.notes)
    checked = f"<p>{escape(plan.checked.line)}</p>"
    parts = [f'<p class="cp-v">{escape(verdict(plan).sentence)}</p>', *notes, checked]
    return "".join([*parts, chart or svg(plan), legend(plan), _regions(plan), _peak(plan), table(plan)])


def legend(plan: Decided) -> str:
    """The colours of the curve."""
    items = [(COLORS[c], c) for c in CATEGORIES] + [("var(--plain)", "plain step (outline)")]
    if plan.budget_bytes is not None:
        items.append(("var(--budget)", "budget"))
    spans = "".join(f'<span><i style="background:{color}"></i>{name}</span>' for color, name in items)
    return f'<p class="cp-l">{spans}</p>'


def _regions(plan: Decided) -> str:
    if not (found := regions.lines(plan)):
        return ""
    items = "".join(f"<li>{escape(line.removeprefix('- '))}</li>" for line in found[1:])
    return f"<details><summary>{escape(found[0])}</summary><ul>{items}</ul></details>"


def _peak(plan: Decided) -> str:
    first, *rest = at_peak(plan)
    items = "".join(f"<li>{escape(line.removeprefix('- '))}</li>" for line in rest)
    return f"<details><summary>{escape(first)}</summary><ul>{items}</ul></details>"



# The curve ------------------------------------------------------------------------------------------------------------


def svg(plan: Decided) -> str:
    """The memory curve as inline SVG."""
    planned, plain = planned_curve(plan), plain_curve(plan)
    end = max(planned.end, plain.end) or 1.0
    top = 1.2 * max(plan.baseline_peak_bytes, plan.peak_bytes)
    scale = _Scale(end, top)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over the step">', *_axes(scale)]
    xs, rows = thin(planned, WIDTH - LEFT - RIGHT)
    below = [0] * len(xs)
    for category in CATEGORIES:
        above = [b + v for b, v in zip(below, rows[category], strict=True)]
        points = [*_steps(xs, above, scale), *reversed(_steps(xs, below, scale))]
        parts.append(f'<polygon fill="{COLORS[category]}" points="{" ".join(points)}"/>')
        below = above
    xs, rows = thin(plain, WIDTH - LEFT - RIGHT)
    total = [sum(v) for v in zip(*rows.values(), strict=True)]
    outline = " ".join(_steps(xs, total, scale))
    parts.append(f'<polyline fill="none" stroke="var(--plain)" stroke-dasharray="4 2" points="{outline}"/>')
    parts += _marks(plan, scale, planned.backward_at, planned.starts)
    return "".join([*parts, "</svg>"])


class _Scale:
    """From shares of the step and bytes to the picture's units."""

    def __init__(self, end: float, top: float) -> None:
        self.end, self.top = end, top

    def x(self, share: float) -> float:
        return round(LEFT + share / self.end * (WIDTH - LEFT - RIGHT), 1)

    def y(self, size: float) -> float:
        return round(HEIGHT - BOTTOM - size / self.top * (HEIGHT - TOP - BOTTOM), 1)


def _steps(xs: Sequence[float], values: Sequence[int], scale: _Scale) -> list[str]:
    points = []
    for (left, right), value in zip(pairwise(xs), values, strict=False):
        points += [f"{scale.x(left):g},{scale.y(value):g}", f"{scale.x(right):g},{scale.y(value):g}"]
    return points


def _axes(scale: _Scale) -> Iterator[str]:
    unit = _tick(scale.top / MIB)
    count = int(scale.top / MIB / unit)
    for i in range(count + 1):
        y = scale.y(i * unit * MIB)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="var(--line)"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{i * unit:,g}</text>'
    yield f'<text x="{LEFT - 6}" y="11" text-anchor="end">MiB</text>'
    middle = (WIDTH + LEFT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">shares of the plain step\'s cost</text>'
    for i in range(int(scale.end * 5) + 1):
        yield f'<text x="{scale.x(i / 5)}" y="{HEIGHT - 18}" text-anchor="middle">{i / 5:g}</text>'


def _tick(span: float) -> float:
    """A round step that gives four to nine ticks."""
    unit = 1e-3
    for factor in (2, 2.5, 2) * 6:
        if span / unit <= 8:
            break
        unit *= factor
    return unit


def _marks(plan: Decided, scale: _Scale, backward_at: float, starts: Sequence[float]) -> Iterator[str]:
    x = scale.x(backward_at)
    yield f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--soft)" stroke-dasharray="1 3"/>'
    yield f'<text x="{x - 4}" y="{TOP - 6}" text-anchor="end">forward</text>'
    yield f'<text x="{x + 4}" y="{TOP - 6}">backward</text>'
    if plan.budget_bytes is not None and plan.budget_bytes <= scale.top:
        y = scale.y(plan.budget_bytes)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="var(--budget)" stroke-width="1.5"/>'
    for left, right, path in regions.bands(plan, starts):
        x, width = scale.x(left), max(0.5, scale.x(right) - scale.x(left) - 1)
        box = f'x="{x}" y="{HEIGHT - BOTTOM + 1}" width="{width:.1f}" height="4"'
        yield f'<rect {box} fill="var(--soft)" opacity="0.6"><title>{escape(path)}</title></rect>'
    yield from _peak_mark(plan, scale, starts)


def _peak_mark(plan: Decided, scale: _Scale, starts: Sequence[float]) -> Iterator[str]:
    """Named in the room above all curves, so that the name hides none of them."""
    step, label, size = plan.timeline.peak
    x, y = scale.x((starts[step] + starts[step + 1]) / 2), scale.y(size)
    anchor, shift = ("end", -6) if x > (WIDTH + LEFT) / 2 else ("start", 6)
    yield f'<line x1="{x}" x2="{x}" y1="{TOP + 4}" y2="{y}" stroke="var(--budget)" stroke-width="0.7"/>'
    yield f'<circle cx="{x}" cy="{y}" r="4" fill="var(--budget)"/>'
    text = escape(fitting(f"peak {show_bytes(size)} at ", place(plan, label), 60))
    halo = 'stroke="var(--back)" stroke-width="3" paint-order="stroke"'
    yield f'<text class="cp-k" x="{x + shift}" y="{TOP + 12}" text-anchor="{anchor}" {halo}>{text}</text>'


def fitting(head: str, name: str, longest: int) -> str:
    """`head` and `name` in at most `longest` characters; of the name, the end says more."""
    room = longest - len(head)
    return head + (name if len(name) <= room else f"…{name[len(name) - room + 1 :]}")


# The table ------------------------------------------------------------------------------------------------------------


def table(plan: Decided) -> str:
    """Bytes saved, bytes dropped and recompute cost by module; modules open to their parts and ops."""
    rows = [r for r in op_rows(plan) if not r.backward]
    modules = module_rows(tuple(rows))
    head = '<div class="cp-r cp-h">module<span class="cp-c"><b>saved</b><b>dropped</b><b>recompute</b></span></div>'
    return head + _branch(modules, 0, rows, plan.problem.step_cost or 1)[0]


def _branch(modules: Sequence[ModuleRow], at: int, rows: list[OpRow], step: int) -> tuple[str, int]:
    """The module at `at` with all that is below it, and the index after them."""
    module, after = modules[at], at + 1
    inner = []
    while after < len(modules) and modules[after].depth > module.depth:
        text, after = _branch(modules, after, rows, step)
        inner.append(text)
    inner += [_op(r, step) for r in rows if r.module == module.module and (r.saved_bytes or r.runs > 1)]
    name = escape(module.module.rpartition(".")[2] or "the model")
    cells = _cells(module.saved_bytes, module.dropped_bytes, module.again_cost / step)
    if not inner or not (module.saved_bytes or module.recomputed_ops):
        return f'<div class="cp-r">{name}{cells}</div>', after
    # A root that holds all of it in one part (`model`) says nothing by itself: its part is open too.
    shown = " open" if module.depth == 0 or (module.depth == 1 and module.saved_bytes == modules[0].saved_bytes) else ""
    return f"<details{shown}><summary>{name}{cells}</summary>{''.join(inner)}</details>", after


def _op(row: OpRow, step: int) -> str:
    title = escape(f"{row.aten} -> {row.result}: {row.decision}")
    cells = _cells(row.saved_bytes, row.dropped_bytes, row.again_cost / step)
    return f'<div class="cp-r" title="{title}"><code>{escape(row.name)}</code>{cells}</div>'


def _cells(saved: int, dropped: int, share: float) -> str:
    texts = [show_bytes(size) if size else "" for size in (saved, dropped)] + [f"{share:.2%}" if share else ""]
    return f'<span class="cp-c">{"".join(f"<b>{t}</b>" for t in texts)}</span>'
