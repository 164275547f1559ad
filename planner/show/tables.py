"""What was decided, as rows and pandas tables: by op, by module, and what is live at the peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from passes.trace.modules import ancestors, module_path
from planner.decided import Decided
from planner.files.fingerprint import describe_value, owner
from planner.timeline import with_category
from solvers.errors import MIB, PlannerError
from solvers.problem import Problem
from solvers.schedule import computes
from solvers.simulate import simulate

if TYPE_CHECKING:
    import pandas as pd



@dataclass(frozen=True)
class OpRow:
    """One op of the step.

    Attributes:
        name, module, aten, result: node name, module path, ATen op, dtypes and shapes.
        backward: whether it belongs to the backward.
        saved_bytes: what the forward keeps of its results for the backward.
        dropped_bytes: what the plain step would keep for the backward, and this plan computes again.
        cost, again_cost: of one run, and of all runs beyond the first, in the problem's unit.
        flops: of one run.
        runs: how often it runs.
        decision: in words.
    """

    name: str
    module: str
    aten: str
    result: str
    backward: bool
    saved_bytes: int
    dropped_bytes: int
    cost: int
    again_cost: int
    flops: int
    runs: int
    decision: str


@dataclass(frozen=True)
class LiveRow:
    """A tensor that is resident at the peak."""

    tensor: str
    module: str
    aten: str
    category: str
    bytes: int


@dataclass(frozen=True)
class ModuleRow:
    """Sums over the ops of a module and of all modules below it."""

    module: str
    depth: int
    ops: int
    saved_bytes: int
    dropped_bytes: int
    again_cost: int
    recomputed_ops: int


def op_rows(plan: Decided) -> tuple[OpRow, ...]:
    """A row per op, in the step's order."""
    prepared, problem, saved = plan.prepared, plan.problem, frozenset(plan.saved)
    runs = Counter(computes(plan.schedule))
    rows = []
    for i, (op, node) in enumerate(zip(problem.ops, prepared.lowered.nodes, strict=True)):
        profiled = None if node is None else prepared.profiles.get(node)
        kept = sum(problem.tensors[t].bytes for t in op.outputs if problem.tensors[t].name in saved)
        late = [problem.tensors[t] for t in op.outputs if i < problem.num_forward and _read_late(problem, t)]
        dropped = sum(t.bytes for t in late if t.name not in saved)
        rows.append(OpRow(
            name=op.name, module=module_path(owner(prepared, i)), aten="" if node is None else str(node.target),
            result="" if node is None else describe_value(node.meta.get("val")), backward=i >= problem.num_forward,
            saved_bytes=kept, dropped_bytes=dropped if runs[i] > 1 else 0, cost=op.cost,
            again_cost=op.cost * max(0, runs[i] - 1), flops=profiled.flops if profiled else 0, runs=runs[i],
            decision=plan.decisions[i],
        ))  # fmt: skip
    return tuple(rows)


def _read_late(problem: Problem, tensor: int) -> bool:
    return any(reader >= problem.num_forward for reader in problem.readers[tensor])


def module_rows(rows: tuple[OpRow, ...]) -> tuple[ModuleRow, ...]:
    """A row per module path, parents before children, in the order of the forward; the model itself is first."""
    found: dict[str, ModuleRow] = {}
    for row in rows:
        for path in ancestors(row.module):
            old = found.get(path) or ModuleRow(path, path.count(".") + bool(path), 0, 0, 0, 0, 0)
            found[path] = replace(
                old, ops=old.ops + (not row.backward), saved_bytes=old.saved_bytes + row.saved_bytes,
                dropped_bytes=old.dropped_bytes + row.dropped_bytes, again_cost=old.again_cost + row.again_cost,
                recomputed_ops=old.recomputed_ops + (row.runs > 1),
            )  # fmt: skip
    return tuple(sorted(found.values(), key=_tree_order([r.module for r in rows])))


def _tree_order(paths: list[str]) -> Any:
    """A sort key that keeps children under their parents, in order of first appearance."""
    seen: dict[str, int] = {}
    for path in paths:
        for ancestor in ancestors(path):
            seen.setdefault(ancestor, len(seen))
    return lambda row: [seen[a] for a in ancestors(row.module)]


