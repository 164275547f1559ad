"""The plan file: a plan as readable, versioned JSON. Saving is atomic and deterministic; loading executes nothing.

A line per op holds its name (module path and node), its kind, its result, and what was decided; the schedule lists
which ops run again and before which op of the step. Two digests guard it: `checksum` over the file's own content,
`fingerprint` over the captured step. Loading captures the model again, compares, re-proves and rewrites; it never
solves.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passes._torch import TORCH_VERSION
from passes.printable import brief, printable
from planner.decided import Decided
from planner.errors import PlanFileError
from planner.options import GRADIENTS, ON_NEW_SHAPE, WHOLE
from solvers.errors import PlannerError, ScheduleError
from solvers.problem import Problem
from solvers.schedule import Schedule, Step, computes, with_frees
from solvers.solution import Solution

from .atomic import write_text
from .fingerprint import OpLine, fingerprint, op_lines, tensor_lines
from .strictjson import MAX_BYTES, canonical, read_json

FORMAT = "checkpoint-planner plan"
VERSION = 1
TORCH_RELEASE = TORCH_VERSION.split("+")[0]
MAX_RUNS = 20_000  # of recomputes, or eight for each op where that is more
OP_KEYS = ("op", "aten", "result", "bytes", "decision", "id")
FIELDS: dict[str, dict[str, Any]] = {
    "model": {"class": str, "device": str, "torch": str, "fingerprint": str, "problem": str},
    "options": {"budget_bytes": int | None, "reserve_bytes": int, "cost": str, "loss_fn": str | None,
                "on_new_shape": str, "differentiated": list, "regions": list,
                "keep_outputs": bool, "hints": dict, "gradients": str, "state_bytes": int, "step_bytes": int,
                "hook_bytes": dict, "device": str},
    "result": {"peak_bytes": int, "plain_peak_bytes": int, "static_bytes": int, "added_cost": int, "step_cost": int,
               "bound": int | None, "bound_family": str, "status": str, "solver": str, "notes": list},
    "schedule": {"frees": str, "recompute": list, "steps": list},
}  # fmt: skip
LISTS = ("tensors", "ops")
# Options that the first files do not have.
SINCE: dict[str, Any] = {
    "gradients": "fresh", "state_bytes": 0, "step_bytes": 0, "hook_bytes": {}, "device": "", "regions": [WHOLE],
}  # fmt: skip


@dataclass(frozen=True)
class PlanFile:
    """A parsed plan file, its types checked; `data` is plain JSON."""

    path: str
    data: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def error(self, field: str, message: str) -> PlanFileError:
        return PlanFileError(f"{brief(self.path)}: {brief(message, 1000)}", path=self.path, field=field)


def save(plan: Decided, path: str | os.PathLike[str]) -> Path:
    """Write `plan` to `path`; equal plans give equal bytes.

    Raises:
        PlannerError: the file cannot be written, or would be larger than what is read again.
    """
    data = to_data(plan)
    data["checksum"] = _checksum(data)
    text = render(data)
    if len(text) > MAX_BYTES:  # ASCII
        raise PlannerError(f"the plan takes {len(text):,} bytes; plan files are read up to {MAX_BYTES:,} bytes.")
    return write_text(path, text)


def to_data(plan: Decided) -> dict[str, Any]:
    """The content of the plan file, except for its checksum."""
    prepared, options = plan.prepared, plan.prepared.options
    lines = op_lines(prepared)
    return {
        "format": FORMAT,
        "version": VERSION,
        "checksum": "",
        "model": {
            "class": prepared.model_name,
            "device": prepared.device.type,
            "torch": TORCH_RELEASE,
            "fingerprint": fingerprint(prepared.traced),
            "problem": problem_digest(plan.problem),
        },
        "options": {
            "budget_bytes": plan.budget_bytes,
            "reserve_bytes": options.reserve_bytes,
            "cost": plan.cost_name,
            "loss_fn": function_name(options.loss_fn),
            "on_new_shape": options.on_new_shape,
            "keep_outputs": options.keep_outputs,
            "hints": options.hints.to_dict(),
            "gradients": options.gradients,
            "state_bytes": options.update.state_bytes,
            "step_bytes": options.update.step_bytes,
            "hook_bytes": options.update.hook_bytes,
            "device": options.device,
            "regions": list(dict.fromkeys(run.path for run in plan.runs)) or [WHOLE],
            "differentiated": [leaf.path for leaf in prepared.traced.outputs if leaf.differentiated],
        },
        "result": _result(plan, plan.solution),
        "schedule": encode_schedule(plan.problem, plan.schedule, lines),
        "tensors": list(tensor_lines(prepared.traced)),
        "ops": _op_rows(plan, lines),
    }


def problem_digest(problem: Problem) -> str:
    """sha256 over bytes, costs and workspaces: equal digests mean that every figure of the plan holds here too."""
    return hashlib.sha256(canonical(problem.to_dict())).hexdigest()


def render(data: dict[str, Any]) -> str:
    """JSON with one op, tensor or setting per line, so that a diff of two plans reads well."""
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_block(value)}" for key, value in data.items()) + "\n}\n"


def _block(value: Any, indent: str = "    ") -> str:
    if isinstance(value, dict) and value and indent == "    ":
        inner = [f"{indent}{json.dumps(k)}: {_block(v, indent + '  ')}" for k, v in value.items()]
        return "{\n" + ",\n".join(inner) + f"\n{indent[:-2]}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(indent + json.dumps(v) for v in value) + f"\n{indent[:-2]}]"
    return json.dumps(value)


def _result(plan: Decided, found: Solution) -> dict[str, Any]:
    return {
        "peak_bytes": found.peak_bytes,
        "plain_peak_bytes": plan.baseline_peak_bytes,
        "static_bytes": plan.static_bytes,
        "added_cost": found.added_cost,
        "step_cost": plan.problem.step_cost,
        "bound": found.bound,
        "bound_family": found.family,
        "status": plan.status,
        "solver": found.solver,
        "notes": list(found.notes),
    }


def _op_rows(plan: Decided, lines: tuple[OpLine, ...]) -> list[dict[str, Any]]:
    problem = plan.problem
    return [
        {"op": line.name, "aten": line.aten, "result": line.result,
         "bytes": sum(problem.tensors[t].bytes for t in op.outputs), "decision": decision, "id": line.id}
        for op, line, decision in zip(problem.ops, lines, plan.decisions, strict=True)
    ]  # fmt: skip


def encode_schedule(problem: Problem, schedule: Schedule, lines: tuple[OpLine, ...]) -> dict[str, Any]:
    """Which ops run again and where; every free in full only where it is not the earliest one possible."""
    names = [line.name for line in lines]
    recompute: list[dict[str, Any]] = []
    pending: list[str] = []
    seen: set[int] = set()
    for i in computes(schedule):
        if i in seen:
            pending.append(names[i])
        elif not problem.ops[i].optional and pending:
            recompute.append({"before": names[i], "run": pending})
            pending = []
        seen.add(i)
    compact = {"frees": "earliest", "recompute": recompute, "steps": []}
    if not pending and decode_schedule(problem, names, compact) == schedule:
        return compact
    steps = [f"{kind} {names[i] if kind == 'compute' else problem.tensors[i].name}" for kind, i in schedule]
    return {"frees": "listed", "recompute": [], "steps": steps}


def decode_schedule(problem: Problem, names: list[str], data: dict[str, Any]) -> Schedule:
    """Inverse of `encode_schedule`.

    Raises:
        KeyError: a name is unknown; ScheduleError: an op reads what no earlier op wrote, or a group is listed twice.
    """
    index = {name: i for i, name in enumerate(names)}
    if data["frees"] == "listed":
        tensors = {t.name: i for i, t in enumerate(problem.tensors)}
        parts = [step.split(" ", 1) for step in data["steps"]]
        places = {"compute": index, "free": tensors}
        return tuple(Step(kind, places[kind][name]) for kind, name in parts)
    runs: dict[int, list[int]] = {}
    for group in data["recompute"]:
        before = index[group["before"]]
        if before in runs or problem.ops[before].optional:
            raise ScheduleError(f"it lists twice what runs before {group['before']!r}, or runs nothing before that")
        runs[before] = [index[name] for name in group["run"]]
    return with_frees(problem, [j for i in problem.required() for j in (*runs.get(i, ()), i)])


def _checksum(data: dict[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(canonical({**data, "checksum": ""})).hexdigest()


def function_name(function: Any) -> str | None:
    if function is None:
        return None
    return printable(getattr(function, "__qualname__", type(function).__qualname__))


def read(path: str | os.PathLike[str]) -> PlanFile:
    """Parse and check a plan file, without a model.

    Raises:
        PlanFileError: the file is damaged, of another version, or no plan file; says what is wrong first.
    """
    data = read_json(path)
    file = PlanFile(os.fsdecode(path), data)
    if not isinstance(file.data, dict) or file.data.get("format") != FORMAT:
        raise file.error("format", f"not a plan file: its first key must be \"format\": {FORMAT!r}")
    version = file.data.get("version")
    if type(version) is not int or version != VERSION:
        raise file.error("version", f"its version is {_brief(version)}, this library reads version {VERSION}")
    if file.data.get("checksum") != _checksum(file.data):
        raise file.error("checksum", "damaged or edited: its content does not have the checksum that it states")
    if isinstance(data.get("options"), dict):
        data["options"] = {**SINCE, **data["options"]}
    _check_types(file)
    return file


def _check_types(file: PlanFile) -> None:
    known = {"format", "version", "checksum", *FIELDS, *LISTS}
    for key in (*FIELDS, *LISTS, *file.data):
        if key not in file.data or key not in known:
            raise file.error(key, f"the key {key!r} is {'missing' if key in known else 'unknown'}")
    for section, fields in FIELDS.items():
        _check_section(file, section, file[section], fields)
    row = dict(zip(OP_KEYS, (str, str, str, int, str, str), strict=True))
    for key in LISTS:
        if not isinstance(file[key], list):
            raise file.error(key, f"{key!r} must be a list")
    for i, op in enumerate(file["ops"]):
        _check_section(file, f"ops[{i}]", op, row)
    _check_strings(file, "tensors", file["tensors"])
    hints = file["options"]["hints"]
    _check_section(file, "options.hints", hints, dict.fromkeys(("save", "never_recompute", "recompute"), list))
    for kind, patterns in hints.items():
        _check_strings(file, f"options.hints.{kind}", patterns)
    for section, key in (("schedule", "steps"), ("result", "notes"), ("options", "differentiated"),
                         ("options", "regions")):  # fmt: skip
        _check_strings(file, f"{section}.{key}", file[section][key])
    for i, group in enumerate(file["schedule"]["recompute"]):
        _check_section(file, f"schedule.recompute[{i}]", group, {"before": str, "run": list})
        _check_strings(file, f"schedule.recompute[{i}].run", group["run"])
    if file["schedule"]["frees"] not in ("earliest", "listed"):
        raise file.error("schedule.frees", "'schedule.frees' must be 'earliest' or 'listed'")
    if file["options"]["on_new_shape"] not in ON_NEW_SHAPE:
        raise file.error("options.on_new_shape", f"'options.on_new_shape' must be one of {', '.join(ON_NEW_SHAPE)}")
    if file["options"]["gradients"] not in GRADIENTS:
        raise file.error("options.gradients", f"'options.gradients' must be one of {', '.join(GRADIENTS)}")
    held = file["options"]["hook_bytes"]
    _check_section(file, "options.hook_bytes", held, dict.fromkeys(held, int))
    _check_runs(file)


def _check_runs(file: PlanFile) -> None:
    """Bound what loading does: a schedule is rewritten and proved run by run."""
    schedule, count = file["schedule"], len(file["ops"])
    again = sum(len(group["run"]) for group in schedule["recompute"])
    again += max(0, sum(step.startswith("compute ") for step in schedule["steps"]) - count)
    limit = min(max(MAX_RUNS, 8 * count), count * count)
    if again > limit:
        raise file.error("schedule", f"its schedule runs {again:,} ops again; the limit for {count:,} ops is {limit:,}")


def _check_strings(file: PlanFile, name: str, values: list[Any]) -> None:
    if not all(isinstance(value, str) for value in values):
        raise file.error(name, f"{name!r} must hold strings only")


def _check_section(file: PlanFile, name: str, value: Any, fields: dict[str, Any]) -> None:
    if not isinstance(value, dict) or set(value) != set(fields):
        raise file.error(name, f"{name!r} must be an object with the keys {', '.join(fields)}")
    for key, kind in fields.items():
        found = value[key]
        wrong = isinstance(found, bool) is not (kind is bool) or not isinstance(found, kind)
        if wrong or (isinstance(found, int) and found < 0):
            expected = getattr(kind, "__name__", str(kind))
            raise file.error(f"{name}.{key}", f"'{name}.{key}' is {_brief(found)}, where {expected} is due")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
