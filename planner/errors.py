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
