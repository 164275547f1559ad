"""Micro-batches in flight: what one stage of a pipeline holds of those whose backward is yet to come.

A step is planned for one micro-batch. While it runs, others wait between their forward and their backward: each holds
what the forward handed to the backward, its outputs, and what the loss keeps. The schedule has inputs, and gradients to
receive, for all; since torch 2.15 it allocates them as they come. The peak is that of the stage's forwards and
backwards in the order in which the schedule runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from passes._torch import pytree
from passes.device import kind_of, round_up
from passes.errors import Unsupported
from passes.trace.capture import Traced
from passes.trace.stores import MODEL
from passes.trace.structure import unflatten
from solvers.problem import Problem
from solvers.replay import Moment, replay
from solvers.schedule import Schedule, Step

T = TypeVar("T")
LOSS = "the pipeline's loss is not counted: pass loss_fn=lambda output: ..., which computes it for a micro-batch"


@dataclass(frozen=True)
class LossBytes:
    """What a loss holds above what was there before it.

    Attributes:
        forward, backward: its highest points.
        kept: what it holds between them.
        left: what is there after its backward, besides the gradient that it hands over.
    """

    forward: int = 0
    kept: int = 0
    backward: int = 0
    left: int = 0


@dataclass(frozen=True)
class Flight:
    """A stage of a pipeline.

    Attributes:
        micro_batches: how many a call of the schedule runs.
        at_once: how many of them, at most, have run forward and not yet backward.
        keeps_sent: whether the schedule holds all that it sent until it ends.
        first, last: whether the stage is the first one, which is sent no inputs, or the last one, which keeps all
            outputs and is sent no gradients.
        receives_late: whether memory for what is received is allocated as it comes, and goes after the backward. Inputs
            of the last stage stay: outputs, which it keeps, lead to them.
        adds: whether gradients are there before a call of the schedule.
        loss_fn: computes the loss of a micro-batch from the stage's output; None: not known, or not this stage's.
        loss: what that holds, once it was measured.
    """

    micro_batches: int
    at_once: int
    keeps_sent: bool
    first: bool
    last: bool
    receives_late: bool = False
    adds: bool = False
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    loss: LossBytes | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not counted, in words."""
        return (LOSS,) if self.last and self.loss_fn is None else ()

    def gradients(self, asked: T) -> T | Literal["accumulated"]:
        """What becomes of a micro-batch's: all but the first one's are added to those that are there."""
        return "accumulated" if self.micro_batches > 1 else asked

    @property
    def order(self) -> Iterator[bool]:
        """The stage's forwards (True) and backwards, one by one."""
        yield from [True] * self.at_once
        for _ in range(self.micro_batches - self.at_once):
            yield from (False, True)
        yield from [False] * self.at_once


@dataclass(frozen=True)
class Around:
    """What of a micro-batch lies outside of its step.

    Attributes:
        inputs, outputs: their bytes.
        gradients: those of all parameters, part of the Problem's static bytes.
        arriving: which part of them leaves the backward at which op; empty where that is not known.
    """

    inputs: int
    outputs: int
    gradients: int
    arriving: Mapping[int, int]


def flight_of(schedule: Any, loss_fn: Callable[[Any], torch.Tensor] | None, adds: bool) -> Flight:
    """What a schedule of `torch.distributed.pipelining` does with its stage.

    Args:
        loss_fn, adds: as in `Flight`.

    Raises:
        Unsupported: it has several stages on a rank, or runs parts of a backward apart.
    """
    kind, stage = type(schedule).__name__, getattr(schedule, "_stage", None)
    if kind not in ("ScheduleGPipe", "Schedule1F1B") or stage is None:
        raise Unsupported(
            f"pipeline schedule {kind}", "pipeline=", "it has several stages on one rank, or splits their backwards, "
            "which a planned step cannot", "Use ScheduleGPipe or Schedule1F1B.",
        )  # fmt: skip
    count, all_first = schedule._n_microbatches, kind == "ScheduleGPipe"
    at_once = count if all_first else min(count, stage.num_stages - stage.stage_index)
    own = loss_fn if stage.is_last else None
    late = hasattr(stage, "release_fwd_send_outputs")  # torch >= 2.15
    return Flight(count, at_once, all_first, stage.is_first, stage.is_last, late, adds, own)


