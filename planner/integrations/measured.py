"""What compiled halves hold beyond what was predicted, measured on blank tensors, and what that makes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from passes.memory import granule, measure_peak, place, round_up
from passes.run._torch import below_autograd
from passes.run.step import Step
from passes.trace.arguments import state_tensors
from passes.trace.capture import Traced
from passes.trace.first_call import remembered
from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.simulate import simulate

from .partition import Ready


@dataclass(frozen=True)
class Measured:
    """What a step with compiled halves was seen to hold.

    Attributes:
        forward, backward: the highest point of either half above its start.
        more: bytes between the halves above what was predicted (below it, where negative).
    """

    forward: int
    more: int
    backward: int


def measured(model: nn.Module | None, ready: Ready, schedule: Schedule, step: Step, traced: Traced) -> Measured:
    """Run a step with compiled halves twice and measure it; leaves model and generators as they are.

    Args:
        model: whose parameters and buffers to run it on; None for blank ones.
    """
    with torch.random.fork_rng(), below_autograd():
        _Blank(model, step, traced).run()  # what is made once and kept is not of the step
        forward, held, backward = _Blank(model, step, traced).run()
    problem = ready.problem
    first = next(p for p, s in enumerate(schedule) if s == ("compute", ready.tangent_op))
    inputs = sum(problem.tensors[t].bytes for t in _given(ready, traced))
    told = simulate(problem, schedule).resident_bytes[first - 1] - problem.static_bytes - inputs if first else 0
    return Measured(forward, held - told, backward)


def _given(ready: Ready, traced: Traced) -> tuple[int, ...]:
    """Tensors of the Problem that a region is handed; none of a whole step, whose inputs it counts as static."""
    table = ready.as_compiled.storage_tensor
    storages = (ready.aliases.of[p] for p in traced.placeholders[: traced.num_primals])
    return tuple(dict.fromkeys(table[s] for s in storages if s in table))


class _Blank:
    """One run of a step on blank inputs."""

    def __init__(self, model: nn.Module | None, step: Step, traced: Traced) -> None:
        self.step, self.count = step, traced.num_forward_outputs
        with remembered(traced.first_call):
            state = [] if model is None else [t.detach() for t in state_tensors(model, traced.state)]
        primals = traced.placeholders[len(state) : traced.num_primals]
        self.primals = [*state, *(_blank(n, 0) for n in primals)]
        self.tangents = traced.placeholders[traced.num_primals :]
        self.holds_outputs = model is not None  # what regions return is for the code between them to hold
        self.device = self.primals[0].device if self.primals else torch.device("cpu")

    def run(self) -> tuple[int, int, int]:
        """The highest point of the forward above its start, what it leaves, and the backward's above that."""
        results: list[Any] = []
        forward = measure_peak(lambda: results.extend(self.step.forward.forward(list(self.primals))), self.device)
        outputs, values = results[len(self.step.mutated) : self.count], results[self.count :]
        held = self._new_bytes([*(outputs if self.holds_outputs else ()), *values])
        results.clear()
        values += [*(self.primals[i] for i in self.step.saved_primals), *(_blank(n, 1) for n in self.tangents)]
        backward = measure_peak(lambda: list(self.step.backward.forward(values)), self.device)
        outputs.clear()
        return forward, held, backward

    def _new_bytes(self, results: Sequence[Any]) -> int:
        own = {place(t.untyped_storage()) for t in self.primals}
        storages = {place(s): s.nbytes() for t in results for s in [t.untyped_storage()]}
        return sum(round_up(size, granule(self.device)) for p, size in storages.items() if p not in own)


def _blank(node: fx.Node, value: int) -> torch.Tensor:
    like = node.meta["val"]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.fill_(value)


def peak_with(
    problem: Problem, schedule: Schedule, spans: Sequence[tuple[range, range]], seen: Sequence[Measured]
) -> int:
    """The peak of a step whose runs hold what was measured, and which is as predicted around them.

    Args:
        spans: for each run its ops in the forward and in the backward.
    """
    places = {i: (r, late) for r, halves in enumerate(spans) for late, half in enumerate(halves) for i in half}
    found, done = simulate(problem, schedule), set[int]()
    now, level, more, highest = None, problem.static_bytes, 0, 0
    moments = zip(schedule, found.moment_bytes, found.resident_bytes, strict=True)
    for step, moment_bytes, resident_bytes in moments:
        before, now = now, places.get(step.index) if step.kind == "compute" and step.index not in done else now
        if step.kind == "compute":
            done.add(step.index)
        if before is not None and now != before and not before[1]:
            more += seen[before[0]].more
        if now is None:
            highest = max(highest, moment_bytes + more)
        elif now != before:  # the first op of a backward is handed the gradients that it starts from
            own, start = seen[now[0]], resident_bytes if now[1] else level
            highest = max(highest, start + more + (own.backward if now[1] else own.forward))
            more -= own.more if now[1] else 0
        level = resident_bytes
    return highest
