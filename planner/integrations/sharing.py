"""One budget over the graphs of a compiled model, which Dynamo hands over one by one.

What comes after a graph is not known when it is compiled. So in the first step each graph may use what its
predecessors leave of the budget, or else runs at its lowest peak. When a step has run, its graphs are known and, under
Inductor, measured. If the peak is then above the budget, each in turn is planned anew for what the others leave. Where
that does not do, all start from one level between the least that they can hold between their halves and what they hold
without recompute, the highest at which the step fits. Promised from then on: the peak of what the graphs hold, and of
gradients from before the step. What Python makes between graphs is `reserve_mb`'s.

What a graph returned counts as held by its caller until a step shows that it is dropped before the backward. Then what
later graphs read of it counts in H (`running`) while they run, and not in B of its own graph; where recompute can be
saved by that, the graphs are planned anew once.

A graph whose result is dropped before any backward (an evaluation with gradients on) holds nothing for one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from solvers.errors import MIB, BudgetError, shown_minimum
from solvers.schedule import Schedule

from .calls import gradient_bytes, held, storages_made
from .partition import Figures, Ready
from .program import Program, Settings
from .running import RunningStep

LOG = logging.getLogger("planner.integrations")
ATTEMPTS = 6
LEVELS = 5
SHARE_OF_TIME = 0.3
WORTH = 0.005  # of the step's cost: saving that is worth a compilation
SMALLEST_STEP = 200  # a target is lowered by at least this part of what was predicted
_T = TypeVar("_T")


class Share(RunningStep):
    """The graphs that one `torch.compile` made, and the step that is running."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.programs: list[Program] = []
        self.watching, self.attempts, self.steps = True, 0, 0
        self.target: int | None = None
        self.exhausted = False
        self.lowest = 0
        self.plain: dict[tuple[Program, ...], int] = {}  # the peaks without recompute of steps that have run

    # Compiling ------------------------------------------------------------------------------------------------------

    def add(self, program: Program) -> None:
        """Compile a new program within what the step that is running leaves of the budget."""
        if self.backward_ran:
            self._note_plain_peak()
            self.attempts, self.target, self.exhausted, self.lowest = 0, None, False, 0  # other sizes, say
            self.begin()
        self.look()
        program.backward_ran = self._note_backward
        program.compile(self._within_the_rest)
        self.programs.append(program)
        self._watch()
        self._tell(program)

    def _within_the_rest(self, program: Program, ready: Ready) -> Schedule:
        others = sum(self.leaves.values()) + held(self.figures(lambda p: _there(p.figures)))
        budget = self._budget(others + ready.plain_peak)
        if budget is None:
            return self._decide(ready, None)
        try:
            return self._decide(ready, budget - others)
        except BudgetError:
            if self.leaves or self.settings.budget.is_share:
                return self._hold(ready, 0.0)  # it may have some of these leaves, too, or be a part of the step only
            program.count_outputs(False)  # a first step shows whether the caller drops them before the backward
            return self._decide(_there(program.ready), budget - others)

    def _budget(self, plain_peak_bytes: int = 0) -> int | None:
        settings = self.settings
        budget = settings.budget.to_bytes(max([plain_peak_bytes, *self.plain.values()])) or settings.room_bytes
        return None if budget is None else budget - settings.reserve_bytes

    def _note_plain_peak(self) -> None:
        if plain := self.figures(lambda p: _there(p.ready).figures(_there(p.ready).plain)):
            self.plain[tuple(call.program for call in self.sequence)] = self.peak(plain)

    def _decide(self, ready: Ready, budget: int | None, between: int = 0, after: int = 0) -> Schedule:
        settings = self.settings
        return ready.decide(
            budget, solver=settings.solver, time_limit=settings.time_limit, gap=settings.gap, between=between,
            after=after,
        )  # fmt: skip

    def _hold(self, ready: Ready, level: float) -> Schedule:
        settings = self.settings
        return ready.decide_held(
            level, solver=settings.solver, time_limit=settings.time_limit * SHARE_OF_TIME, gap=settings.gap
        )

    @staticmethod
    def _tell(program: Program) -> None:
        peak = max(program.predicted.forward, program.predicted.backward) if program.predicted else 0
        LOG.info(
            "a graph of %d ops: peak %.1f MiB above its inputs, recompute %.1f %% of its cost; planned in %.1f s, "
            "compiled in %.1f s", len(program.problem.ops) if program.problem else 0, peak / MIB,
            100 * program.overhead, program.planning_seconds, program.compile_seconds,
        )  # fmt: skip

    # Running --------------------------------------------------------------------------------------------------------

    def call(self, program: Program, args: Sequence[Any]) -> Any:
        """Run a program's forward as the next of the step; settle the last step first, should one have ended."""
        if not self.watching and (self._is_surprised() or gradient_bytes(args) > self.accumulated_bytes):
            self.begin()
            self._watch()  # it begins with gradients, or the last one held results: more than was counted
        if not self.watching:
            return self._run(program, args)
        if self.backward_ran:
            with self._all_or_nothing():
                self._settle()
            self.begin()
        if not self.watching:
            return self._run(program, args)
        self.see(args)
        result = program.run(*args)
        program.returned = storages_made(result, args)
        self.note(program, args, result)
        return result

    def _is_surprised(self) -> bool:
        return any(p.held_after_all and not p.keeps_outputs for p in self.programs)

    @staticmethod
    def _run(program: Program, args: Sequence[Any]) -> Any:
        """Run it in a step that is not watched."""
        result = program.run(*args)
        if not program.keeps_outputs:
            program.returned = storages_made(result, args)
        return result

    def _note_backward(self) -> None:
        if not self.backward_ran:
            self.look()
        self.backward_ran = True

    def _watch(self) -> None:
        self.watching = True
        for program in self.programs:
            program.watching = True

    # Settling -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What is cut short leaves the programs, and what is known of them, as they were."""
        before = [(thing, dict(thing.__dict__)) for thing in (self, *self.programs)]
        try:
            yield
        except BaseException:
            _put_back(before)
            raise

    def _settle(self) -> None:
        """The step that has run fits, or its graphs are planned anew."""
        sequence = [call.program for call in self.sequence]
        kept = [p for p in dict.fromkeys(sequence) if p.kept and p.count_outputs(True)]
        self._note_plain_peak()
        budget, static = self._budget(), sum(self.leaves.values())
        peak = self.peak(self.figures(lambda p: _there(p.figures)))
        told = self.peak(self.figures(lambda p: _there(p.predicted)))
        above = max(peak, told) - static  # steps begin with other gradients and inputs
        self.lowest = above if kept else min(self.lowest or above, above)
        if budget is None or not sequence:
            self.watching = False
        elif peak <= budget and not kept:
            self.watching = self._use_what_was_dropped(sequence, budget)
        elif self.attempts >= ATTEMPTS or self.exhausted:
            lowest, budget = (size + self.settings.reserve_bytes for size in (static + self.lowest, budget))
            raise BudgetError(
                f"of {self.attempts + 1} programs of the compiled step the lowest needs {shown_minimum(lowest)}; the "
                f"budget is {budget / MIB:,.3f} MiB: ask for more, or for a smaller batch",
                budget_bytes=budget, minimum_bytes=lowest,
            )  # fmt: skip
        else:
            self.attempts += 1
            self.target = self._lower_target(peak, budget, told)
            if _count_as_dropped(sequence) or kept:
                self.target = budget  # foretold anew
            self._plan_together(sequence, self.target)
        for program in self.programs:
            program.watching = self.watching

    def _use_what_was_dropped(self, sequence: list[Program], budget: int) -> bool:
        """Plan anew, once, with what the caller dropped before the backward, where that is worth a compilation.

        Two steps tell: in the first, Dynamo holds what graphs hand to those that it compiles next.
        """
        distinct, before = list(dict.fromkeys(sequence)), [(p, dict(p.__dict__)) for p in sequence]
        cost, self.steps = _recompute(distinct), self.steps + 1
        if self.attempts or cost < WORTH:
            return False
        if self.steps == 1:
            return True
        if not _count_as_dropped(sequence):
            return False
        found = self._together(sequence, budget)
        if self._foretold(found) > budget or cost - _recompute(distinct, found) < WORTH:
            _put_back(before)
            return False
        self.attempts, self.target, self.lowest = 1, budget, 0
        self._compile(found)
        return True

    def _lower_target(self, peak: int, budget: int, told: int) -> int:
        """Below what was predicted this time by what was measured above the budget."""
        target = self.target or budget
        return target if told > target else min(told - (peak - budget), told - told // SMALLEST_STEP)

    def _plan_together(self, sequence: list[Program], target: int) -> None:
        """Compile all graphs of the step anew, so that it fits, or at the lowest found."""
        found = self._together(sequence, target)
        self.exhausted = self._foretold(found) > target
        self._compile(found)

    def _together(self, sequence: list[Program], target: int) -> dict[Program, Schedule]:
        """Schedules with which the step fits, or the lowest found."""
        distinct = list(dict.fromkeys(sequence))
        found = self._each_in_turn({p: _there(p.schedule) for p in distinct}, target)
        if len(sequence) == 1 and self._foretold(found) > target:
            found = {p: _there(p.ready).lowest for p in distinct}
        for level in range(LEVELS, -1, -1) if len(sequence) > 1 else ():
            if self._foretold(found) <= target:
                break
            held = {p: self._hold(_there(p.ready), level / (LEVELS + 1)) for p in distinct}
            found = held if self._foretold(held) <= target and level else self._each_in_turn(held, target)
        return found

    def _compile(self, found: dict[Program, Schedule]) -> None:
        for program, schedule in found.items():
            problem = program.problem
            program.compile(lambda p, ready, s=schedule, q=problem: self._as_chosen(ready, q, s))  # type: ignore[misc]
            self._tell(program)

    def _each_in_turn(self, found: dict[Program, Schedule], target: int) -> dict[Program, Schedule]:
        """Each graph at its cheapest among the others as they are."""
        found = dict(found)
        for program in found:
            figures = self.figures(lambda p: _there(p.ready).figures(found[p]))
            try:
                found[program] = self._decide(_there(program.ready), **self._room(program, figures, target))
            except BudgetError:
                continue
        return found

    def _room(self, program: Program, figures: Sequence[Figures], target: int) -> dict[str, int]:
        """What a graph may use wherever it stands in the step, as arguments of `Ready.decide`."""
        places = [k for k, call in enumerate(self.sequence) if call.program is program]
        waiting = [k for k in places if not self.sequence[k].ended]
        held, highest = self.held_before(figures), self.highest(figures)
        own = [before + f.held for before, f in zip(held, figures, strict=True)]
        static = _there(program.ready).problem.static_bytes
        return {
            "budget": target - sum(self.leaves.values()) - held[places[-1]] + static,
            "between": max(
                (max(highest[k + 1 :], default=own[k]) - own[k] - self.handed_back(k) for k in waiting), default=0
            ),
            "after": max((self.left(figures, k) for k in waiting), default=0),
        }

    def _foretold(self, found: dict[Program, Schedule]) -> int:
        return self.peak(self.figures(lambda p: _there(p.ready).figures(found[p])))

    def _as_chosen(self, ready: Ready, problem: Any, schedule: Schedule) -> Schedule:
        return schedule if ready.problem == problem else self._hold(ready, 0.0)


def _there(value: _T | None) -> _T:
    assert value is not None
    return value


def _count_as_dropped(programs: Sequence[Program]) -> bool:
    """No longer count what the callers of these did not hold; whether that is new."""
    return sum(p.count_outputs(False) for p in programs if p.kept is False) > 0


def _put_back(before: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    for thing, was in before:
        thing.__dict__.update(was)


def _recompute(programs: Sequence[Program], found: Mapping[Program, Schedule] | None = None) -> float:
    """What is recomputed, with these schedules or as now, as a share of the cost of all."""
    cost = {p: _there(p.problem).step_cost for p in programs}
    added = sum(cost[p] * (_there(p.ready).overhead(found[p]) if found else p.overhead) for p in programs)
    return added / (sum(cost.values()) or 1.0)
