"""A decided step: what was chosen, what it costs, what is proved, and every figure that people look at.

Viewers, plan files and exports read this record; `Plan` is it with a module and verbs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx
import torch
from torch import nn

from passes._torch import local_parts
from passes.leaves import cast_often
from passes.rewrite import Rewritten
from passes.run.step import Fallback, Step
from passes.trace.carried import put_state
from passes.trace.given import deliver
from passes.trace.settings import set_again
from solvers.errors import PlannerError
from solvers.problem import Problem
from solvers.schedule import Schedule, computes, plain_order, with_frees
from solvers.solution import Solution

from .arena import NOTHING, Reservation
from .check.record import NOT_RUN, Checked
from .footprint import Footprint
from .hints import hint_notes
from .op_graph import op_graph
from .optimizer import NO_UPDATE
from .prepared import Prepared
from .timeline import Timeline, timeline, with_category
from .units import show_bytes


@dataclass(frozen=True)
class PlannedRun:
    """One run of a region: the module's path, which call of it this is, how it and its state look, what was decided."""

    path: str
    number: int
    key: Any
    state: tuple[Any, ...]
    planned: Decided


@dataclass(frozen=True, eq=False, repr=False)
class Decided:
    """A decided and proved step.

    Attributes:
        prepared: the step before the decision.
        solution: what the solver answered.
        halves: the proved halves, and what runs them; None for a step by regions, which has `runs`.
        budget_bytes: the peak asked for (None: no limit).
        seconds: how long each stage took.
        checked: what was compared with the plain model by running both, over how many steps, or why nothing was.
        runs: the runs of regions, each decided and proved; none where the step is planned as a whole.
        compiled: whether Inductor made what runs the halves (`Plan.compile`).
        reservation: what the device's caching allocator is asked for besides what the step needs.
        plain: whether regions run as they are, as nothing is computed again and the plain step holds no more.
    """

    prepared: Prepared
    solution: Solution
    halves: tuple[Rewritten, Step] | None
    budget_bytes: int | None
    seconds: dict[str, float]
    checked: Checked = NOT_RUN
    runs: tuple[PlannedRun, ...] = ()
    compiled: bool = False
    reservation: Reservation = NOTHING
    plain: bool = False

    @property
    def cost_name(self) -> str:
        """What recompute is measured in."""
        return self.prepared.options.cost_name

    @property
    def rewritten(self) -> Rewritten:
        """The proved halves of a step planned as a whole."""
        return self._halves()[0]

    @property
    def step(self) -> Step:
        """What runs them."""
        return self._halves()[1]

    def _halves(self) -> tuple[Rewritten, Step]:
        if self.halves is None:
            raise PlannerError(
                "this step is planned by regions, so it has no two halves: each of its `runs` has, and the code "
                "between them is the model's own."
            )
        return self.halves

    @property
    def problem(self) -> Problem:
        """The step as the solvers saw it."""
        return self.prepared.problem

    @property
    def schedule(self) -> Schedule:
        """Every compute and free of the planned step, in order."""
        return self.solution.schedule

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the planned step, everything in `budget_bytes`' meaning included.

        In a pipeline with all micro-batches in flight; `schedule`, `timeline` and the views show one of them.
        """
        own = self.solution.peak_bytes if self.footprint is None else self.footprint.allocated_bytes
        return own + self.prepared.others_bytes(self.schedule)

    @property
    def reserved_bytes(self) -> int | None:
        """Predicted `torch.cuda.max_memory_reserved`; None where no caching allocator is simulated (the CPU)."""
        return None if self.footprint is None else self.footprint.reserved_bytes

    @cached_property
    def footprint(self) -> Footprint | None:
        """What the device's caching allocator makes of the schedule."""
        return self.prepared.footprint(self.schedule, self.reservation)

    @property
    def baseline_peak_bytes(self) -> int:
        """Predicted peak with no recompute."""
        return self.prepared.baseline_peak_bytes

    @property
    def static_bytes(self) -> int:
        """Parameters, buffers and inputs, and what was reserved: resident throughout."""
        return self.problem.static_bytes

    @property
    def overhead(self) -> float:
        """Recompute cost over the cost of the plain step (0.07 = 7 %)."""
        return self.problem.overhead(self.solution.added_cost)

    @property
    def bound(self) -> float | None:
        """Proved lower bound on `overhead` within `bound_family`, or None."""
        bound = self.solution.bound
        return None if bound is None else self.problem.overhead(bound)

    @property
    def bound_family(self) -> str:
        """The schedules over which `bound` is proved."""
        return self.solution.family

    @property
    def status(self) -> str:
        """`optimal` (proved) or `feasible`."""
        return self.solution.status.value

    @property
    def solver(self) -> str:
        """Who answered."""
        return self.solution.solver

    @property
    def notes(self) -> tuple[str, ...]:
        """Hints in force, fallbacks taken and limits hit."""
        prepared = self.prepared
        told = (*prepared.options.assumptions(prepared.device), *prepared.options.notes, *prepared.traced.notes)
        own = (*hint_notes(prepared.hinted), *self._region_notes, *self.solution.notes)
        return (*told, *own, *self._loop_notes)

    @property
    def _region_notes(self) -> tuple[str, ...]:
        """That a step is planned by regions, and why."""
        regions = self.prepared.regions
        if regions is None:
            return ()
        count = len(dict.fromkeys(path for path, _ in regions.paths))
        found = f"planned by {count} region{'s' if count > 1 else ''}, the rest runs in eager (see plan.regions)"
        whole = regions.eager.get("")
        if self.plain:
            found += "; as nothing is computed again, and the plain step holds no more, they run as they are"
        return (found if whole is None else f"{found}, as the model cannot be planned as a whole: {whole}",)

    @property
    def _loop_notes(self) -> tuple[str, ...]:
        """The whole loop where an optimizer is counted: forward, backward, step."""
        update, prepared = self.prepared.options.update, self.prepared
        if update == NO_UPDATE:
            return ()
        line, count = self.timeline, len(self.timeline.labels) - bool(prepared.update_peak_bytes)
        halves = line.total[: line.backward_from], line.total[line.backward_from : count]
        forward, backward = (show_bytes(max(half, default=0)) for half in halves)
        if prepared.options.gradients == "consumed":
            held = show_bytes(max(update.hook_bytes.values(), default=0))
            return (
                f"the whole loop: forward {forward}, backward with an optimizer in its hooks {backward} (state "
                f"{show_bytes(update.state_bytes)}, temporaries up to {held})",
            )
        return (
            f"the whole loop: forward {forward}, backward {backward}, optimizer.step() "
            f"{show_bytes(prepared.update_peak_bytes or line.total[-1])} (state {show_bytes(update.state_bytes)}, "
            f"temporaries {show_bytes(update.step_bytes)})",
        )

    def run(
        self, model: nn.Module, primals: Sequence[torch.Tensor], fallback: Fallback, bound: Mapping[str, Any],
        sources: Sequence[torch.Tensor] | None = None,
    ) -> Any:  # fmt: skip
        """Run the planned step on parameters, buffers and inputs; its output, built like the model's.

        Args:
            model: has the parameters and buffers; attributes that forward sets are set there.
            bound: the call's arguments, some of which forward may change.
            sources: as for `Step`.
        """
        traced = self.prepared.traced
        results = self.step(local_parts(primals, traced.spread), fallback, sources, primals)
        leaves = [primals[leaf.input] if leaf.input is not None else results[leaf.index] for leaf in traced.outputs]
        set_again(traced.settings, model, leaves)
        output = deliver(traced.changes, leaves, bound, traced.output_template, model)
        put_state(model, bound)
        return output

    @cached_property
    def step_flops(self) -> int:
        """FLOPs of the plain step, by torch's registry."""
        return sum(p.flops for p in self.prepared.profiles.values())

    @cached_property
    def recompute_flops(self) -> int:
        """FLOPs of the recomputes, by torch's registry."""
        lowered, profiles = self.prepared.lowered, self.prepared.profiles
        return sum(profiles[n].flops for i in self._repeats for n in [lowered.nodes[i]] if n is not None)

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Names of the tensors that the forward hands to the backward."""
        if self.halves is not None:
            return self.rewritten.saved_names
        crossing = (c for c, kind in with_category(self.problem, self.schedule) if kind == "saved")
        return tuple(dict.fromkeys(self.problem.tensors[c.tensor].name for c in crossing))

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the ops that run again, in the order of their first repeat."""
        return tuple(dict.fromkeys(self.problem.ops[i].name for i in self._repeats))

    @cached_property
    def decisions(self) -> tuple[str, ...]:
        """Per op what happens to it: saved, recomputed (how often), both, run once, or run in the backward."""
        runs, saved = Counter(computes(self.schedule)), frozenset(self.saved)
        return tuple(_decision(self.problem, i, runs[i], saved) for i in range(len(self.problem.ops)))

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The ops of the step: bytes, flops, cost, workspace, decision, module path per node."""
        return op_graph(self.prepared, frozenset(self.recomputed), frozenset(self.saved))

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes at every step, by category."""
        return timeline(self.problem, self.schedule)

    @cached_property
    def baseline_timeline(self) -> Timeline:
        """The same for the step without recompute."""
        return timeline(self.problem, with_frees(self.problem, plain_order(self.problem)))

    @cached_property
    def cast_often(self) -> list[int]:
        """The inputs that a call may not have as leaves: `passes.leaves.cast_often`."""
        return cast_often(self.prepared.traced)

    @cached_property
    def _repeats(self) -> tuple[int, ...]:
        seen: set[int] = set()
        repeats = []
        for i in computes(self.schedule):
            if i in seen:
                repeats.append(i)
            seen.add(i)
        return tuple(repeats)


def _decision(problem: Problem, i: int, runs: int, saved: frozenset[str]) -> str:
    if i >= problem.num_forward:
        return "backward"
    words = ["saved"] if any(problem.tensors[t].name in saved for t in problem.ops[i].outputs) else []
    words += [f"recomputed {runs - 1}x"] if runs > 1 else []
    words += ["left out"] if runs == 0 else []
    return ", ".join(words) or "once"