def live_at_peak(plan: Decided) -> tuple[LiveRow, ...]:
    """What is resident at the peak besides static bytes, largest first; the running op's workspace included."""
    problem, schedule = plan.problem, plan.schedule
    peak = simulate(problem, schedule).peak_step
    held = [(copy, kind) for copy, kind in with_category(problem, schedule) if copy.made <= peak < copy.until]
    rows = []
    for copy, kind in held:
        node, tensor = plan.prepared.lowered.nodes[problem.producer[copy.tensor]], problem.tensors[copy.tensor]
        target = "" if node is None else str(node.target)
        rows.append(LiveRow(tensor.name, module_path(node), target, kind, tensor.bytes))
    op = problem.ops[schedule[peak].index]
    if op.workspace:
        node = plan.prepared.lowered.nodes[schedule[peak].index]
        rows.append(LiveRow(f"{op.name} (workspace)", module_path(node), "", "temporary", op.workspace))
    return tuple(sorted(rows, key=lambda r: (-r.bytes, r.tensor)))


# Names ----------------------------------------------------------------------------------------------------------------


def place(plan: Decided, label: str) -> str:
    """An op of the plan as people name it: `blocks.5.mlp.1/gelu_5`."""
    module = plan.graph.nodes[label]["module"]
    return f"{module}/{label}" if module else label


def within(path: str, module: str) -> bool:
    """Whether `path` is `module` or below it."""
    return not module or path == module or path.startswith(f"{module}.")


def unknown_module(plan: Decided, name: str) -> PlannerError:
    """Nothing is called `name`: say what is."""
    known = [r.module for r in module_rows(op_rows(plan)) if r.module and (r.saved_bytes or r.dropped_bytes)]
    near = get_close_matches(name, known, n=6) or [k for k in known if name.split(".")[-1] in k] or known
    more = f" and {len(near) - 6} more" if len(near) > 6 else ""
    shown = f"{', '.join(near[:6])}{more}"
    return PlannerError(f"no op of the step belongs to {name!r}; modules that save or recompute: {shown}.")


# Tables ---------------------------------------------------------------------------------------------------------------


def table_by_op(plan: Decided) -> pd.DataFrame:
    """A DataFrame with a row per op."""
    import pandas as pd

    step = plan.problem.step_cost or 1
    return pd.DataFrame([
        {"op": r.name, "module": r.module, "aten": r.aten, "result": r.result,
         "phase": "backward" if r.backward else "forward", "decision": r.decision, "runs": r.runs,
         "saved_mib": r.saved_bytes / MIB, "dropped_mib": r.dropped_bytes / MIB, "gflops": r.flops / 1e9,
         "cost_share": r.cost / step, "recompute_share": r.again_cost / step}
        for r in op_rows(plan)
    ])  # fmt: skip


def table_by_module(plan: Decided, depth: int | None = None) -> pd.DataFrame:
    """A DataFrame with a row per module, sums over everything below it; `depth` limits how deep (0: the model)."""
    import pandas as pd

    if depth is not None and not (isinstance(depth, int) and depth >= 0):
        raise PlannerError(f"depth={depth!r} is not a number of levels: 0 for the model alone, None for all of them.")
    step = plan.problem.step_cost or 1
    return pd.DataFrame([
        {"module": r.module or "(model)", "forward_ops": r.ops, "recomputed_ops": r.recomputed_ops,
         "saved_mib": r.saved_bytes / MIB, "dropped_mib": r.dropped_bytes / MIB, "recompute_share": r.again_cost / step}
        for r in module_rows(op_rows(plan)) if depth is None or r.depth <= depth
    ]).set_index("module")  # fmt: skip


def table_at_peak(plan: Decided) -> pd.DataFrame:
    """A DataFrame of the tensors resident at the peak, largest first."""
    import pandas as pd

    rows = [{"tensor": r.tensor, "module": r.module, "aten": r.aten, "category": r.category, "mib": r.bytes / MIB}
            for r in live_at_peak(plan)]  # fmt: skip
    return pd.DataFrame(rows, columns=["tensor", "module", "aten", "category", "mib"])


def tables(plan: Decided) -> dict[str, pd.DataFrame]:
    """All tables: `modules`, `ops`, `peak`."""
    return {"modules": table_by_module(plan), "ops": table_by_op(plan), "peak": table_at_peak(plan)}
