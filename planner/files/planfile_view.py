"""Plan files looked at without their model: what one says, and how two differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from passes.printable import printable
from planner.show.words import Verdict
from planner.units import show_bytes

from .planfile import PlanFile

if TYPE_CHECKING:
    from planner.show.console import Group

Row = tuple[str, str, str]
SHOWN = 60


def summary(file: PlanFile) -> dict[str, Any]:
    """The file's verdict as plain values."""
    ops = file["ops"]
    return {
        "model": file["model"],
        "options": file["options"],
        "result": {**file["result"], "overhead": _overhead(file), "bound_share": _bound(file)},
        "saved": [op["op"] for op in ops if "saved" in op["decision"]],
        "recomputed": [op["op"] for op in ops if "recomputed" in op["decision"]],
    }


def show_file(file: PlanFile) -> Group:
    """The file for a terminal: the verdict, then modules with what they save and recompute."""
    from planner.show.console import Group, Table, Text

    saved, result = summary(file), file["result"]
    model, options = file["model"], file["options"]
    found = Verdict(
        options["budget_bytes"], result["peak_bytes"], result["plain_peak_bytes"], _overhead(file), _bound(file),
        result["status"], result["solver"], options["cost"], len(saved["saved"]), len(saved["recomputed"]),
    )  # fmt: skip
    lines = [
        f"{model['class']} on {model['device']}, planned with torch {model['torch']}; nothing was run or solved",
        found.sentence, found.details,
        *(f"note: {note}" for note in result["notes"]),
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module")
    for name in ("ops saved", "ops recomputed"):
        table.add_column(name, justify="right")
    for module, (kept, again) in _by_module(file).items():
        table.add_row(Text(printable(module)), str(kept or ""), str(again or ""))
    return Group(*(Text(printable(line)) for line in lines), Text(""), table)


def differences(first: PlanFile, second: PlanFile) -> list[Row]:
    """Rows `(what, in first, in second)`, the most telling first; empty when the plans decide the same."""
    return list(_differences(first, second))


def _differences(first: PlanFile, second: PlanFile) -> Iterator[Row]:
    for section in ("model", "options", "result"):
        for key, old in first[section].items():
            new = second[section][key]
            if old != new:
                yield f"{section}.{key}", _text(key, old), _text(key, new)
    for old, new in zip(first["tensors"], second["tensors"], strict=False):
        if old != new:
            yield "first tensor that differs", old, new
            break
    before, after = ({op["op"]: op["decision"] for op in file["ops"]} for file in (first, second))
    names = list(dict.fromkeys([*before, *after]))
    changed = [n for n in names if before.get(n) != after.get(n)]
    for name in changed[:SHOWN]:
        yield name, before.get(name, "no such op"), after.get(name, "no such op")
    if len(changed) > SHOWN:
        yield f"and {len(changed) - SHOWN} more ops", "", ""
    if not changed and first["schedule"] != second["schedule"]:
        yield "schedule", "the same ops", "in another order"


def _by_module(file: PlanFile) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for op in file["ops"]:
        module = op["op"].rpartition("/")[0] or "(model)"
        kept, again = found.get(module, (0, 0))
        found[module] = kept + ("saved" in op["decision"]), again + ("recomputed" in op["decision"])
    return {m: counts for m, counts in found.items() if any(counts)}


def _overhead(file: PlanFile) -> float:
    return float(file["result"]["added_cost"] / (file["result"]["step_cost"] or 1))


def _bound(file: PlanFile) -> float | None:
    bound = file["result"]["bound"]
    return None if bound is None else float(bound / (file["result"]["step_cost"] or 1))


def _text(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return _mib(value)
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def _mib(size: int | None) -> str:
    return "none" if size is None else show_bytes(size)
