"""The base of every error this project raises, and the errors a solver can raise."""

from __future__ import annotations

MIB = 1 << 20


def mib_up(size_bytes: int) -> float:
    """MiB in thousandths, rounded up: a smallest budget works as it is written so."""
    return -(-size_bytes * 1000 // MIB) / 1000


def shown_minimum(size_bytes: int) -> str:
    """A smallest budget for people to ask for."""
    return f"{mib_up(size_bytes):.3f} MiB ({size_bytes} bytes)"


class PlannerError(Exception):
    """Base of all errors raised on purpose by `planner`, `passes` and `solvers`."""


class BudgetError(PlannerError):
    """The budget cannot be met, or is not a budget.

    Attributes:
        budget_bytes: the budget asked for, or None when the value was not a number of bytes.
        minimum_bytes: the smallest budget *known* to work (asking again with it succeeds), or None.
        floor_bytes: a proved lower bound: no schedule of the family searched fits below it, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int | None = None,
        minimum_bytes: int | None = None,
        floor_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.floor_bytes = floor_bytes

    @property
    def minimum_mb(self) -> float | None:
        """`minimum_bytes` in MiB, exactly (a float holds every byte count below 2**53)."""
        return None if self.minimum_bytes is None else self.minimum_bytes / MIB

    @property
    def floor_mb(self) -> float | None:
        """`floor_bytes` in MiB."""
        return None if self.floor_bytes is None else self.floor_bytes / MIB


class SolverUnavailable(PlannerError):
    """The solver asked for cannot be used here.

    Attributes:
        solver: the name asked for.
        available: the names that can be used.
    """

    def __init__(self, message: str, *, solver: str, available: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.solver = solver
        self.available = available


class ScheduleError(PlannerError):
    """A schedule breaks a rule of its problem: reads a freed value, never computes an output, ...

    Attributes:
        step: index of the offending step, or None when the whole schedule is at fault.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step
