"""`Plan`: what was decided, what it costs, what is proved, and the module that runs it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
from torch import nn

from passes.alias import is_compute
from passes.trace.modules import module_path
from solvers.errors import MIB
from solvers.problem import Problem
from solvers.schedule import Schedule, computes

from .check.record import NOT_RUN, Checked
from .dropin.module import PlannedModule
from .hints import hint_notes
from .pipeline import Planned
from .show.timeline import Timeline, timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A proved plan for one training step.

    Attributes:
        module: the drop-in `torch.fx.GraphModule`.
        budget_bytes: the peak asked for (None: no limit).
        planned: everything the plan was made from.
        checked: what was compared with the plain model by running both, over how many steps, or why nothing was.
    """

    module: PlannedModule
    budget_bytes: int | None
    planned: Planned
    cost_name: str
    checked: Checked = NOT_RUN

    @property
    def problem(self) -> Problem:
        """The step as the solvers saw it."""
        return self.planned.prepared.lowered.problem

    @property
    def schedule(self) -> Schedule:
        """Every compute and free of the planned step, in order."""
        return self.planned.solution.schedule

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the planned step, everything in `budget_bytes`' meaning included."""
        return self.planned.solution.peak_bytes

    @property
    def baseline_peak_bytes(self) -> int:
        """Predicted peak with no recompute."""
        return self.planned.prepared.baseline_peak_bytes

    @property
    def static_bytes(self) -> int:
        """Parameters, buffers and inputs, and what was reserved: resident throughout."""
        return self.problem.static_bytes

    @property
    def overhead(self) -> float:
        """Recompute cost over the cost of the plain step (0.07 = 7 %)."""
        return self.problem.overhead(self.planned.solution.added_cost)

    @property
    def bound(self) -> float | None:
        """Proved lower bound on `overhead` within `bound_family`, or None."""
        bound = self.planned.solution.bound
        return None if bound is None else self.problem.overhead(bound)

    @property
    def bound_family(self) -> str:
        """The schedules over which `bound` is proved."""
        return self.planned.solution.family

    @property
    def status(self) -> str:
        """`optimal` (proved) or `feasible`."""
        return self.planned.solution.status.value

    @property
    def solver(self) -> str:
        """Who answered."""
        return self.planned.solution.solver

    @property
    def notes(self) -> tuple[str, ...]:
        """Hints in force, fallbacks taken and limits hit."""
        prepared = self.planned.prepared
        return (*hint_notes(prepared.hinted), *prepared.traced.notes, *self.planned.solution.notes)

    @property
    def seconds(self) -> dict[str, float]:
        """How long each stage took."""
        return self.planned.seconds

    @cached_property
    def step_flops(self) -> int:
        """FLOPs of the plain step, by torch's registry."""
        return sum(p.flops for p in self.planned.prepared.profiles.values())

    @cached_property
    def recompute_flops(self) -> int:
        """FLOPs of the recomputes, by torch's registry."""
        lowered, profiles = self.planned.prepared.lowered, self.planned.prepared.profiles
        return sum(profiles[n].flops for i in self._repeats for n in [lowered.nodes[i]] if n is not None)

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Names of the tensors that the forward hands to the backward."""
        return self.planned.rewritten.saved_names

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the ops that run again, in the order of their first repeat."""
        return tuple(dict.fromkeys(self.problem.ops[i].name for i in self._repeats))

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The ops of the step: bytes, flops, cost, workspace, decision, module path per node."""
        return _op_graph(self.planned, frozenset(self.recomputed), frozenset(self.saved))

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes at every step, by category."""
        return timeline(self.problem, self.schedule)

    @cached_property
    def baseline_timeline(self) -> Timeline:
        """The same for the step without recompute."""
        from solvers.schedule import plain_order, with_frees

        return timeline(self.problem, with_frees(self.problem, plain_order(self.problem)))

    @cached_property
    def _repeats(self) -> tuple[int, ...]:
        seen: set[int] = set()
        repeats = []
        for i in computes(self.schedule):
            if i in seen:
                repeats.append(i)
            seen.add(i)
        return tuple(repeats)

    def __repr__(self) -> str:
        return describe(self)

    def __str__(self) -> str:
        from .show.text import to_text

        return to_text(self)

    # Run ----------------------------------------------------------------------------------------------------------

    def apply(self, model: nn.Module | None = None, sample: Any = None) -> nn.Module:
        """Make `model` (by default the planned one) itself run the plan in training; returns it.

        Its class, methods, `state_dict`, hooks and identity stay; `remove` undoes it. `sample` is asked for when the
        model is another instance than the planned one and its Python asks about its inputs' values.

        Raises:
            ModelMismatch: the plan is for another model; says what differs first.
            PlannerError: the model runs another plan already.
        """
        from .dropin.apply import apply

        return apply(self, model, sample)

    def remove(self, model: nn.Module | None = None) -> nn.Module:
        """Undo `apply` without a trace; returns the model.

        Raises:
            PlannerError: the model does not run this plan.
        """
        from .dropin.apply import remove

        return remove(self, model)

    def check(self, model: nn.Module | None = None, sample: Any = None) -> Checked:
        """Run two steps of `model` (by default the planned one) on `sample`, plain and planned, and compare them.

        Everything that can be observed must be equal bit for bit; the model is left as it was. The result is also
        what `plan.checked` says from then on.

        Raises:
            CheckError: something differs (names the first op, gradient or output and the likely cause), or no step
                can be run.
            PlannerError: the plan has not been made for such a sample.
        """
        from .check.plan import check_plan

        found = check_plan(self, model, sample)
        object.__setattr__(self, "checked", found)
        return found

    # See ----------------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        from .show.page import repr_html

        return repr_html(self)

    def plot(self, width: float = 9.0, height: float = 4.6) -> Figure:
        """The memory curve of the step, plain against planned, as a matplotlib figure (inches)."""
        from .show.plots import plot

        return plot(self, width, height)

    def plot_graph(self, module: str | None = None) -> Figure:
        """The module tree, or one block's ops as a graph, saved and recomputed coloured."""
        from .show.plots import plot_graph

        return plot_graph(self, module)

    def tables(self) -> dict[str, pd.DataFrame]:
        """DataFrames `modules`, `ops` and `peak`."""
        from .show.tables import tables

        return tables(self)

    def table_by_module(self, depth: int | None = None) -> pd.DataFrame:
        """Bytes saved, bytes dropped and recompute cost by module path, down to `depth`."""
        from .show.tables import table_by_module

        return table_by_module(self, depth)

    def table_by_op(self) -> pd.DataFrame:
        """The same, and more, by op."""
        from .show.tables import table_by_op

        return table_by_op(self)

    def explain(self, name: str = "") -> str:
        """Why the tensors of a module (or op) are saved or recomputed, and what binds at the peak."""
        from .show.explain import explain

        return explain(self, name)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page that opens offline, with hover and zoom on the memory curve."""
        from .show.report import report

        return report(self, path)

    # Keep ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON (`planner.files.planfile`): readable, deterministic, atomic."""
        from .files.planfile import save

        return save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module, sample: Any, **options: Any) -> Plan:
        """Apply a saved plan: capture, compare, re-prove and rewrite, without solving.

        `options` are those of `planner.files.planfile.load`: `loss_fn`, `cost`, `progress`.

        Raises:
            PlanFileError: the file is damaged or for another model or sample; says what differs first.
        """
        from .files.planfile import load

        return load(path, model, sample, **options)

    # Ship ---------------------------------------------------------------------------------------------------------

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the planned step as a folder that runs with torch and safetensors alone (`planner.ship.export`)."""
        from .ship.export import export

        return export(self, path)


def describe(plan: Plan) -> str:
    """The verdict in a few lines of text."""
    budget = "no budget" if plan.budget_bytes is None else f"budget {plan.budget_bytes / MIB:,.1f} MiB"
    bound = "no bound proved" if plan.bound is None else f"proved bound {plan.bound:.2%}"
    lines = [
        f"Plan ({plan.status}, solver {plan.solver}): {budget}, peak {plan.peak_bytes / MIB:,.1f} MiB, "
        f"plain {plan.baseline_peak_bytes / MIB:,.1f} MiB, static {plan.static_bytes / MIB:,.1f} MiB",
        f"  recompute {plan.overhead:.2%} of the step's cost ({plan.cost_name}), {bound}; "
        f"{len(plan.saved)} tensors saved, {len(plan.recomputed)} of {plan.problem.num_forward} forward ops recomputed",
    ]
    if not plan.recomputed:
        lines.append("  nothing is recomputed: the plain step fits")
    lines += [f"  note: {note}" for note in plan.notes]
    lines.append(f"  {plan.checked.line}")
    return "\n".join(lines)


def _op_graph(planned: Planned, recomputed: frozenset[str], saved: frozenset[str]) -> nx.DiGraph:
    lowered = planned.prepared.lowered
    problem = lowered.problem
    graph = nx.DiGraph()
    for i, op in enumerate(problem.ops):
        node = lowered.nodes[i]
        names = [problem.tensors[t].name for t in op.outputs]
        decision = (
            "recompute" if op.name in recomputed else "save" if any(n in saved for n in names)
            else "forward" if i < problem.num_forward else "backward"
        )  # fmt: skip
        profiled = planned.prepared.profiles.get(node) if node is not None else None
        graph.add_node(
            op.name, index=i, bytes=sum(problem.tensors[t].bytes for t in op.outputs), cost=op.cost,
            flops=profiled.flops if profiled else 0, workspace=op.workspace, decision=decision,
            seconds=profiled.seconds if profiled else None, op=str(node.target) if node is not None else op.name,
            module=module_path(node) if node is not None else "", backward=i >= problem.num_forward,
        )  # fmt: skip
        for t in op.inputs:
            graph.add_edge(problem.ops[problem.producer[t]].name, op.name, tensor=problem.tensors[t].name)
    assert all(is_compute(n) for n in lowered.nodes if n is not None)
    return graph
