"""Our plans at the peers' own peaks, at the smallest budget, and in between."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from planner import PlannerError
from planner.plan import Plan
from planner.session import Session, open_session

from .measure import Subject
from .methods import quoted


@dataclass
class Planned:
    """A plan under one budget, or why there is none."""

    setting: str
    budget_bytes: int
    seconds: float
    plan: Plan | None = None
    floor_bytes: int | None = None
    error: str | None = None


class Ours:
    """Capture once, then plan under any number of budgets on one copy of the model."""

    def __init__(self, model: nn.Module, sample: Any, time_limit: float) -> None:
        self.model = model
        start = time.perf_counter()
        self.study: Session = open_session(model, sample, time_limit=time_limit, progress=False, keep_outputs=False)
        self.prepare_seconds = time.perf_counter() - start

    def subject(self, plan: Plan) -> Subject:
        return Subject(plan.module, self.model)

    def plans(self, peaks: Sequence[tuple[str, int]], shares: Sequence[float]) -> Iterator[Planned]:
        """A plan at each peer's peak, at `shares` between the minimum and the plain peak, and at the minimum."""
        for label, peak in peaks:
            yield self.at(f"at {label}", peak)
        start = time.perf_counter()
        found = self.study.minimum()
        minimum = found.minimum_bytes
        seconds = time.perf_counter() - start
        for share in shares:
            budget = minimum + round((self.study.plain_peak_bytes - minimum) * share)
            yield self.at(f"curve {share:.2f}", budget)
        lowest = self.at("minimum", minimum)
        lowest.seconds += seconds
        lowest.floor_bytes = found.floor_bytes
        yield lowest

    def at(self, setting: str, budget_bytes: int) -> Planned:
        """The plan under `budget_bytes`; a budget that nothing meets is an error to report."""
        start = time.perf_counter()
        try:
            plan = self.study.plan(budget_bytes)
        except PlannerError as error:
            return Planned(setting, budget_bytes, time.perf_counter() - start, error=quoted(error))
        return Planned(setting, budget_bytes, time.perf_counter() - start, plan)

    def dump(self, path: Path, budgets: dict[str, int]) -> None:
        """The problem as JSON with the budgets of interest, for work on the solvers."""
        path.write_text(json.dumps({"problem": self.study.problem.to_dict(), "budgets": budgets}))
