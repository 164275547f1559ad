"""What the user asked for, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from passes.profile import OpProfile
from passes.rates import cost_function
from solvers import get_solver
from solvers.errors import PlannerError

from .check.record import Check, check_mode
from .hints import NO_HINTS, Hints
from .optimizer import NO_UPDATE, Update
from .ranks.flight import Flight

OnNewShape = Literal["replan", "eager", "error"]
ON_NEW_SHAPE: tuple[str, ...] = get_args(OnNewShape)
Gradients = Literal["fresh", "accumulated", "consumed"]
AUTO, WHOLE = "auto", "whole"  # `regions=`, besides patterns
GRADIENTS: tuple[str, ...] = get_args(Gradients)


@dataclass(frozen=True)
class Options:
    """The arguments of `auto_checkpoint` that decide a plan, apart from the model, the sample and the budget.

    Attributes:
        wrapper_bytes: what the model's wrapper (DistributedDataParallel) holds throughout.
        notes: what of that is not counted, in words.
        flight: the pipeline that the step is a stage of.

    Raises:
        PlannerError: no plan can be made with a value.
        SolverUnavailable: no solver has that name.
    """

    solver: str = "auto"
    cost: str | Callable[[OpProfile], float] = "roofline"
    loss_fn: Callable[..., Any] | None = None
    reserve_bytes: int = 0
    wrapper_bytes: int = 0
    time_limit: float = 30.0
    gap: float = 0.01
    progress: bool | None = None
    on_new_shape: OnNewShape = "replan"
    keep_outputs: bool = True
    hints: Hints = NO_HINTS
    check: Check = False
    gradients: Gradients = "fresh"
    update: Update = NO_UPDATE
    notes: tuple[str, ...] = ()
    flight: Flight | None = None
    regions: str | tuple[str, ...] = WHOLE

    def __post_init__(self) -> None:
        get_solver(self.solver)
        check_mode(self.check)
        if not callable(self.cost):
            cost_function(self.cost)
        if self.on_new_shape not in ON_NEW_SHAPE:
            raise PlannerError(f"on_new_shape={self.on_new_shape!r} is unknown: it takes 'replan', 'eager' or 'error'.")
        if self.gradients not in GRADIENTS:
            raise PlannerError(f"gradients={self.gradients!r} is unknown: it takes 'fresh', 'accumulated', 'consumed'.")
        object.__setattr__(self, "regions", _regions(self.regions))
        if not _is_number(self.time_limit) or not self.time_limit > 0:
            raise PlannerError(f"time_limit={self.time_limit!r} must be a positive number of seconds.")
        if not _is_number(self.gap) or not self.gap >= 0:
            raise PlannerError(f"gap={self.gap!r} must not be negative: it is a share of the plain step's cost.")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of module paths that `regions` gives."""
        return () if self.regions in (AUTO, WHOLE) else tuple(self.regions)

    @property
    def set_aside_bytes(self) -> int:
        """Resident throughout, besides what the step itself needs."""
        return self.reserve_bytes + self.wrapper_bytes + self.update.state_bytes

    @property
    def cost_function(self) -> Callable[[OpProfile], float]:
        return self.cost if callable(self.cost) else cost_function(self.cost)

    @property
    def cost_name(self) -> str:
        return getattr(self.cost, "__name__", "callable") if callable(self.cost) else self.cost


def _regions(given: Any) -> str | tuple[str, ...]:
    if given in (AUTO, WHOLE):
        return str(given)
    patterns = (given,) if isinstance(given, str) else given
    if isinstance(patterns, (list, tuple)) and patterns and all(isinstance(p, str) and p for p in patterns):
        return tuple(patterns)
    raise PlannerError(
        f"regions={given!r} is unknown: it takes 'auto', 'whole', or patterns of module paths (\"model.layers.*\")."
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
