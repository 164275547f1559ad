"""One budget over the graphs of a compiled model, which Dynamo hands over one by one.

A step calls graphs 1..n forward and then n..1 backward. With H what a graph holds between its halves (saved tensors
and outputs), F and B the highest points of its halves, A(k) what the backwards before that of k leave (gradients of
parameters and of what graphs before k made, and outputs) and S all parameters and inputs, the step's peak is the
largest of

    S + H(1) + ... + H(k-1) + F(k)    and    S + H(1) + ... + H(k-1) + B(k) + A(k).

What comes after a graph is not known when it is compiled. So in the first step each graph may use what its
predecessors leave of the budget, or else runs at its lowest peak. When a step has run, its graphs are known and, under
Inductor, measured. If the peak is then above the budget, each in turn is planned anew for what the others leave. Where
that does not do, all start from one level between the least that they can hold between their halves and what they hold
without recompute, the highest at which the step fits. Promised from then on: the peak of what the graphs hold, and of
gradients from before the step. What Python makes between graphs is `reserve_mb`'s.

What a graph returned counts as held by its caller until a step shows that it is dropped before the backward. Then what
later graphs read of it counts in H while they run, and not in B of its own graph; where recompute can be saved by that,
the graphs are planned anew once.

A graph whose result is dropped before any backward (an evaluation with gradients on) holds nothing for one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from solvers.errors import MIB, BudgetError
from solvers.schedule import Schedule

from .calls import Call, gradient_bytes, gradients_of, held, node_of, storages_made, storages_of, tensors_of
from .partition import Figures, Ready
from .program import Program, Settings

LOG = logging.getLogger("planner.integrations")
ATTEMPTS = 6
LEVELS = 5
LONGEST_STEP = 10_000  # calls without a backward between them are no step
SHARE_OF_TIME = 0.3
WORTH = 0.005  # of the step's cost: saving that is worth a compilation
SMALLEST_STEP = 200  # a target is lowered by at least this part of what was predicted
_T = TypeVar("_T")


class Share:
    """The graphs that one `torch.compile` made, and the step that is running."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.programs: list[Program] = []
        self.sequence: list[Call] = []
        self.leaves: dict[int, int] = {}
        self.made: dict[int, int] = {}  # what graphs of this step made: by which
        self.backward_ran = False
        self.watching = True
        self.attempts = self.steps = 0
        self.target: int | None = None
        self.exhausted = False
        self.lowest = self.accumulated_bytes = 0

    # Compiling ------------------------------------------------------------------------------------------------------

    def add(self, program: Program) -> None:
        """Compile a new program within what the step that is running leaves of the budget."""
        if self.backward_ran:
            self._begin()
        self._look()
        program.backward_ran = self._note_backward
        program.compile(self._within_the_rest)
        self.programs.append(program)
        self._watch()
        self._tell(program)

    def _within_the_rest(self, program: Program, ready: Ready) -> Schedule:
        others = sum(self.leaves.values()) + held(self._figures(lambda p: _there(p.figures)))
        budget = self._budget(others + ready.plain_peak)
        if budget is None:
            return self._decide(ready, None)
        try:
            return self._decide(ready, budget - others)
        except BudgetError:
            if self.leaves:  # of which this graph may have some, too: they are counted twice here
                return self._hold(ready, 0.0)
            program.count_outputs(False)  # a first step shows whether the caller drops them before the backward
            return self._decide(_there(program.ready), budget - others)

    def _budget(self, plain_peak_bytes: int) -> int | None:
        settings = self.settings
        budget = settings.budget.to_bytes(plain_peak_bytes) or settings.room_bytes
        return None if budget is None else budget - settings.reserve_bytes

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
            self._begin()
            self._watch()  # it begins with gradients, or the last one held results: more than was counted
        if not self.watching:
            return self._run(program, args)
        if self.backward_ran:
            with self._all_or_nothing():
                self._settle()
            self._begin()
        if not self.watching:
            return self._run(program, args)
        self._see(args)
        result = program.run(*args)
        program.returned = storages_made(result, args)
        if program.predicted is not None and len(self.sequence) < LONGEST_STEP:
            passed = {p: size for p, size in storages_of(args) if p in self.made}
            given = [t for t in tensors_of(args) if t.requires_grad]
            differentiable = frozenset(p for p, _ in storages_of(given) if p in passed)
            self.sequence.append(Call(program, passed, differentiable, program.returned, node_of(result)))
            self.made.update((p, len(self.sequence) - 1) for p, _ in storages_of(result) if p not in self.made)
        else:
            self.made.update((p, -1) for p, _ in storages_of(result))
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

    def _see(self, args: Sequence[Any]) -> None:
        """Parameters, their gradients and inputs, once each; what an earlier graph made is counted there."""
        held = [*storages_of(args), *storages_of(gradients_of(args))]
        self.leaves.update((p, size) for p, size in held if p not in self.made)
        self.accumulated_bytes = max(self.accumulated_bytes, gradient_bytes(args))
        self._look()

    def _look(self) -> None:
        for call in self.sequence:
            call.look()

    def _note_backward(self) -> None:
        if not self.backward_ran:
            self._look()
        self.backward_ran = True

    def _begin(self) -> None:
        self.sequence, self.leaves, self.made, self.backward_ran = [], {}, {}, False

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
        budget = self._budget(self._peak(self._figures(lambda p: _there(p.ready).figures(_there(p.ready).plain))))
        peak = self._peak(self._figures(lambda p: _there(p.figures)))
        self.lowest = min(self.lowest or peak, peak) if not kept else peak
        if budget is None or not sequence:
            self.watching = False
        elif peak <= budget and not kept:
            self.watching = self._use_what_was_dropped(sequence, budget)
        elif self.attempts >= ATTEMPTS or self.exhausted:
            raise BudgetError(
                f"of {self.attempts + 1} programs of the compiled step the lowest was measured to hold "
                f"{self.lowest / MIB:,.3f} MiB; the budget is {budget / MIB:,.3f} MiB: ask for more, or for a smaller "
                "batch",
                budget_bytes=budget, minimum_bytes=self.lowest,
            )  # fmt: skip
        else:
            self.attempts += 1
            self.target = self._lower_target(peak, budget, self._peak(self._figures(lambda p: _there(p.predicted))))
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
        self.attempts, self.target = 1, budget
        self._compile(found)
        return True

    def _lower_target(self, peak: int, budget: int, told: int) -> int:
        """Below what was predicted this time by what was measured above the budget."""
        target = self.target or budget
        return target if told > target else min(told - (peak - budget), told - told // SMALLEST_STEP)

    def _figures(self, of: Callable[[Program], Figures]) -> list[Figures]:
        """What each call of the step holds, by what its program holds in a step with a backward."""
        return [call.figures(of(call.program)) for call in self.sequence]

    def _peak(self, figures: Sequence[Figures]) -> int:
        """The step's peak (see above)."""
        return sum(self.leaves.values()) + max(self._highest(figures), default=0)

    def _highest(self, figures: Sequence[Figures]) -> list[int]:
        """The highest point while either half of each graph runs, above parameters and inputs."""
        held = self._held_before(figures)
        return [held[k] + max(f.forward, f.backward + self._left(figures, k)) for k, f in enumerate(figures)]

    def _held_before(self, figures: Sequence[Figures]) -> list[int]:
        """What each graph finds: what those before it hold, and what they passed on and do not count themselves."""
        passed = {p: size for call in self.sequence for p, size in call.passed.items()}
        on = [0] * len(figures)
        for p, size in passed.items():
            maker = self.made[p]
            if maker >= 0 and not self.sequence[maker].program.keeps_outputs:
                on[maker] += size
        return [held(figures[:k]) + sum(on[:k]) for k in range(len(figures))]

    def _left(self, figures: Sequence[Figures], k: int) -> int:
        """What the backwards of the graphs after the k-th leave: gradients of what it made itself are its own."""
        later = [call.passed for call in self.sequence[k + 1 :]]
        kept = sum(f.gradients + f.outputs for f in figures[k + 1 :]) - sum(sum(p.values()) for p in later)
        waiting = {p: size for passed in later for p, size in passed.items() if self.made[p] < k}
        return max(0, kept) + sum(waiting.values())

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
            figures = self._figures(lambda p: _there(p.ready).figures(found[p]))
            try:
                found[program] = self._decide(_there(program.ready), **self._room(program, figures, target))
            except BudgetError:
                continue
        return found

    def _room(self, program: Program, figures: Sequence[Figures], target: int) -> dict[str, int]:
        """What a graph may use wherever it stands in the step, as arguments of `Ready.decide`."""
        places = [k for k, call in enumerate(self.sequence) if call.program is program]
        waiting = [k for k in places if not self.sequence[k].ended]
        held, highest = self._held_before(figures), self._highest(figures)
        own = [before + f.held for before, f in zip(held, figures, strict=True)]
        static = _there(program.ready).problem.static_bytes
        return {
            "budget": target - sum(self.leaves.values()) - held[places[-1]] + static,
            "between": max(
                (max(highest[k + 1 :], default=own[k]) - own[k] - self._handed_back(k) for k in waiting), default=0
            ),
            "after": max((self._left(figures, k) for k in waiting), default=0),
        }

    def _handed_back(self, k: int) -> int:
        """Gradients of what the k-th call made, which later graphs make: its own Problem counts them, too."""
        later = {p: call.passed[p] for call in self.sequence[k + 1 :] for p in call.differentiable}
        return sum(size for p, size in later.items() if self.made[p] == k)

    def _foretold(self, found: dict[Program, Schedule]) -> int:
        return self._peak(self._figures(lambda p: _there(p.ready).figures(found[p])))

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


