"""What the user asked for, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from passes.printable import shown
from passes.profile import OpProfile
from passes.rates import check_cost, cost_function
from solvers import get_solver
from solvers.errors import PlannerError

from .check.record import Check, check_mode
from .elsewhere import assumptions, check_device, rates_of, target_of
from .hints import NO_HINTS, Hints
from .optimizer import NO_UPDATE, Update
from .ranks.flight import Flight
from .units import is_number

OnNewShape = Literal["replan", "bucket", "eager", "error"]
ON_NEW_SHAPE: tuple[str, ...] = get_args(OnNewShape)
Gradients = Literal["fresh", "accumulated", "consumed"]
BUCKET = "bucket"  # a value of `on_new_shape`
AUTO, WHOLE = "auto", "whole"  # `regions=`, besides patterns
GRADIENTS: tuple[str, ...] = get_args(Gradients)


@dataclass(frozen=True)
class Options:
    """The arguments of `auto_checkpoint` that decide a plan, apart from the model, the sample and the budget.

    Attributes:
        wrapper_bytes: what the model's wrapper (DistributedDataParallel) holds throughout.
        in_turn: whether gradients leave in the order of the plain step although they would be freed sooner in another.
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
    in_turn: bool = False
    time_limit: float = 30.0
    gap: float = 0.01
    progress: bool | None = None
    on_new_shape: OnNewShape = "replan"
    keep_outputs: bool = True
    hints: Hints = NO_HINTS
    check: Check = False
    gradients: Gradients = "fresh"
    update: Update = NO_UPDATE
    regions: str | tuple[str, ...] = AUTO
    device: str = ""
    notes: tuple[str, ...] = ()
    flight: Flight | None = None

    def __post_init__(self) -> None:
        get_solver(self.solver)
        check_mode(self.check)
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise PlannerError(f"loss_fn={shown(self.loss_fn)} is not callable: pass a function of the output.")
        if isinstance(self.loss_fn, type):
            name = self.loss_fn.__name__
            raise PlannerError(f"loss_fn={name} is a class: pass an instance, {name}().")
        if self.keep_outputs not in (True, False):
            raise PlannerError(f"keep_outputs={self.keep_outputs!r} is unknown: it takes True or False.")
        if self.progress not in (True, False, None):
            raise PlannerError(f"progress={self.progress!r} is unknown: it takes True, False or None.")
        check_cost(self.cost)
        object.__setattr__(self, "device", check_device(self.device, self.cost))
        if self.on_new_shape not in ON_NEW_SHAPE:
            known = "it takes 'replan', 'bucket', 'eager' or 'error'"
            raise PlannerError(f"on_new_shape={self.on_new_shape!r} is unknown: {known}.")
        if self.gradients not in GRADIENTS:
            raise PlannerError(f"gradients={self.gradients!r} is unknown: it takes 'fresh', 'accumulated', 'consumed'.")
        object.__setattr__(self, "regions", _regions(self.regions))
        check_effort(self.time_limit, self.gap)
        object.__setattr__(self, "time_limit", float(self.time_limit))
        object.__setattr__(self, "gap", float(self.gap))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of module paths that `regions` gives."""
        return () if self.regions in (AUTO, WHOLE) else tuple(self.regions)

    @property
    def set_aside_bytes(self) -> int:
        """Resident throughout, besides what the step itself needs."""
        return self.reserve_bytes + self.wrapper_bytes + self.update.state_bytes

    def priced_on(self, device: torch.device) -> Options:
        """The same with the rates of a device in place of `cost="device"`, so that a plan and its file hold them."""
        return replace(self, cost=cost_function(self.cost, device)) if self.cost == "device" else self

    def cost_function(self, device: torch.device) -> Callable[[OpProfile], float]:
        """Its cost for a model on that device."""
        if callable(self.cost):
            return _checked(self.cost)
        named = rates_of(self.device, self.target(device)) if self.cost == "roofline" else self.cost
        return cost_function(named, device)

    def target(self, own: torch.device) -> torch.device:
        """The device that is planned for, where the model is on `own`."""
        return target_of(self.device, own)

    def assumptions(self, own: torch.device) -> tuple[str, ...]:
        """What is taken as given of a device that is not here."""
        return assumptions(self.device, self.cost, own)

    @property
    def cost_name(self) -> str:
        return getattr(self.cost, "__name__", "callable") if callable(self.cost) else self.cost


def check_effort(time_limit: Any, gap: Any) -> None:
    """Raise unless a solver can be given these."""
    if not is_number(time_limit) or not time_limit > 0:
        raise PlannerError(f"time_limit={time_limit!r} must be a positive number of seconds.")
    if not is_number(gap) or not gap >= 0:
        raise PlannerError(f"gap={gap!r} must be zero or more: it is a share of the plain step's cost.")


def _regions(given: Any) -> str | tuple[str, ...]:
    if given in (AUTO, WHOLE):
        return str(given)
    patterns = (given,) if isinstance(given, str) else given
    if isinstance(patterns, (list, tuple)) and patterns and all(isinstance(p, str) and p for p in patterns):
        return tuple(patterns)
    raise PlannerError(
        f"regions={given!r} is unknown: it takes 'auto', 'whole', or patterns of module paths (\"model.layers.*\")."
    )


def _checked(cost: Callable[[OpProfile], float]) -> Callable[[OpProfile], float]:
    def checked(profile: OpProfile) -> float:
        found = cost(profile)
        if not is_number(found) or not 0 <= found < math.inf:
            given = f"cost={getattr(cost, '__name__', 'the callable')} gave {shown(found)} for {profile.name}"
            raise PlannerError(f"{given}: it returns a number, zero or more, for each op.")
        return found

    return checked
