"""Micro-batches in flight: what one stage of a pipeline holds of those whose backward is yet to come.

A step is planned for one micro-batch. While it runs, others wait between their forward and their backward: each holds
what the forward handed to the backward, and its outputs. The schedule has inputs, and gradients to receive, for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from passes.errors import Unsupported
from solvers.problem import Problem
from solvers.replay import replay
from solvers.schedule import Schedule, Step

LOSS = "what the pipeline's loss_fn keeps is not counted: set reserve_mb to {} times the MiB that it saves for a call"


@dataclass(frozen=True)
class Flight:
    """A stage of a pipeline.

    Attributes:
        micro_batches: how many a call of the schedule runs.
        at_once: how many of them, at most, have run forward and not yet backward.
        alternates: whether forwards go on after the first backward, so that gradients are there throughout.
        last: whether the stage is the last one, which keeps all outputs and is sent no gradients.
    """

    micro_batches: int
    at_once: int
    alternates: bool
    last: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not counted, in words."""
        waits = self.last and self.at_once > 1
        return (LOSS.format(self.at_once - 1),) if waits else ()


def flight_of(schedule: Any) -> Flight:
    """What a schedule of `torch.distributed.pipelining` does with its stage.

    Raises:
        Unsupported: it has several stages on a rank, or runs parts of a backward apart.
    """
    kind, stage = type(schedule).__name__, getattr(schedule, "_stage", None)
    if kind not in ("ScheduleGPipe", "Schedule1F1B") or stage is None:
        raise Unsupported(
            f"pipeline schedule {kind}", "pipeline=", "it has several stages on one rank, or splits their backwards, "
            "which a planned step cannot", "Use ScheduleGPipe or Schedule1F1B.",
        )  # fmt: skip
    count = schedule._n_microbatches
    at_once = count if kind == "ScheduleGPipe" else min(count, stage.num_stages - stage.stage_index)
    return Flight(count, at_once, at_once < count, stage.is_last)


def others_bytes(
    problem: Problem, schedule: Schedule, flight: Flight, inputs_bytes: int, outputs: Sequence[int],
    gradients_bytes: int,
) -> int:  # fmt: skip
    """What there is on top of one micro-batch's step at the highest point.

    Args:
        outputs: the tensors of the problem that the step returns.
        gradients_bytes: all gradients, which the first backward leaves.
    """
    waiting, returned = flight.at_once - 1, sum(problem.tensors[t].bytes for t in outputs)
    held = _held_bytes(problem, schedule)
    resident = (flight.micro_batches - 1) * inputs_bytes
    resident += (flight.micro_batches - flight.at_once if flight.last else flight.micro_batches - 1) * returned
    if flight.alternates:  # what was sent last is held until it has arrived: an output, or an input's gradient
        return resident + waiting * held + (inputs_bytes if flight.last else returned)
    if not waiting:
        return resident
    return resident + waiting * held + max(0, gradients_bytes - held)  # the second backward may be the highest point


def _held_bytes(problem: Problem, schedule: Schedule) -> int:
    """What a micro-batch holds between its forward and its backward."""
    level = problem.static_bytes
    for moment in replay(problem, schedule):
        if moment.step == Step("compute", problem.num_forward):
            break
        level = moment.live_bytes
    return level - problem.static_bytes
