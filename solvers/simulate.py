"""The only referee: what a schedule costs and how much memory it holds, step by step, in exact ints.

Rules (they are the rewritten code's own):

1. `compute` allocates every output of the op anew while its inputs are still held; while it runs, the op's
   workspace comes on top. An output that was already live keeps its old copy, and the new one is dropped as
   soon as the op returns.
   An op one of whose `reuse` inputs is freed right after it, before the next compute, writes its first output into
   the memory of the first such input: nothing is allocated for it.
2. `free` drops a tensor that is live and no output of the step.
3. Required ops run for the first time in problem order; recomputes stand anywhere between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .errors import ScheduleError
from .problem import Problem
from .schedule import Schedule, freed_after


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
    resident, moment = [], []
    peak, peak_step, added = problem.static_bytes, 0, 0
    for step, live_bytes, moment_bytes, cost in _replay(problem, schedule):
        resident.append(live_bytes)
        moment.append(moment_bytes)
        added += cost
        if moment_bytes > peak:
            peak, peak_step = moment_bytes, step
    return Simulation(peak, peak_step, added, tuple(resident), tuple(moment))


def peak_and_cost(problem: Problem, schedule: Schedule) -> tuple[int, int]:
    """`(peak_bytes, added_cost)` of a valid schedule."""
    simulation = simulate(problem, schedule)
    return simulation.peak_bytes, simulation.added_cost


def taken_over(problem: Problem, schedule: Schedule, position: int) -> int | None:
    """The input into whose memory the compute at `position` writes its first output, unless that is live already."""
    reuse = problem.ops[schedule[position].index].reuse
    freed = freed_after(schedule, position) if reuse else ()
    return next((t for t in reuse if t in freed), None)


def _replay(problem: Problem, schedule: Schedule) -> Iterator[tuple[int, int, int, int]]:
    live: set[int] = set()
    given: set[int] = set()
    done: set[int] = set()
    live_bytes = problem.static_bytes
    expected = [i for i, op in enumerate(problem.ops) if not op.optional]
    position = latest = 0
    for index, (kind, i) in enumerate(schedule):
        if kind not in ("compute", "free") or not 0 <= i < len(problem.ops if kind == "compute" else problem.tensors):
            raise ScheduleError(f"step {index} is {kind!r} {i}, which this problem does not have", step=index)
        if kind == "free":
            if i not in live:
                raise ScheduleError(f"step {index} frees {problem.tensors[i].name!r}, which is not live", step=index)
            if i in problem.pinned:
                name = problem.tensors[i].name
                raise ScheduleError(f"step {index} frees {name!r}, an output of the step", step=index)
            live.discard(i)
            if i not in given:
                live_bytes -= problem.tensors[i].bytes
            given.discard(i)
            yield index, live_bytes, live_bytes, 0
            continue
        op = problem.ops[i]
        again = i in done
        if again and not op.recomputable:
            raise ScheduleError(f"step {index} recomputes {op.name!r}, which must run once", step=index)
        for t in op.inputs + op.replay_inputs if again else op.inputs:
            if t not in live:
                name = problem.tensors[t].name
                raise ScheduleError(f"step {index}: {op.name!r} reads {name!r}, which is not live", step=index)
        if not again and not op.optional:
            if expected[position] != i:
                wanted = problem.ops[expected[position]].name
                raise ScheduleError(f"step {index} runs {op.name!r} where {wanted!r} is due", step=index)
            position += 1
        if not again:
            if i < latest:
                later = problem.ops[latest].name
                raise ScheduleError(f"step {index} runs {op.name!r} after {later!r}, which comes later", step=index)
            latest = i
        done.add(i)
        moment = live_bytes + op.workspace + sum(problem.tensors[t].bytes for t in op.outputs)
        taken = taken_over(problem, schedule, index)
        if taken is not None and op.outputs[0] not in live:
            given.add(taken)
            live_bytes -= problem.tensors[taken].bytes
            moment -= problem.tensors[taken].bytes
        for t in op.outputs:
            if t not in live:
                live.add(t)
                live_bytes += problem.tensors[t].bytes
        yield index, live_bytes, moment, op.cost if again else 0
    if position < len(expected):
        raise ScheduleError(f"{problem.ops[expected[position]].name!r} never runs")
    for t in problem.outputs:
        if t not in live:
            raise ScheduleError(f"output {problem.tensors[t].name!r} is never computed")
