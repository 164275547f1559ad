"""One sample planned at its stated minimum and run next to the plain step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from passes.errors import VerificationError
from passes.memory import measure_peak
from planner import BudgetError, CheckError, Plan, PlannerError
from planner.budget import Budget
from planner.session import open_session
from tests.databases.cases import Case, Step
from tests.zoo.compare import StepResult, differences

BAD = ("wrong", "raw", "over")


@dataclass(frozen=True)
class Result:
    """What became of a sample: `equal`, `refused` (by name), `wrong`, `raw` error, `over` its prediction, `skipped`."""

    name: str
    verdict: str
    detail: str = ""


def check(case: Case) -> Result:
    """Plan the sample, run it both ways, compare."""
    try:
        plain, step = case.make(), case.make()
        expected, gradients = plain_step(plain)
        if differences(expected, run(plain, plain, gradients)):
            return Result(case.name, "skipped", "the plain step differs from itself")
    except Exception as error:  # noqa: BLE001 - the sample is none for training
        return Result(case.name, "skipped", f"the plain step fails: {_line(error)}")
    if not gradients:
        return Result(case.name, "skipped", "no output has a gradient")
    try:
        plan = plan_at_minimum(step)
        found = differences(expected, run(plan.module, step, gradients))
        if found:
            return Result(case.name, "wrong", ", ".join(found))
        measured = plan.static_bytes + _peak(lambda: _backward(plan.module, step, gradients), step)
    except CheckError as error:  # noticed in time, and still another result
        return Result(case.name, "wrong", _line(error))
    except VerificationError as error:
        return Result(case.name, "raw", _line(error))
    except PlannerError as error:
        return Result(case.name, "refused", _line(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        return Result(case.name, "raw", _line(error))
    if measured > plan.peak_bytes:
        return Result(case.name, "over", f"measured {measured}, predicted {plan.peak_bytes}")
    return Result(case.name, "equal")


def plan_at_minimum(step: Step) -> Plan:
    """The plan at the smallest budget that the refusal of an impossible one names."""
    session = open_session(step, tuple(step.sample), progress=False, time_limit=5, check="auto")
    try:
        return session.plan(1)
    except BudgetError as error:
        return session.plan(Budget(error.minimum_mb).to_bytes(session.plain_peak_bytes))


def plain_step(step: Step) -> tuple[StepResult, list[torch.Tensor]]:
    torch.manual_seed(1)
    started = _started(step(*step.sample))
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.ones_like(t) if t.dim() == 0 else _like(t, generator) for t in started]
    return run(step, step, gradients), gradients


def _like(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return torch.empty_like(value, requires_grad=False).copy_(drawn)


def _started(output: Any) -> list[torch.Tensor]:
    """Where the backward starts, as a plan expects it: scalars, else every output with a gradient."""
    outputs = [t for t in (output if isinstance(output, list) else [output]) if t.requires_grad]
    return [t for t in outputs if t.dim() == 0] or outputs


def _backward(module: Any, step: Step, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    output = module(*step.sample)
    torch.autograd.backward(_started(output), [g.clone() for g in gradients])
    return output if isinstance(output, list) else [output]


def run(module: Any, step: Step, gradients: list[torch.Tensor]) -> StepResult:
    step.zero_grad()
    torch.manual_seed(1)
    outputs = _backward(module, step, gradients)
    return StepResult(
        [t.detach().clone() for t in outputs],
        {n: None if p.grad is None else p.grad.clone() for n, p in step.named_parameters()},
        {n: b.clone() for n, b in step.named_buffers()},
        torch.get_rng_state(),
    )


def _peak(call: Callable[[], Any], step: Step) -> int:
    """Bytes above static of one step from cleared gradients."""
    step.zero_grad()
    kept: list[Any] = []
    peak = measure_peak(lambda: kept.append(call()))
    step.zero_grad()
    return peak


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
