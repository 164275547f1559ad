"""Dynamic programming on chains, after rotor.

Source: Beaumont, Herrmann, Pallez, Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (INRIA RR-9302, 2019), theorem 1. `solvers.chain` says which problems are chains, and
`solvers.chain_program` is the program.

Family
    The *persistent* schedules of the chain: of a stage's own tensors its backward finds all kept or all computed
    again, what is kept stays until that backward, and ops that draw random numbers run once. Over it the answer is
    optimal. Schedules that drop a kept tensor early and compute it once more can be cheaper where sizes differ; the
    ILP's family holds those too. On *even* chains - one op and one result a stage, results of one size, gradients of
    one size, one workspace, nothing in place; any costs, and any of input and result read by each backward - the
    tests know of no schedule that is cheaper: brute force agrees at every budget, and the ILP wherever it proves its
    answer. Steps that work in place cost what Griewank and Walther (Algorithm 799, 2000) prove for revolve.

Limits
    A chain of more than `MAX_STAGES` stages is planned with neighbours taken together (`family` counts the coarser
    stages). A staircase holds at most `max_points` steps: 4,194 for 20 stages, 524 for 40, 303 for 48. Where one
    would need more, some are left out, bytes still being exact, and nothing is claimed to be proved. Both bound the
    work, so that the answer does not depend on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Effort, Solver
from .bounds import floor_bytes
from .chain import chain_of, merged
from .chain_program import Program
from .errors import PlannerError
from .minimum import budget_error
from .problem import Problem
from .schedule import Schedule, with_frees
from .simulate import peak_and_cost
from .solution import Solution, cheapest_fit, solution

MAX_STAGES = 48
COST_LIMIT = 1 << 62
OTHERS = ("auto", "ilp", "greedy", "chen")


@dataclass(frozen=True)
class Rotor(Solver):
    """The best persistent schedule of a chain, exactly."""

    name: ClassVar[str] = "rotor"

    def check(self, problem: Problem) -> None:
        """Refuse what is not a chain, naming the first op that breaks it."""
        chain_of(problem, self.name, OTHERS)

    def search(self, problem: Problem, budget_bytes: int, plain: Solution, effort: Effort) -> Solution:
        """The work depends on the chain alone, never on the clock."""
        chain = merged(chain_of(problem, self.name, OTHERS), MAX_STAGES)
        _check_costs(problem, len(chain.stages))
        program = Program(chain, budget_bytes - problem.static_bytes)
        stairs = program.fill()
        if effort.report is not None:
            effort.report(f"{len(chain.stages)} stages, {sum(len(s.bytes) for s in program.table.values())} steps")
        known = cheapest_fit(problem, budget_bytes, self.name, effort.warm_starts)
        if not len(stairs.bytes):
            if known is None:
                smallest = Program(chain, plain.peak_bytes - problem.static_bytes).fill().bytes[0]
                raise budget_error(budget_bytes, int(smallest) + problem.static_bytes, floor_bytes(problem))
            return known
        found = _claim(program, with_frees(problem, program.order(program.limit_bytes)))
        return known if known is not None and known.added_cost < found.added_cost else found


def _claim(program: Program, schedule: Schedule) -> Solution:
    """The schedule with what is proved of it."""
    problem, stages = program.chain.problem, len(program.chain.stages)
    if program.thinned:
        note = f"a stretch of the chain has over {program.max_points} trades of bytes for cost: some were left out"
        return solution(problem, schedule, Rotor.name, notes=(note,))
    cost = peak_and_cost(problem, schedule)[1]
    family = f"persistent schedules of the chain of {stages} stages"
    return solution(problem, schedule, Rotor.name, bound=cost, family=family)


def _check_costs(problem: Problem, stages: int) -> None:
    if sum(op.cost for op in problem.ops) * stages >= COST_LIMIT:
        raise PlannerError(
            f"the costs of this problem add up to {sum(op.cost for op in problem.ops)}: rotor takes sums below "
            f"{COST_LIMIT // stages} for {stages} stages. Use a coarser unit of cost."
        )
