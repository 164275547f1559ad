"""Errors of the user-facing side; all others come from `passes` and `solvers` and share `PlannerError`."""

from __future__ import annotations

from solvers.errors import PlannerError


class PlanFileError(PlannerError):
    """A plan file cannot be used: damaged, of another version, or for another model.

    Attributes:
        path: the file.
        field: the first thing that differs or is wrong.
    """

    def __init__(self, message: str, *, path: str = "", field: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.field = field


class HintError(PlannerError):
    """A hint names no op of the step, nothing that could be decided, or contradicts another one.

    Attributes:
        hint: `save`, `never_recompute` or `recompute`.
        pattern: the pattern at fault; "" where the value as a whole is.
        near: names of the step that look like it.
    """

    def __init__(self, message: str, *, hint: str, pattern: str = "", near: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.hint = hint
        self.pattern = pattern
        self.near = near


class RegionError(PlannerError):
    """`regions=` names no submodule, or nothing that could be planned."""


class NotAFunction(PlannerError, AttributeError):
    """A planned model's forward is asked for its source, its code or the like."""


class NothingTrained(RegionError):
    """No region reads anything that requires a gradient: all that could be planned is frozen."""


class ModelMismatch(PlannerError):
    """A plan is to be applied to a model that it was not made for.

    Attributes:
        differs: the first thing that differs, in words.
    """

    def __init__(self, message: str, *, differs: str = "") -> None:
        super().__init__(message)
        self.differs = differs


class RankError(PlannerError):
    """Ranks that plan together cannot: one of them failed, ended, or has another step.

    Attributes:
        rank: the one at fault, by its number in the process group.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class CheckError(PlannerError):
    """The planned step, run beside the plain one from equal state, does not give the same bits; or it could not be run.

    Attributes:
        differs: the first thing that differs, in words ("the gradient of head.weight").
        step: the step, counted from one, in which it differs.
        op: name of the first op of the step whose result differs; None where none could be found.
        cause: the likely cause, in words.
    """

    def __init__(
        self, message: str, *, differs: str = "", step: int = 0, op: str | None = None, cause: str = ""
    ) -> None:
        super().__init__(message)
        self.differs = differs
        self.step = step
        self.op = op
        self.cause = cause
