"""Why a step is planned neither as a whole nor by regions, in words."""

from __future__ import annotations

from collections.abc import Mapping

from passes.errors import CaptureError, ForwardFailed, Unsupported
from passes.trace.failure import capture_error
from planner.errors import PlannerError, RegionError

from .find import Candidates
from .losses import LOSS

Refusal = CaptureError | Unsupported


def again(why: Refusal) -> Refusal:
    """The same refusal, to be raised: frames of the traceback keep `why` itself, which would be a cycle."""
    new = type(why).__new__(type(why), *why.args)
    vars(new).update(vars(why))
    new.__cause__ = why.__cause__
    return new


def stopped(error: Exception, why: Refusal | None, meta: bool) -> Exception:
    """What to raise for the error that stops a run of the step by regions; `ForwardFailed` for one of forward's own.

    Args:
        why: why the model is not planned as a whole, where that was tried.
        meta: whether the step runs without data.
    """
    if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
        error = capture_error(error)  # torch runs none while something looks at each op
    if why is None and isinstance(error, PlannerError):
        return error
    if why is None:
        return _without_data(error) if meta else capture_error(error)
    found = again(why)
    own = None if isinstance(error, PlannerError) else capture_error(error)
    if isinstance(why, CaptureError) and isinstance(own, ForwardFailed):
        found = ForwardFailed(str(why), location=own.location, construct=own.construct)
    said = str(error).partition("\n")[0].rstrip(".")
    if said not in str(why):
        at = f" (at {own.location})" if own is not None and own.location else ""
        found.args = (
            f"running the step by regions raised {type(error).__name__}: {said}{at}. It was run so because the model "
            f"cannot be planned as a whole: {why}",
        )
    return found


def _without_data(error: Exception) -> RegionError:
    place = capture_error(error).location
    return RegionError(
        f"regions of a model on the meta device: what runs between them does not run without data"
        f"{f' at {place}' if place else ''} ({error}). Let a region cover that code, or plan where the data is."
    )


def with_regions_tried(why: Refusal | None, chosen: Candidates, refused: Mapping[str, str]) -> Refusal | None:
    """Why the model is not planned as a whole, with why no region is; None where only regions were asked for."""
    if why is None:
        return None
    why = again(why)
    if refused:
        why.args = (f"{why} No region can be planned instead: {first_of(refused).rstrip('.')}.",)
    elif not set(chosen.chosen) - {LOSS}:
        why.args = (
            f"{why} It has no submodules with several ops that could be planned as regions instead, and too little "
            "could be computed again in its single layers. Move what can be traced into submodules.",
        )  # fmt: skip
    return why


def first_of(refused: Mapping[str, str]) -> str:
    """The first region that stays eager, and why."""
    none = "regions are submodules of several ops, and it calls none"
    return next((f"{path}: {why}" for path, why in refused.items()), none)
