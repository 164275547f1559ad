"""The only referee: what a schedule costs and how much memory it holds, step by step, in exact ints."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem
from .replay import raw_replay
from .schedule import Schedule


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found.

    Attributes:
        peak_bytes: the largest number of bytes resident at any moment, static bytes included.
        peak_step: index of the schedule step at which it is first reached.
        added_cost: cost of all executions beyond the first of each op.
        resident_bytes: after each step, static bytes included.
        moment_bytes: during each step: for a compute, inputs + outputs + workspace + all else that is live.
    """

    peak_bytes: int
    peak_step: int
    added_cost: int
    resident_bytes: tuple[int, ...]
    moment_bytes: tuple[int, ...]


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Replay `schedule` and account for every byte and every unit of cost.

    Raises:
        ScheduleError: the schedule breaks a rule; the message names the step, the op and the tensor.
    """
    resident, during, added = [], [], 0
    for step, again, _, _, _, live_bytes, moment_bytes in raw_replay(problem, schedule):
        resident.append(live_bytes)
        during.append(moment_bytes)
        if again:
            added += problem.ops[step.index].cost
    peak = max(during, default=problem.static_bytes)
    return Simulation(peak, during.index(peak) if during else 0, added, tuple(resident), tuple(during))


def peak_and_cost(problem: Problem, schedule: Schedule) -> tuple[int, int]:
    """`(peak_bytes, added_cost)` of a valid schedule."""
    simulation = simulate(problem, schedule)
    return simulation.peak_bytes, simulation.added_cost
