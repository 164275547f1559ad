"""One architecture: does it train plainly, is it planned, are the numbers the plain ones, does the prediction hold."""

from __future__ import annotations

import copy
import os
import random
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from passes.memory import measure_peak
from passes.trace.structure import flatten
from planner import BudgetError, Plan, PlannerError
from planner.session import open_session
from tests.zoo.compare import StepResult, differences, forward_backward, loss_bytes

from .catalogue import Entry

STEPS, PLANNING_SEED, TOLERANCE = 3, 1, 0.01
GOOD, SKIPPED = ("equal", "minimum"), ("untrainable", "unsteady")


@dataclass
class Record:
    """What became of one architecture; a line of the file of results.

    `verdict`: "equal" (under the share asked), "minimum" (under the stated minimum), "refused" by name, "wrong",
    "over" its prediction, "error" (no planner's), "limit" (of time or memory), "untrainable", "unsteady".
    """

    name: str
    task: str
    verdict: str = ""
    detail: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        return asdict(self)


def seed_all(seed: int) -> None:
    """Torch's, Python's and NumPy's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def step(module: nn.Module, state_of: nn.Module, sample: Any, seed: int) -> StepResult:
    """One seeded training step from cleared gradients, then plain SGD."""
    for parameter in state_of.parameters():
        parameter.grad = None
    seed_all(seed)
    tensors, _ = flatten(forward_backward(module, sample))
    python = random.getstate()[1]
    numpy: Any = np.random.get_state()
    generators = torch.cat([torch.get_rng_state().long(), torch.tensor(python), torch.tensor(numpy[1].astype("int64"))])
    result = StepResult(
        [t.detach().clone() for t in tensors],
        {n: None if p.grad is None else p.grad.clone() for n, p in state_of.named_parameters()},
        {n: b.clone() for n, b in state_of.named_buffers()},
        generators,
    )
    with torch.no_grad():
        for parameter in state_of.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-3)
    return result


def trainable(entry: Entry) -> tuple[nn.Module, Any]:
    """The first of the candidates whose plain step gives gradients.

    Raises:
        LookupError: none does; with the reasons.
    """
    reasons: list[str] = []
    try:
        for model, sample in entry.candidates():
            try:
                if any(g is not None for g in step(model, model, sample, 0).gradients.values()):
                    return model, sample
                reasons.append("no parameter gets a gradient")
            except Exception as error:  # noqa: BLE001 - another candidate may do
                reasons.append(_line(error))
    except Exception as error:  # noqa: BLE001 - nothing could be built
        reasons.append(_line(error))
    raise LookupError("; ".join(dict.fromkeys(reasons)))


def steady(model: nn.Module, sample: Any) -> str:
    """What differs between two plain steps from equal state; "" where nothing does."""
    one, two = copy.deepcopy(model), copy.deepcopy(model)
    return ", ".join(differences(step(one, one, sample, 1), step(two, two, sample, 1))[:4])


def plan_at(model: nn.Module, sample: Any, share: int, options: dict[str, Any]) -> tuple[Plan, bool]:
    """A plan at `share` % of what the plain step needs above static, or at the stated minimum (then True)."""
    session = open_session(model, sample, progress=False, **options)
    static = session.problem.static_bytes
    try:
        return session.plan(static + (session.plain_peak_bytes - static) * share // 100), False
    except BudgetError as error:
        minimum = error.minimum_bytes
    assert minimum is not None
    return session.plan(minimum), True


def measured(plan: Plan, model: nn.Module, sample: Any) -> int:
    """The planned step's peak on the sample, with the draws that it was planned with, without a loss outside."""

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        seed_all(PLANNING_SEED)

    run()
    forward_backward(plan.module, sample)
    run()
    kept: list[Any] = []
    return plan.static_bytes + measure_peak(lambda: kept.append(forward_backward(plan.module, sample)))


def compare(plan: Plan, plain: nn.Module, model: nn.Module, sample: Any) -> str:
    """The first step in which the planned model is not the plain one, and in what; "" where all are equal."""
    for i in range(STEPS):
        expected = step(plain, plain, sample, PLANNING_SEED + i)
        if differ := differences(expected, step(plan.module, model, sample, PLANNING_SEED + i)):
            return f"step {i + 1}: {', '.join(differ[:6])} ({len(differ)} in all)"
    return ""


def examine(entry: Entry, share: int, options: dict[str, Any], plain_only: bool) -> Record:
    """Everything about one architecture; whatever is raised is told in the record."""
    found = Record(entry.name, entry.task)
    try:
        model, sample = trainable(entry)
        if differ := steady(model, sample):
            found.verdict, found.detail = "unsteady", f"the plain step differs from itself: {differ}"
            return found
    except Exception as error:  # noqa: BLE001 - the plain model's own, or its memory is more than there is
        found.verdict, found.detail = "untrainable", str(error) if isinstance(error, LookupError) else _line(error)
        return found
    found.verdict = "plain"
    found.figures["parameters"] = sum(p.numel() for p in model.parameters())
    if not plain_only:
        _planned(found, model, sample, share, options)
    return found


def _planned(found: Record, model: nn.Module, sample: Any, share: int, options: dict[str, Any]) -> None:
    plain, start = copy.deepcopy(model), time.perf_counter()
    try:
        seed_all(PLANNING_SEED)
        plan, minimum = plan_at(model, sample, share, options)
        found.figures.update(
            seconds=round(time.perf_counter() - start, 1), ops=len(plan.problem.ops), overhead=round(plan.overhead, 4),
            static=plan.static_bytes, plain_peak=plan.baseline_peak_bytes, predicted=plan.peak_bytes,
            regions=len({run.path for run in plan.runs}),
        )  # fmt: skip
        found.verdict = "minimum" if minimum else "equal"
        before = copy.deepcopy(model.state_dict())
        if differ := compare(plan, plain, model, sample):
            found.verdict, found.detail = "wrong", differ
            return
        model.load_state_dict(before)
        _weigh(found, plan, plain, model, sample)
    except PlannerError as error:
        found.verdict, found.detail = "refused", _line(error)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        found.verdict, found.detail = "error", f"{_line(error)} [{_place(error)}]"


def _weigh(found: Record, plan: Plan, plain: nn.Module, model: nn.Module, sample: Any) -> None:
    peak = measured(plan, model, sample)
    found.figures["measured"] = peak
    if peak > plan.peak_bytes * (1 + TOLERANCE):
        outside = loss_bytes(plain, sample)
        if peak - outside > plan.peak_bytes * (1 + TOLERANCE):
            found.verdict, found.detail = "over", f"measured {peak:,}, predicted {plan.peak_bytes:,}"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in reversed(frames[-3:]))

