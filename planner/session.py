"""One captured step, many plans: capture and profile once, then solve for any number of budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from passes.errors import ForwardFailed
from passes.exclusive import turn
from passes.trace.arguments import bind_sample, runs_hooks
from passes.trace.refuse import is_sharded
from passes.trace.structure import Bound
from solvers.minimum import Minimum
from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.solution import Solution

from .budget import reserve_to_bytes
from .hints import make_hints
from .optimizer import measure_update
from .options import Options
from .pipeline import decide_step, prepare_step
from .plan import Plan
from .preference import smallest_placed, solve_step
from .prepared import Prepared, check_model, model_device
from .progress import Progress
from .ranks.flight import flight_of
from .ranks.wrapper import (
    check_wrapper,
    in_turn,
    inner_module,
    unsent_bytes,
    wrapper_bytes,
    wrapper_gradients,
    wrapper_notes,
)


@dataclass(frozen=True, eq=False)
class Session:
    """A captured and profiled step of `model`, called with `arguments`, before any decision."""

    model: nn.Module
    arguments: Bound
    prepared: Prepared
    progress: Progress

    @property
    def problem(self) -> Problem:
        """The step as the solvers see it."""
        return self.prepared.problem

    @property
    def plain_peak_bytes(self) -> int:
        """Predicted peak with no recompute."""
        return self.prepared.baseline_peak_bytes

    def minimum(self) -> Minimum:
        """The smallest peak known to work, and the proved floor."""
        with self.progress.stage("minimum"):
            found = smallest_placed(self.prepared)
        needed, others = self.prepared.footprint(found.schedule), self.prepared.others_bytes(found.schedule)
        own = found.minimum_bytes if needed is None else needed.allocated_bytes
        return replace(found, minimum_bytes=own + others)

    def solve(
        self, budget_bytes: int | None, *, solver: str | None = None, warm_starts: tuple[Schedule, ...] = ()
    ) -> Solution:
        """The cheapest schedule found for `budget_bytes` (None: no limit), no dearer than a warm start that fits.

        Raises:
            BudgetError: nothing found fits.
        """
        with self.progress.stage("solve"):
            report = self.progress.report
            return solve_step(self.prepared, budget_bytes, solver=solver, report=report, warm_starts=warm_starts)

    def plan(self, budget_bytes: int | None) -> Plan:
        """Solve, rewrite and prove; by larger regions than asked for, where those cannot be had within the budget."""
        inner = inner_module(self.model)
        with turn(inner):
            decided = decide_step(inner, self.arguments, self.prepared, budget_bytes, self.progress)
            return Plan.of(self.model, self.arguments, decided)


def open_session(
    model: nn.Module,
    sample: Any,
    *,
    optimizer: Any = None,
    reserve_mb: float = 0,
    save: Sequence[str] = (),
    never_recompute: Sequence[str] = (),
    recompute: Sequence[str] = (),
    ceiling_bytes: int | None = None,
    pipeline: Any = None,
    **options: Any,
) -> Session:
    """Capture and profile the training step of `model`; arguments as in `auto_checkpoint`.

    Args:
        ceiling_bytes: raise before any op is run if the step is sure to need more.

    Raises:
        BudgetError: what is to be reserved is not a size, or the step needs more than the ceiling.
        CaptureError, Unsupported: the model cannot be planned.
        SolverUnavailable: `solver` is unknown or not installed.
    """
    inner = inner_module(model)
    check_wrapper(model)
    check_model(inner)
    reserve_bytes = reserve_to_bytes(reserve_mb) + unsent_bytes(model, options.get("gradients", "fresh"))
    asked = Options(**options, reserve_bytes=reserve_bytes, hints=make_hints(save, never_recompute, recompute))
    update = measure_update(optimizer, inner, model_device(inner), in_hooks=asked.gradients == "consumed")
    notes = (*wrapper_notes(model), *_hook_notes(inner, asked.loss_fn))
    asked = replace(
        asked, update=update, wrapper_bytes=wrapper_bytes(model), in_turn=in_turn(model), notes=notes,
        gradients=wrapper_gradients(model, asked.gradients),
    )  # fmt: skip
    if pipeline is not None:
        flight = flight_of(pipeline, asked.loss_fn, adds=asked.gradients == "accumulated")
        notes = (*asked.notes, *flight.notes)
        asked = replace(asked, flight=flight, notes=notes, loss_fn=None, gradients=flight.gradients(asked.gradients))
    arguments = bind_sample(inner, sample, asked.loss_fn)
    progress = Progress(asked.progress)
    try:
        with turn(inner):
            prepared = prepare_step(inner, arguments, asked, progress, ceiling_bytes=ceiling_bytes)
    except ForwardFailed as error:
        if isinstance(sample, list):
            error.args = (f"{error} The sample is a list, which is one argument: pass tuple(sample) for several.",)
        raise
    return Session(model, arguments, prepared, progress)


def _hook_notes(model: nn.Module, loss_fn: Any) -> tuple[str, ...]:
    """What is said of forward hooks of the model itself that run around the planned step."""
    around = (model._forward_pre_hooks or model._forward_hooks) and not runs_hooks(model, loss_fn)
    said = "the model's own forward hooks run around the planned step: what they make is not counted (reserve_mb)"
    return (said,) if around and not is_sharded(model) else ()
