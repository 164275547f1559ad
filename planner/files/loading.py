"""loading: a plan again, of a plan file, a model and a sample."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from passes.errors import NoBackward
from passes.printable import brief
from passes.rates import is_cost
from passes.trace.arguments import bind_sample
from planner.decided import Decided
from planner.hints import make_hints
from planner.optimizer import Update
from planner.options import WHOLE, Options
from planner.pipeline import emit, plain_if_as_good, prepare_step
from planner.prepared import Prepared, check_model
from planner.progress import Progress
from planner.ranks.wrapper import check_wrapper, in_turn, inner_module, wrapper_bytes, wrapper_gradients
from planner.regions.losses import LOSS
from solvers.errors import MIB, ScheduleError
from solvers.schedule import Schedule
from solvers.solution import Solution, solution

from .fingerprint import fingerprint, op_lines, tensor_lines
from .planfile import TORCH_RELEASE, PlanFile, decode_schedule, function_name, problem_digest, read


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    sample: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    cost: str | Callable[..., float] | None = None,
    progress: bool | None = None,
) -> tuple[Decided, dict[str, Any]]:
    """Apply a saved plan to `model`: capture it, compare, re-prove and rewrite; nothing is solved.

    Returns the decided step, and the arguments by name that it was captured with.

    Args:
        sample, loss_fn: as they were when the plan was made.
        cost: the callable that the plan was made with, where it was one.

    Raises:
        PlanFileError: the file is damaged, or is for another model or sample; says what differs first.
        CaptureError, Unsupported: the model cannot be planned.
    """
    file = read(path)
    _check_loss(file, loss_fn)
    check_wrapper(model)
    options = replace(
        _options(file, loss_fn, cost, progress), wrapper_bytes=wrapper_bytes(model), in_turn=in_turn(model),
        gradients=wrapper_gradients(model, file["options"]["gradients"]),
    )  # fmt: skip
    model = inner_module(model)
    check_model(model)
    shown = Progress(progress)
    expected = tuple(file["options"]["differentiated"])
    arguments = bind_sample(model, sample, loss_fn)
    try:
        prepared = prepare_step(model, arguments, options, shown, differentiated=expected)
    except NoBackward as error:
        starts = ", ".join(path or "the output" for path in expected)
        raise file.error("differentiated", f"another model: its backward does not start from {starts}") from error
    _check_model(file, prepared)
    decided = emit(prepared, _solution(file, prepared), file["options"]["budget_bytes"], shown)
    return plain_if_as_good(model, arguments, decided), arguments


def _check_loss(file: PlanFile, loss_fn: Callable[..., Any] | None) -> None:
    recorded, given = file["options"]["loss_fn"], function_name(loss_fn)
    if (recorded is None) != (given is None):
        due = "without a loss_fn" if recorded is None else f"with loss_fn={recorded}"
        raise file.error("loss_fn", f"made {due}; got loss_fn={given}. Pass the same loss_fn to load.")


def _options(file: PlanFile, loss_fn: Any, cost: Any, progress: bool | None) -> Options:
    saved = file["options"]
    paths = [path for path in saved["regions"] if path != LOSS]  # which is always one, where there is a large one
    recorded = saved["cost"] if is_cost(saved["cost"]) else "roofline"
    return Options(
        cost=cost if cost is not None else recorded, loss_fn=loss_fn, reserve_bytes=saved["reserve_bytes"],
        progress=progress, on_new_shape=saved["on_new_shape"], keep_outputs=saved["keep_outputs"],
        hints=make_hints(**saved["hints"]), gradients=saved["gradients"],
        update=Update(saved["state_bytes"], saved["step_bytes"], saved["hook_bytes"]), device=saved["device"],
        regions=WHOLE if saved["regions"] == [WHOLE] else tuple(glob.escape(path) for path in paths),
    )  # fmt: skip


def _check_model(file: PlanFile, prepared: Prepared) -> None:
    """Say what differs first between the file's step and the captured one."""
    rows = [tuple(op[k] for k in ("op", "aten", "result", "id")) for op in file["ops"]]
    lines = [(line.name, line.aten, line.result, line.id) for line in op_lines(prepared)]
    if prepared.regions is not None:  # what runs between regions is the model's own: sharded, it gathers and reduces
        rows, lines = ([row for row in both if row[1]] for both in (rows, lines))
    if fingerprint(prepared.traced) == file["model"]["fingerprint"] and rows == lines:
        return
    model = file["model"]
    made = f"(the plan was made for {model['class']} with torch {model['torch']}; this is {TORCH_RELEASE})"
    if file["model"]["device"] != prepared.device.type:
        raise file.error("device", f"planned on {file['model']['device']}, the model is on {prepared.device.type}")
    for i, (old, new) in enumerate(_pairs(file["tensors"], tensor_lines(prepared.traced))):
        if old != new:
            raise file.error("tensors", f"another model or sample: tensor {i} is {new}, the plan has {old} {made}")
    if fingerprint(prepared.traced) == file["model"]["fingerprint"] and _kernels(rows) == _kernels(lines):
        raise file.error("ops", f"its gradients leave the backward elsewhere than here: plan anew {made}")
    for i, (before, after) in enumerate(_pairs(rows, lines)):
        if before != after:
            raise file.error("ops", f"another model: op {i} is {_op(after)}, the plan has {_op(before)} {made}")
    raise file.error("fingerprint", f"another model: its outputs or constants differ {made}")


