"""The base of a running step's errors. An exported folder holds `exported_errors.py` in place of this file."""

from solvers.errors import PlannerError

__all__ = ["PlannerError"]
