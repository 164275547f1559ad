"""CBC, the engine where HiGHS is missing: ended on time, reaped, and believed only where its answer adds up.

The binary is a stranger: it may be absent, crash, hang, or write nonsense. Whatever it does, the outcome is either
values that satisfy the program, checked here, or a sentence that says what went wrong.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulp

GRACE_SECONDS = 2.0
INTEGRAL = 1e-5
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Outcome:
    """What CBC made of a program.

    Attributes:
        values: they satisfy every constraint; None where there are none to be trusted.
        optimal, infeasible: what CBC claims; only claims that do not contradict `values` are kept.
        failure: what went wrong, for the user; "" if nothing did.
    """

    values: dict[str, float] | None = None
    optimal: bool = False
    infeasible: bool = False
    failure: str = ""


def solve_by_cbc(program: pulp.LpProblem, time_limit: float) -> Outcome:
    """Minimise `program` within `time_limit` seconds; never raises for what the binary does."""
    try:
        with tempfile.TemporaryDirectory(prefix="planner-cbc-") as folder:
            values, status, answer = _run(program, time_limit, Path(folder))
    except subprocess.TimeoutExpired:
        return Outcome(failure=f"it did not end within {time_limit + GRACE_SECONDS:.0f} seconds")
    except subprocess.CalledProcessError as error:
        ended = f"signal {-error.returncode}" if error.returncode < 0 else f"exit code {error.returncode}"
        return Outcome(failure=f"it ended with {ended}")
    except OSError as error:
        return Outcome(failure=f"it could not run: {error.strerror or error}")
    except (ValueError, LookupError):
        return Outcome(failure="its answer could not be read")
    if status == pulp.LpStatusUndefined:
        return Outcome(failure="its answer could not be read")
    if answer == pulp.LpSolutionInfeasible:
        return Outcome(infeasible=True)
    if answer not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Outcome()
    rounded = {name: _rounded(value) for name, value in values.items()}
    if not _satisfies(program, rounded):
        return Outcome(failure="its answer does not satisfy the program")
    return Outcome(rounded, optimal=answer == pulp.LpSolutionOptimal)


def cbc_path() -> str:
    """The CBC that PuLP brings, or else the one on the PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    bundled = str(getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", ""))
    path = bundled if bundled and os.access(bundled, os.X_OK) else shutil.which("cbc")
    if path is None:
        raise FileNotFoundError("there is no cbc on the PATH, and PuLP brings none")
    return path


def _run(program: pulp.LpProblem, time_limit: float, folder: Path) -> tuple[dict[str, float], int, int]:
    """Values, and PuLP's words for how the solve ended and for what the values are."""
    model, answer = str(folder / "model.mps"), str(folder / "answer.txt")
    path = cbc_path()
    variables, names, rows, _ = program.writeMPS(model, rename=1)
    arguments = [path, model, "-sec", str(max(1, math.ceil(time_limit))), "-timeMode", "elapsed", "-solve",
                 "-printingOptions", "all", "-solution", answer]  # fmt: skip
    quiet: Any = subprocess.DEVNULL
    with subprocess.Popen(arguments, stdin=quiet, stdout=quiet, stderr=quiet) as child:
        try:
            code = child.wait(time_limit + GRACE_SECONDS)
        finally:
            child.kill()  # does nothing to a child that has ended
            child.wait()  # leaving the block after Ctrl-C does not
    if code:
        raise subprocess.CalledProcessError(code, path)
    reader = pulp.COIN_CMD(path=path, msg=False)
    status, values, _, _, _, kind = reader.readsol_MPS(answer, program, variables, names, rows)
    return values, status, kind


def _rounded(value: float) -> float:
    near = round(value) if math.isfinite(value) else value
    return float(near) if abs(value - near) <= INTEGRAL else value


def _satisfies(program: pulp.LpProblem, values: dict[str, float]) -> bool:
    """Whether values are within their bounds, integers where they must be, and break no constraint."""
    for v in program.variables():
        value = values[v.name]
        if not (v.lowBound <= value <= v.upBound) or (v.cat == pulp.LpInteger and value != round(value)):
            return False
    return all(_holds(row, values) for row in program.constraints.values())


def _holds(row: pulp.LpConstraint, values: dict[str, float]) -> bool:
    terms = list(row.items())
    slack = sum(c * values[v.name] for v, c in terms) + row.constant
    allowed = TOLERANCE * max(1.0, sum(abs(c) for _, c in terms))
    if row.sense == pulp.LpConstraintEQ:
        return abs(slack) <= allowed
    return bool(slack * row.sense >= -allowed)
