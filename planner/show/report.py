"""`plan.report("report.html")`: one page that opens offline, with hover and zoom on the memory curve."""

from __future__ import annotations

import json
import os
from html import escape
from pathlib import Path
from typing import Any

from planner.decided import Decided
from planner.files.atomic import write_text
from planner.timeline import CATEGORIES

from .curve import Curve, plain_curve, planned_curve
from .page import STYLE, body
from .plots import COLORS
from .regions import bands
from .tables import place

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
html{{background:#f3f4f6;color-scheme:light dark}}
@media(prefers-color-scheme:dark){{html{{background:#0e1116}}}}
body{{margin:0;padding:16px}}.cp{{max-width:1100px!important;margin:auto}}
#chart{{position:relative}}canvas{{display:block;width:100%;height:380px;cursor:crosshair;touch-action:none}}
#tip{{position:absolute;pointer-events:none;background:var(--back);border:1px solid var(--line);border-radius:4px;
padding:5px 8px;font-size:12px;white-space:nowrap;display:none;box-shadow:0 2px 8px #0003}}
#hint{{color:var(--soft);font-size:12px}}
{style}</style></head><body><div class="cp"><h2>{title}</h2>{body}</div>
<script id="data" type="application/json">{data}</script><script>{script}</script></body></html>
"""
CHART = (
    '<div id="chart"><canvas id="curve"></canvas><div id="tip"></div></div>'
    '<p id="hint">drag to zoom, wheel to zoom at the pointer, double click for the whole step</p>'
)


def report(plan: Decided, path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`; it loads nothing from anywhere.

    Raises:
        PlannerError: the file cannot be written.
    """
    return write_text(path, page(plan))


def page(plan: Decided) -> str:
    """The page's HTML."""
    title = f"Memory plan of {plan.prepared.model_name}"
    data = json.dumps(_data(plan), separators=(",", ":")).replace("<", "\\u003c")
    script = (Path(__file__).parent / "report.js").read_text(encoding="utf-8")
    return PAGE.format(title=escape(title), style=STYLE, body=body(plan, CHART), data=data, script=script)


def _data(plan: Decided) -> dict[str, Any]:
    return {
        "categories": list(CATEGORIES),
        "colors": [COLORS[c] for c in CATEGORIES],
        "budget": plan.budget_bytes,
        "peak": plan.timeline.peak[0],
        "regions": [[round(a, 7), round(b, 7), path] for a, b, path in bands(plan, planned_curve(plan).starts)],
        "planned": _series(plan, planned_curve(plan)),
        "plain": _series(plan, plain_curve(plan)),
    }


def _series(plan: Decided, curve: Curve) -> dict[str, Any]:
    return {
        "x": [round(x, 7) for x in curve.starts],
        "labels": [place(plan, label) for label in curve.timeline.labels],
        "bytes": [list(curve.timeline.bytes[c]) for c in CATEGORIES],
        "backward": curve.timeline.backward_from,
    }
