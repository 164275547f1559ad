"""The one replay of a schedule: what happens at each step, byte by byte. Everything that tells of a schedule folds it.

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
from typing import NamedTuple

from .errors import ScheduleError
from .problem import Op, Problem
from .schedule import Schedule, Step, freed_after


class Moment(NamedTuple):
    """One step of a schedule, replayed.

    Attributes:
        step: the step itself.
        again: whether it computes an op that has run before.
        reads: what it reads: a second run reads its replay inputs, too.
        born: outputs that become live. The others were live already, and their new copies are dropped.
        donated: the input into whose memory the first output is written.
        live_bytes: resident after it, static bytes included.
        moment_bytes: resident during it: for a compute, inputs + outputs + workspace + all else that is live.
    """

    step: Step
    again: bool
    reads: tuple[int, ...]
    born: tuple[int, ...]
    donated: int | None
    live_bytes: int
    moment_bytes: int


Raw = tuple[Step, bool, tuple[int, ...], tuple[int, ...], int | None, int, int]


def replay(problem: Problem, schedule: Schedule) -> Iterator[Moment]:
    """What happens at each step of `schedule`.

    Raises:
        ScheduleError: the schedule breaks a rule; the message names the step, the op and the tensor.
    """
    return map(Moment._make, raw_replay(problem, schedule))


def raw_replay(problem: Problem, schedule: Schedule) -> Iterator[Raw]:
    """`replay` without names, for `simulate`, which solvers call often."""
    ops, pinned, sizes = problem.ops, problem.pinned, [t.bytes for t in problem.tensors]
    required = [i for i, op in enumerate(ops) if not op.optional]
    live: set[int] = set()
    freeable = sizes.copy()  # 0 where another tensor has taken the memory over
    done: set[int] = set()
    live_bytes, first_runs, latest = problem.static_bytes, 0, 0
    for position, step in enumerate(schedule):
        kind, i = step
        if kind == "free":
            if i not in live or i in pinned:
                raise _free_error(problem, position, i)
            live.discard(i)
            live_bytes -= freeable[i]
            freeable[i] = sizes[i]
            yield step, False, (), (), None, live_bytes, live_bytes
            continue
        if kind != "compute" or not 0 <= i < len(ops):
            raise _unknown(position, kind, i)
        op, again = ops[i], i in done
        reads = op.inputs + op.replay_inputs if again else op.inputs
        if not live.issuperset(reads) or (again and not op.recomputable):
            raise _compute_error(problem, position, op, again, reads, live)
        if not again:
            if i < latest or not (op.optional or required[first_runs] == i):
                raise _order_error(problem, position, op, latest, required[first_runs:])
            done.add(i)
            first_runs, latest = first_runs + (not op.optional), i
        born, donated = op.outputs, None
        if not live.isdisjoint(born):
            born = tuple([t for t in born if t not in live])
        if op.reuse and op.outputs[:1] == born[:1]:
            donated = _donated(schedule, position, op)
            if donated is not None:
                live_bytes -= sizes[donated]
                freeable[donated] = 0
        result_bytes = sum([sizes[t] for t in op.outputs])
        moment_bytes = live_bytes + op.workspace + result_bytes
        live_bytes += result_bytes if born is op.outputs else sum([sizes[t] for t in born])
        live.update(born)
        yield step, again, reads, born, donated, live_bytes, moment_bytes
    _check_complete(problem, required[first_runs:], live)


class Copy(NamedTuple):
    """Memory that holds a tensor: during the steps from `made` until `until`, which is excluded.

    `until` is where it is freed, where another tensor takes it over, or the end of the schedule. `again` tells
    whether a recompute made it. The result of a recompute that finds its old copy live lasts for one step.
    """

    tensor: int
    made: int
    until: int
    again: bool


def copies(problem: Problem, schedule: Schedule) -> list[Copy]:
    """Every copy that `schedule` makes of a tensor, in the order of making. With the workspace and static bytes, those
    at a step are its `moment_bytes`.
    """
    found: list[Copy] = []
    place: dict[int, int] = {}
    for position, moment in enumerate(replay(problem, schedule)):
        ended = moment.step.index if moment.step.kind == "free" else moment.donated
        last = None if ended is None else place.pop(ended, None)
        if last is not None:
            found[last] = found[last]._replace(until=position)
        for t in problem.ops[moment.step.index].outputs if moment.step.kind == "compute" else ():
            if t in moment.born:
                place[t] = len(found)
            found.append(Copy(t, position, len(schedule) if t in moment.born else position + 1, moment.again))
    return found


def _donated(schedule: Schedule, position: int, op: Op) -> int | None:
    freed = freed_after(schedule, position)
    return next((t for t in op.reuse if t in freed), None)


def _unknown(position: int, kind: str, index: int) -> ScheduleError:
    return ScheduleError(f"step {position} is {kind!r} {index}, which this problem does not have", step=position)


def _free_error(problem: Problem, position: int, t: int) -> ScheduleError:
    if not 0 <= t < len(problem.tensors):
        return _unknown(position, "free", t)
    why = "an output of the step" if t in problem.pinned else "which is not live"
    return ScheduleError(f"step {position} frees {problem.tensors[t].name!r}, {why}", step=position)


def _compute_error(
    problem: Problem, position: int, op: Op, again: bool, reads: tuple[int, ...], live: set[int]
) -> ScheduleError:
    if again and not op.recomputable:
        return ScheduleError(f"step {position} recomputes {op.name!r}, which must run once", step=position)
    name = next(problem.tensors[t].name for t in reads if t not in live)
    return ScheduleError(f"step {position}: {op.name!r} reads {name!r}, which is not live", step=position)


def _order_error(problem: Problem, position: int, op: Op, latest: int, required: list[int]) -> ScheduleError:
    if not op.optional and problem.ops[required[0]] is not op:
        wanted = problem.ops[required[0]].name
        return ScheduleError(f"step {position} runs {op.name!r} where {wanted!r} is expected", step=position)
    later = problem.ops[latest].name
    return ScheduleError(f"step {position} runs {op.name!r} after {later!r}, which comes later", step=position)


def _check_complete(problem: Problem, required: list[int], live: set[int]) -> None:
    if required:
        raise ScheduleError(f"{problem.ops[required[0]].name!r} never runs")
    for t in problem.outputs:
        if t not in live:
            raise ScheduleError(f"output {problem.tensors[t].name!r} is never computed")
