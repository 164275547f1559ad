"""Why a tensor is saved or recomputed, and what binds at the peak, in sentences."""

from __future__ import annotations

from passes.ops import must_run_once
from planner.decided import Decided
from planner.units import show_bytes
from solvers.schedule import computes, with_frees
from solvers.simulate import simulate

from . import regions
from .tables import OpRow, live_at_peak, op_rows, place, unknown_module, within

SHOWN = 40


def explain(plan: Decided, name: str = "") -> str:
    """The decisions for a module path (`transformer.h.3.mlp`), an op's name (`addmm_3`), or the whole model ("").

    Raises:
        PlannerError: nothing of that name is in the step.
    """
    rows = [(i, r) for i, r in enumerate(op_rows(plan)) if not r.backward and r.aten]
    chosen = [(i, r) for i, r in rows if r.name == name or within(r.module, name)]
    if not chosen:
        raise unknown_module(plan, name)
    lines = [_summary(plan, name, [r for _, r in chosen])]
    told = [line for i, r in chosen if (line := _sentence(plan, i, r))]
    lines += [f"- {line}" for line in told[:SHOWN]]
    if len(told) > SHOWN:
        lines.append(f"- ... and {len(told) - SHOWN} more: name a module or an op to see them.")
    if not name:
        lines += ["", *regions.lines(plan)]
    return "\n".join([*lines, "", *at_peak(plan)])


def _static(plan: Decided) -> str:
    """What is resident throughout."""
    prepared = plan.prepared
    gradients = ", gradients from before" if prepared.lowered.accumulated_bytes else ""
    aside = ", what was set aside" if prepared.options.set_aside_bytes else ""
    return f"parameters, buffers{gradients}{aside} and inputs"


def at_peak(plan: Decided, count: int = 6) -> list[str]:
    """What binds at the peak, one line each."""
    step, label, size = plan.timeline.peak
    phase = "backward" if step >= plan.timeline.backward_from else "forward"
    first = f"The peak of {show_bytes(size)} is in the {phase}, at {place(plan, label)}"
    if plan.budget_bytes is not None:
        first += f"; {show_bytes(plan.budget_bytes - size)} of the budget are left"
    lines = [f"{first}. Resident then:", f"- {show_bytes(plan.static_bytes)} {_static(plan)}"]
    live = live_at_peak(plan)
    for row in live[:count]:
        where = f" of {row.module}" if row.module else ""
        lines.append(f"- {show_bytes(row.bytes)} {row.tensor}{where} ({row.category})")
    rest = live[count:]
    if rest:
        lines.append(f"- {show_bytes(sum(r.bytes for r in rest))} in {len(rest)} smaller tensors")
    return lines


def _summary(plan: Decided, name: str, rows: list[OpRow]) -> str:
    saved, dropped = sum(r.saved_bytes for r in rows), sum(r.dropped_bytes for r in rows)
    again = sum(r.again_cost for r in rows) / (plan.problem.step_cost or 1)
    return (
        f"{name or 'The model'}: {show_bytes(saved)} saved for the backward, {show_bytes(dropped)} dropped and "
        f"recomputed at {again:.2%} of the step's cost."
    )


def _sentence(plan: Decided, i: int, row: OpRow) -> str:
    if row.runs > 1:
        return f"{_named(row)}: {_why_recomputed(plan, i, row)}"
    if row.saved_bytes:
        return f"{_named(row)}: {_why_saved(plan, i, row)}"
    return ""


def _named(row: OpRow) -> str:
    prefix = f"{row.module}/" if row.module else ""
    return f"{prefix}{row.name} ({row.aten}, {row.result})"


def _why_recomputed(plan: Decided, i: int, row: OpRow) -> str:
    before = _next_first_run(plan, i)
    share = row.again_cost / (plan.problem.step_cost or 1)
    text = f"recomputed before {before}, which costs {share:.2%} of the step. "
    kept = peak_if_kept(plan, i)
    over = plan.budget_bytes is not None and kept > plan.budget_bytes
    room = "over the budget" if over else "which fits too: another plan could keep it"
    if hint := _hint(plan, i):
        text += f"The hint {hint} prefers that. "
        room = room if over else "which fits too"
    return text + f"Kept instead, the step would peak at {show_bytes(kept)}, {room}."


def peak_if_kept(plan: Decided, i: int) -> int:
    """Peak in bytes of the same schedule with every run of op `i` but the first left out."""
    order, seen = [], False
    for j in computes(plan.schedule):
        if j != i or not seen:
            order.append(j)
        seen = seen or j == i
    return simulate(plan.problem, with_frees(plan.problem, order)).peak_bytes


def _hint(plan: Decided, i: int) -> str:
    """The hint that names op `i`, as the user wrote it; "" for none."""
    prepared = plan.prepared
    node = prepared.lowered.nodes[i]
    return str(prepared.hinted[node]) if node is not None and node in prepared.hinted else ""


def _next_first_run(plan: Decided, i: int) -> str:
    """The op of the step that follows the first recompute of op `i`."""
    seen: set[int] = set()
    waiting = False
    for j in computes(plan.schedule):
        if j not in seen and waiting and not plan.problem.ops[j].optional:
            return place(plan, plan.problem.ops[j].name)
        waiting = waiting or (j == i and i in seen)
        seen.add(j)
    return "the end"


def _why_saved(plan: Decided, i: int, row: OpRow) -> str:
    problem, lowered = plan.problem, plan.prepared.lowered
    readers = [j for t in problem.ops[i].outputs for j in problem.readers[t] if j >= problem.num_forward]
    reader = f", read by {place(plan, problem.ops[readers[0]].name)}" if readers else ", read by recomputes"
    node = lowered.nodes[i]
    reason = None if node is None else must_run_once(node, plan.prepared.options.target(plan.prepared.device))
    if not problem.ops[i].recomputable:
        hint = _hint(plan, i)
        returned = "a region's result is computed once" if plan.prepared.regions else ""
        because = reason or (f"the hint {hint}" if hint else returned or "it reads what the forward changes")
        return f"{show_bytes(row.saved_bytes)} saved{reader}: it may not run again ({because})."
    share = row.cost / (problem.step_cost or 1)
    text = f"{show_bytes(row.saved_bytes)} saved{reader}: computing it again would cost {share:.2%} of the step."
    if hint := _hint(plan, i):
        text += f" The hint {hint} prefers to drop it, but the budget leaves no room for that."
    return text