def with_loss(flight: Flight | None, traced: Traced, model: nn.Module, device: torch.device) -> Flight | None:
    """The stage with what its loss holds, which is computed for an output of zeros."""
    if flight is None or flight.loss_fn is None or flight.loss is not None or traced.num_outputs == 0:
        return flight
    nodes: Any = traced.graph_module.graph.output_node().args[0]
    made = nodes[len(traced.mutated) : traced.num_forward_outputs]

    def zeros(node: Any, requires_grad: bool) -> torch.Tensor:
        value = node.meta["val"]
        return torch.zeros(value.shape, dtype=value.dtype, device=device, requires_grad=requires_grad)

    nodes = [traced.placeholders[o.input] if o.input is not None else made[o.index] for o in traced.outputs]
    leaves = [zeros(node, leaf.requires_grad) for node, leaf in zip(nodes, traced.outputs, strict=True)]
    inputs = [zeros(node, False) for node in traced.placeholders[len(traced.state) : traced.num_primals]]
    output = unflatten(traced.output_template, leaves, {**unflatten(traced.input_template, inputs), MODEL: model})
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return replace(flight, loss=loss_bytes(flight.loss_fn, output, device))


def loss_bytes(loss_fn: Callable[[Any], torch.Tensor], output: Any, device: torch.device) -> LossBytes:
    """What the loss of such an output holds, by the allocator's events."""
    kind = kind_of(device)
    kept: list[torch.Tensor] = []
    highest, level = _levels(kind.allocations(lambda: kept.append(loss_fn(output)), device), kind.granule)
    above, change = _levels(kind.allocations(lambda: kept[0].backward(), device), kind.granule)
    leaves = [t.grad for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    handed = sum(round_up(g.nbytes, kind.granule) for g in leaves if g is not None)
    return LossBytes(highest, level, level + above, level + change - handed)


def _levels(events: list[tuple[int, int]], granule: int) -> tuple[int, int]:
    """The highest point, and the last."""
    levels = [0, *accumulate(round_up(e, granule) if e > 0 else -round_up(-e, granule) for _, e in events)]
    return max(levels), levels[-1]


def flight_peak(problem: Problem, schedule: Schedule, flight: Flight, around: Around) -> int:
    """Highest point of a call of the pipeline's schedule."""
    return max(_heights(problem, schedule, flight, around))


def _heights(problem: Problem, schedule: Schedule, flight: Flight, around: Around) -> Iterator[int]:
    """How high each forward and each backward goes, with the loss, and what is there at the end."""
    loss, count = flight.loss or LossBytes(), flight.micro_batches
    forward, backward, held = _halves(problem, schedule)
    highest = max((m.moment_bytes for m in forward), default=problem.static_bytes)
    missing = 0 if flight.adds else around.gradients
    waiting = done = 0
    for is_forward in flight.order:
        waiting -= not is_forward
        others = _received(flight, around, waiting, done) + _left(flight, around, done) + done * loss.left
        others += waiting * (held + loss.kept) - missing
        if is_forward:
            yield others + max(highest, problem.static_bytes + held + loss.forward)
            waiting += 1
        else:
            arrived = _arrived(backward, around.arriving, missing)
            own = max(m.moment_bytes + there for m, there in zip(backward, arrived, strict=True))
            own += 2 * loss.left  # the loss itself, and what its backward starts from
            yield others + max(own, problem.static_bytes + held + loss.backward)
            missing, done = 0, done + 1
    merged = count * around.outputs if flight.last else 0
    received = _received(flight, around, 0, done - 1)
    yield problem.static_bytes + received + _left(flight, around, done) + done * loss.left + merged


def _received(flight: Flight, around: Around, waiting: int, done: int) -> int:
    """Inputs of the other micro-batches, and memory for gradients of their outputs."""
    others = flight.micro_batches - 1
    if flight.receives_late:
        return (others if flight.first else waiting + done * flight.last) * around.inputs
    return others * (around.inputs + (0 if flight.last else around.outputs))


def _halves(problem: Problem, schedule: Schedule) -> tuple[list[Moment], list[Moment], int]:
    """The computes of the forward, those of the backward, and what is held between them."""
    moments = list(replay(problem, schedule))
    boundary = next(i for i, m in enumerate(moments) if m.step == Step("compute", problem.num_forward))
    level = moments[boundary - 1].live_bytes if boundary else problem.static_bytes
    halves = moments[:boundary], moments[boundary:]
    forward, backward = ([m for m in half if m.step.kind == "compute"] for half in halves)
    return forward, backward, level - problem.static_bytes


def _arrived(backward: list[Moment], arriving: Mapping[int, int], missing: int) -> list[int]:
    """How much of the gradients that are missing is there before each op; all of it where that is not known."""
    if not missing or not arriving:
        return [missing] * len(backward)
    return list(accumulate((arriving.get(m.step.index, 0) for m in backward), initial=0))[:-1]


def _left(flight: Flight, around: Around, done: int) -> int:
    """Outputs and gradients of inputs that the schedule still holds of micro-batches whose backward has run."""
    sent = done if flight.keeps_sent else min(done, 1)
    outputs = done if flight.last or flight.keeps_sent else int(1 < flight.at_once <= done + 1)
    outputs *= flight.last or not flight.receives_late
    return outputs * around.outputs + (0 if flight.first else sent * around.inputs)