def _kernels(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows of ops that run a kernel, whatever their order; the others stand for what autograd does."""
    return sorted(row for row in rows if row[1])


def _pairs(old: Any, new: Any) -> list[tuple[Any, Any]]:
    count = max(len(old), len(new))
    return [(old[i] if i < len(old) else None, new[i] if i < len(new) else None) for i in range(count)]


def _op(line: tuple[str, ...] | None) -> str:
    return "none" if line is None else f"{line[0]} = {line[1]} -> {line[2]} [{line[3]}]"


def _solution(file: PlanFile, prepared: Prepared) -> Solution:
    problem, saved = prepared.lowered.problem, file["result"]
    schedule = _schedule(file, prepared)
    same = problem_digest(problem) == file["model"]["problem"]
    if same:
        note = _stated_bound(saved)
    else:
        note = "bytes or costs of ops differ from the machine the plan was made on; its bound was dropped"
    try:
        found = solution(problem, schedule, saved["solver"])
    except ScheduleError as error:
        raise file.error("schedule", f"its schedule is not valid: {brief(error)}") from error
    notes = [*saved["notes"], *([note] if note and found.added_cost else [])]
    found = replace(found, notes=tuple(dict.fromkeys(notes)))
    budget = file["options"]["budget_bytes"]
    if budget is not None and found.peak_bytes > budget:
        sizes = f"{found.peak_bytes / MIB:,.1f} MiB here, over its budget of {budget / MIB:,.1f} MiB"
        around = prepared.options.wrapper_bytes
        buckets = (
            f", with {around / MIB:,.1f} MiB of DistributedDataParallel, which the plan's reserve_mb may have counted: "
            "load it for model.module, and wrap plan.module, or"
        )  # fmt: skip
        said = buckets if found.peak_bytes - around <= budget else ":"
        raise file.error("peak_bytes", f"the planned step peaks at {sizes}{said} plan anew on this machine")
    if same and found.peak_bytes != saved["peak_bytes"]:
        stated = f"{saved['peak_bytes']} bytes"
        raise file.error("peak_bytes", f"states a peak of {stated}, its schedule has {found.peak_bytes}")
    return found


def _stated_bound(result: dict[str, Any]) -> str:
    """What the file says of its bound, which is not proved again here."""
    if result["bound"] is None:
        return ""
    share = min(result["bound"], result["added_cost"]) / (result["step_cost"] or 1)
    family = f" ({result['bound_family']})" if result["bound_family"] else ""
    return f"by the plan file, {result['status']}: a bound of {share:.2%}{family}; loading proves none"


def _schedule(file: PlanFile, prepared: Prepared) -> Schedule:
    names = [line.name for line in op_lines(prepared)]
    try:
        return decode_schedule(prepared.lowered.problem, names, file["schedule"])
    except (KeyError, TypeError, ValueError) as error:
        raise file.error("schedule", f"its schedule names what is not in the step: {brief(error)}") from error
    except ScheduleError as error:
        raise file.error("schedule", f"its schedule is not valid: {brief(error)}") from error
