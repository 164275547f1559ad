"""Running the check: when it may run, for how many steps, and what becomes of a difference."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from passes.device import empty_cache
from passes.errors import ForwardFailed
from passes.exclusive import alone, exclusive
from passes.ops import is_collective
from passes.run.step import OtherAnswer
from passes.trace.first_call import remembered
from passes.trace.refuse import has_sharded
from planner.decided import Decided
from planner.errors import CheckError

from .blame import REPORT, explain
from .case import Case
from .compare import Observed, differences
from .record import NOT_RUN, Check, Checked
from .room import room_for

STEPS = 2
LEAST_SECONDS = 1.0  # that a check may take however quick planning was
COST = 2.2  # of one compared step, in plain steps: the planned one recomputes


@exclusive()
def check_step(
    model: nn.Module, planned: Decided, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None, check: Check,
    anew: bool = False,
) -> Checked:  # fmt: skip
    """Run the planned step beside the plain one, from equal state, and compare what can be observed bit for bit.

    Two steps, because what a forward changes shows at the second; between them parameters, float buffers and inputs
    are moved, so that a value which the plan wrongly holds as a constant shows as well. Both run on copies, without
    the hooks of the user's parameters; attributes, training flags and generators are put back, whatever happens.

    Args:
        check: "auto" runs it where it takes no longer than planning took, or a second, its memory is free, and no other
            thread runs.
        anew: whether it is a later plan, made in training; "auto" leaves out what comes of a trace with symbols, which
            two traces came out of node by node.

    Raises:
        CheckError: something differs, or, under `check=True`, the check could not run.
    """
    traces = [each.prepared.traced for each in ([run.planned for run in planned.runs] or [planned])]
    if check is False or (anew and check == "auto" and all(traced.from_symbols for traced in traces)):
        return NOT_RUN
    start, first = time.perf_counter(), planned.prepared.traced.first_call
    try:
        with remembered(first if first is not None and first.made_buffers else None):
            case = _case(model, planned, bound, loss_fn, check == "auto", anew)
            return _check(case, planned, check == "auto", start)
    except _CannotRun as error:
        if check == "auto":
            if error.__cause__ is not None and not anew:
                warnings.warn(f"the plan was not checked: {error}. Does the model run on this sample?", stacklevel=2)
            return Checked(0, str(error), time.perf_counter() - start)
        if anew and error.__cause__ is not None:  # the call raises what the plain step raises
            raise ForwardFailed(f"{error}.") from error.__cause__
        raise CheckError(f"the check cannot run: {error}.") from error.__cause__
    finally:
        empty_cache(planned.prepared.device)  # a step finds the allocator as planned for


class _CannotRun(Exception):
    """Why no check is possible, in words."""


def _check(case: Case, planned: Decided, auto: bool, start: float) -> Checked:
    with case.left_as_it_was():
        plain = _plain_steps(case, max(LEAST_SECONDS, sum(planned.seconds.values())) if auto else None)
        try:
            ours = case.take(case.planned(planned), len(plain))
        except OtherAnswer as error:
            raise _CannotRun(str(error)) from None
        except Exception as error:
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
            message = f"the planned step fails where the plain one runs: {cause}. {REPORT}."
            raise CheckError(message, differs="the planned step", cause=cause) from error
        plain = plain[: len(ours)]
        found = differences(plain, ours)
        noise = differences(plain, case.take(case.plain, len(plain))) if found else []
        if noise and _equal_deterministically(case, planned, len(plain)):
            how = "; by deterministic algorithms of torch, as the plain step does not repeat itself by others"
        else:
            how = explain(case, planned, plain, found, noise) if found else ""
    return Checked(len(plain), _compared(plain[0]) + _left_out(case) + how, time.perf_counter() - start)


def _equal_deterministically(case: Case, planned: Decided, steps: int) -> bool:
    """Whether the plain step repeats itself, and the planned one it, by algorithms that add up in a fixed order."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        plain = case.take(case.plain, steps)
        runs = (case.plain, case.planned(planned))
        return not any(differences(plain, case.take(run, steps)) for run in runs)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _case(
    model: nn.Module, planned: Decided, bound: Mapping[str, Any], loss_fn: Any, auto: bool, anew: bool
) -> Case:
    if auto and not alone():
        raise _CannotRun("other threads are running, whose random draws its steps would repeat; plan.check runs it")
    traced = planned.prepared.traced
    regions = planned.prepared.regions
    talks = any(map(is_collective, traced.graph_module.graph.nodes)) or (regions is not None and regions.talks)
    if has_sharded(model) or talks:
        raise _CannotRun("the step talks to other ranks, which would have to run as many steps of it")
    case = Case(model, traced, bound, loss_fn)
    missing = [name for name, t in zip(case.names, case.originals, strict=True) if t.is_meta]
    if missing:
        raise _CannotRun(f"{missing[0]!r} is on the meta device, without data to compute with")
    room = room_for(planned, case.originals, anew)
    if auto and not room.fits:
        raise _CannotRun(room.why)
    case.offload = room.offload
    case.vary_batch()
    return case


def _plain_steps(case: Case, limit: float | None) -> list[Observed]:
    """The plain steps, two where that is possible and takes no longer than `limit` with the planned ones."""
    begun = time.perf_counter()

    def enough() -> bool:
        return limit is not None and STEPS * COST * (time.perf_counter() - begun) > limit

    try:
        plain = case.take(case.plain, STEPS, enough)
    except Exception:  # noqa: BLE001 - with other inputs: whatever the model has against them
        plain = _one_batch(case, enough)
    took = (time.perf_counter() - begun) / len(plain)
    if limit is not None and COST * took > limit:
        raise _CannotRun(f"a step of the plain model takes {took:.1f} s, and a check is given {limit:.1f} s")
    return plain


def _one_batch(case: Case, enough: Callable[[], bool]) -> list[Observed]:
    """The plain steps on one batch; a single one for a model that fails in the second."""
    case.keep_batch()
    try:
        return case.take(case.plain, STEPS, enough)
    except Exception:  # noqa: BLE001 - the first step says it better
        try:
            return case.take(case.plain, 1)
        except Exception as error:
            raise _CannotRun(f"the plain step raises {type(error).__name__}: {' '.join(str(error).split())}") from error


def _compared(observed: Observed) -> str:
    gradients = sum(g is not None for g in observed.gradients.values())
    changed = sum(t is not None for t in observed.state.values())
    parts = [_count(len(observed.outputs), "output"), _count(gradients, "gradient")]
    parts += [_count(changed, "changed buffer")] if changed else []
    return ", ".join([*parts, "generators"])


def _left_out(case: Case) -> str:
    number = len(case.repeated)
    what = f"{_count(number, 'buffer')} that the plain step updates again when its torch.utils.checkpoint recomputes"
    return f"; not compared: {what}" if number else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
