"""Train under a memory budget: `auto_checkpoint(model, sample, budget_mb=...)`."""

from passes.errors import CaptureError, InputMismatch, Unsupported, VerificationError
from passes.rates import Roofline
from passes.run.step import BackwardTwice, DoubleBackward
from solvers.errors import BudgetError, PlannerError, SolverUnavailable

from .api import auto_checkpoint, minimum_budget
from .errors import CheckError, HintError, ModelMismatch, PlanFileError, RankError, RegionError
from .frontier import Frontier, MaxBatch, frontier, max_batch
from .plan import Plan

__all__ = [
    "BackwardTwice",
    "BudgetError",
    "CaptureError",
    "CheckError",
    "DoubleBackward",
    "Frontier",
    "HintError",
    "InputMismatch",
    "MaxBatch",
    "ModelMismatch",
    "Plan",
    "PlanFileError",
    "PlannerError",
    "RankError",
    "RegionError",
    "Roofline",
    "SolverUnavailable",
    "Unsupported",
    "VerificationError",
    "auto_checkpoint",
    "frontier",
    "max_batch",
    "minimum_budget",
]
__version__ = "0.2.0.dev0"
