"""What the user asked for, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from passes.profile import OpProfile
from passes.rates import cost_function
from passes.trace.layouts import Layouts
from solvers.errors import PlannerError

from .hints import NO_HINTS, Hints

OnNewShape = Literal["replan", "eager", "error"]


@dataclass(frozen=True)
class Options:
    """The arguments of `auto_checkpoint` that decide a plan, apart from the model and the sample."""

    budget_bytes: int | None
    reserve_bytes: int
    solver: str
    cost: str | Callable[[OpProfile], float]
    loss_fn: Callable[..., Any] | None
    time_limit: float
    gap: float
    progress: bool | None
    on_new_shape: OnNewShape = "replan"
    differentiated: tuple[str, ...] | None = None
    keep_outputs: bool = True
    hints: Hints = NO_HINTS
    layouts: Layouts = field(default_factory=dict)  # what running has shown so far

    @property
    def cost_function(self) -> Callable[[OpProfile], float]:
        return self.cost if callable(self.cost) else cost_function(self.cost)

    @property
    def cost_name(self) -> str:
        return getattr(self.cost, "__name__", "callable") if callable(self.cost) else self.cost


def check_options(options: Options) -> None:
    """Raise PlannerError for a value that no plan can be made with."""
    if not callable(options.cost):
        cost_function(options.cost)
    if options.on_new_shape not in ("replan", "eager", "error"):
        raise PlannerError(f"on_new_shape={options.on_new_shape!r} is unknown: it takes 'replan', 'eager' or 'error'.")
    if not _is_number(options.time_limit) or not options.time_limit > 0:
        raise PlannerError(f"time_limit={options.time_limit!r} must be a positive number of seconds.")
    if not _is_number(options.gap) or not options.gap >= 0:
        raise PlannerError(f"gap={options.gap!r} must not be negative: it is a share of the plain step's cost.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
