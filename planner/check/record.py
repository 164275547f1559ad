"""What a check found, for the plan to show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from solvers.errors import PlannerError

Check = Literal["auto"] | bool


@dataclass(frozen=True)
class Checked:
    """What was compared between the plain and the planned step, or why nothing was.

    Attributes:
        steps: training steps that were compared; 0 when the check did not run.
        compared: what was compared in each of them, or why the check did not run.
        seconds: how long it took.
    """

    steps: int
    compared: str
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.steps > 0

    def __str__(self) -> str:
        if not self.steps:
            return f"not run: {self.compared}"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{steps} beside the plain model, equal bit for bit: {self.compared}"

    @property
    def line(self) -> str:
        """The same as a line of its own, as every view shows it."""
        return f"check by running: {self}"


NOT_RUN = Checked(0, "it was not asked for; plan.check(model, sample) runs it")


def check_mode(value: Any) -> None:
    """Raise PlannerError unless `value` is True, False or "auto"."""
    if not (isinstance(value, bool) or (isinstance(value, str) and value == "auto")):
        raise PlannerError(f'check={value!r} is unknown: it takes "auto", True or False.')
