"""What a model's plans recompute: where the search for a plan of other sizes starts."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from solvers import Report
from solvers.errors import BudgetError
from solvers.live import Live
from solvers.problem import Problem
from solvers.schedule import recomputes_of
from solvers.solution import Solution

from .decided import Decided
from .fit import solve_to_fit, trimmed_to_fit
from .options import BUCKET
from .prepared import Prepared

MOST = 16
SHARE = 0.2
LIMIT_SHARE = 0.1
ALIKE = 0.9


class _Known(NamedTuple):
    """A decision for one size; ops are named, as their order may depend on sizes.

    Attributes:
        plain_bytes: the peak of the plain step.
        recomputes: which op runs again right before which.
        seconds: the longest that a decision for such ops has taken so far.
    """

    ops: frozenset[str]
    plain_bytes: int
    recomputes: tuple[tuple[str, str], ...]
    seconds: float

    def on(self, problem: Problem) -> Live:
        """The same recomputes, as far as `problem` has the ops and they may run again in it."""
        index = {op.name: i for i, op in enumerate(problem.ops)}
        pairs = [(index[slot], index[op]) for slot, op in self.recomputes if slot in index and op in index]
        return Live(problem, [(slot, i) for slot, i in pairs if slot > i and problem.ops[i].recomputable])


class Starts:
    """The latest decisions of a model under one budget.

    A step of which most ops were decided for other sizes is solved from the decision of the nearest size, in a fifth
    of the time that those took, or a tenth of the time limit. Where no plan is found in that, there is all of it.
    """

    def __init__(self) -> None:
        self.known: deque[_Known] = deque(maxlen=MOST)

    def add(self, decided: Decided) -> None:
        """Remember a decision."""
        problem, seconds = decided.problem, decided.seconds.get("solve", 0.0)
        names = [op.name for op in problem.ops]
        recomputes = tuple((names[slot], names[i]) for slot, i in recomputes_of(problem, decided.schedule))
        seconds = max((seconds, *(known.seconds for known in self._alike(problem))))
        self.known.append(_Known(frozenset(names), decided.baseline_peak_bytes, recomputes, seconds))

    def _alike(self, problem: Problem) -> list[_Known]:
        """Decisions for steps that differ in little but sizes."""
        names = {op.name for op in problem.ops}
        return [known for known in self.known if len(known.ops & names) >= ALIKE * max(len(known.ops), len(names))]

    def solve(self, prepared: Prepared, budget_bytes: int | None, report: Report | None) -> Solution:
        """`solve_to_fit`, from what is known.

        With `on_new_shape="bucket"`, what was decided for the nearest larger size is the answer, without the
        recomputes that the budget does not need here; but not where hints prefer recomputes that it does not need.

        Raises:
            BudgetError: nothing found fits, with all of the time limit.
        """
        problem, plain = prepared.problem, prepared.baseline_peak_bytes
        known = self._alike(problem)
        if not known or budget_bytes is None:
            return solve_to_fit(prepared, budget_bytes, report=report)
        options = prepared.options
        larger = min((k for k in known if k.plain_bytes >= plain), key=lambda k: k.plain_bytes, default=None)
        if options.on_new_shape == BUCKET and larger is not None and not prepared.preferred:
            shared = trimmed_to_fit(prepared, larger.on(problem), budget_bytes)
            if shared is not None:
                return shared
        nearest = min(known, key=lambda k: abs(k.plain_bytes - plain))
        starts = (nearest.on(problem).schedule(),)
        seconds = max(LIMIT_SHARE * options.time_limit, SHARE * max(k.seconds for k in known))
        hurried = replace(prepared, options=replace(options, time_limit=seconds))
        try:
            return solve_to_fit(hurried, budget_bytes, report=report, warm_starts=starts)
        except BudgetError:
            return solve_to_fit(prepared, budget_bytes, report=report, warm_starts=starts)
