"""A captured graph compiled for given sizes under a given limit, and what its two halves hold."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from passes._torch import FakeTensor, StorageWeakRef
from passes.alias import device_of
from passes.codegen import boxed
from passes.exclusive import exclusive, interruptible
from passes.lower import lower
from passes.memory import granule, round_up
from passes.profile import OpProfile
from passes.trace.places import user_level
from planner.budget import Budget
from solvers.problem import Problem
from solvers.schedule import Schedule

from ._torch_compile import (
    Ambient,
    Halves,
    compile_eager,
    compile_inductor,
    is_profiling,
    keeps_graph,
    reentered,
    tracing_context,
)
from .halves import make_halves
from .joint import read_joint
from .partition import Figures, Ready, ready_for


@dataclass(frozen=True, eq=False)
class Settings:
    """The backend's options, resolved."""

    budget: Budget
    room_bytes: int | None
    inductor: bool
    solver: str
    time_limit: float
    gap: float
    cost: Callable[[OpProfile], float]
    timed: bool
    reserve_bytes: int
    inductor_options: dict[str, Any] = field(default_factory=dict)


class Program:
    """One graph compiled for `sizes`.

    Attributes:
        problem, schedule: what was decided; None for a graph without gradients.
        predicted: what it holds, as simulated; `measured` as seen in a first step, None where nobody looked.
        returned: what the latest call returned, with its bytes.
        keeps_outputs: whether what the forward returned counts as held through the backward; `kept` whether the first
            step's caller held it; `held_after_all` whether one did later, once it counted as dropped.
        planning_seconds, compile_seconds: of the latest compilation, the second without the first.
        recomputes: added cost as a share of the step's.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], sizes: dict[str, int], settings: Settings) -> None:
        self.gm, self.inputs, self.sizes, self.settings = gm, inputs, sizes, settings
        self.context, self.ambient = tracing_context(), Ambient()
        self.problem: Problem | None = None
        self._ready: Ready | None = None
        self.schedule: Schedule | None = None
        self.predicted: Figures | None = None
        self.measured: Figures | None = None
        self.watching = self.keeps_outputs = True
        self.kept: bool | None = None
        self.held_after_all = self.noted_kept_graph = False
        self._left = 0  # what the latest forward left, measured
        self.returned: list[tuple[StorageWeakRef, int]] = []
        self.backward_ran: Callable[[], None] = lambda: None
        self.planning_seconds = self.compile_seconds = 0.0
        self.run: Callable[..., Any] = self._not_compiled

    @staticmethod
    def _not_compiled(*_: Any) -> Any:
        raise RuntimeError("a graph is called before it is compiled")

    @property
    def ready(self) -> Ready | None:
        """The step before any decision."""
        return self._ready if self._ready is None or self.keeps_outputs else self._ready.without_outputs

    def count_outputs(self, held: bool) -> bool:
        """From now on count what the forward returned as held through the backward, or as dropped; whether that is new.

        Where it is, the decision is as open as for a new program: the lowest is assumed.
        """
        if self.keeps_outputs == held:
            return False
        self.keeps_outputs = held
        if self.ready is not None:
            self.problem, self.schedule = self.ready.problem, self.ready.lowest
            self.predicted, self.measured = self.ready.figures(self.schedule), None
        return True

    @exclusive()
    def compile(self, choose: Callable[[Program, Ready], Schedule]) -> None:
        """Trace, decide by `choose` and compile; what was compiled before is dropped."""
        start = time.perf_counter()
        self.measured, self.kept, self.watching, self.planning_seconds = None, None, True, 0.0

        def partition(joint: fx.GraphModule, num_fwd_outputs: int) -> Halves:
            began = time.perf_counter()
            halves = self._partition(joint, num_fwd_outputs, choose)
            self.planning_seconds += time.perf_counter() - began
            return halves

        gm = fx.GraphModule(self.gm, copy.deepcopy(self.gm.graph))
        gm.meta = dict(self.gm.meta)
        with reentered(self.context), self.ambient.restored():
            if self.settings.inductor:
                options = self.settings.inductor_options
                self.run = compile_inductor(gm, self.inputs, partition, options, self._watched)
            else:
                self.run = compile_eager(gm, self.inputs, partition, self._op_by_op)
        self.compile_seconds = time.perf_counter() - start - self.planning_seconds

    def _partition(
        self, joint: fx.GraphModule, num_fwd_outputs: int, choose: Callable[[Program, Ready], Schedule]
    ) -> Halves:
        read, settings = read_joint(joint, num_fwd_outputs, self.sizes), self.settings
        device = device_of(next(n for n in read.traced.graph_module.graph.nodes if n.op != "output"))
        ready = ready_for(
            read.traced, lambda aliases, profiles, once: lower(
                read.traced, aliases, profiles, settings.cost, device=device, once=once
            ), timed=settings.timed, fusing=settings.inductor,
        )  # fmt: skip
        self._ready = ready
        with interruptible():
            self.schedule = choose(self, ready if self.keeps_outputs else ready.without_outputs)
        if not self.keeps_outputs:
            ready = ready.without_outputs
        self.problem, self.predicted = ready.problem, ready.figures(self.schedule)
        return make_halves(read, ready.rewritten(self.schedule))

    @property
    def figures(self) -> Figures | None:
        """What is known best: measured where it was, else predicted."""
        return self.measured or self.predicted

    @property
    def overhead(self) -> float:
        """Recompute cost over the cost of the plain step."""
        if self.ready is None or self.schedule is None:
            return 0.0
        return self.ready.overhead(self.schedule)

    # Running the halves ---------------------------------------------------------------------------------------------

    def _op_by_op(self, half: fx.GraphModule, is_backward: bool) -> Callable[..., Any]:
        return self._watched(boxed(half.graph, half, "Half").forward, is_backward)

    def _watched(self, half: Callable[..., Any], is_backward: bool) -> Callable[..., Any]:
        """Measure the half while the program is watched; then it runs as it is."""

        def run(values: list[Any]) -> Any:
            if is_backward:
                self.backward_ran()
                self._note_kept_graph()
            result = self._measure(half, values, is_backward) if self.watching else half(values)
            if is_backward and self.watching:
                self.kept = self.held_after_all or self._is_held()
            elif is_backward and not self.keeps_outputs:
                self.held_after_all = self.held_after_all or self._is_held()
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _note_kept_graph(self) -> None:
        """Say, once, that a backward frees less on its way than was planned."""
        if not self.noted_kept_graph and self.settings.budget.value is not None and keeps_graph():
            self.noted_kept_graph = True
            warnings.warn(
                "this backward of a compiled step keeps its graph (retain_graph=True): what was saved is held until "
                "its end, which the budget does not count. Add the losses and call backward once, or make room with "
                "reserve_mb.", stacklevel=user_level(),
            )  # fmt: skip

    def _is_held(self) -> bool:
        """Whether somebody holds what the latest call returned."""
        return any(not storage.expired() for storage, _ in self.returned)

    def _measure(self, half: Callable[..., Any], values: list[Any], is_backward: bool) -> Any:
        if not self.settings.inductor or self.predicted is None or is_profiling():
            return half(values)
        if any(isinstance(v, FakeTensor) for v in values):
            return half(values)  # nothing is allocated
        if any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in values):
            return half(values)  # an accelerator's peak cannot be read without disturbing the user's own statistics
        dropped = sum(size for storage, size in self.returned if storage.expired()) if is_backward else 0
        result: list[Any] = []
        peak, left = high_and_left(lambda: result.append(half(values)))
        known = self.measured or self.predicted
        if is_backward:
            tangents, held = self.ready.tangent_bytes if self.ready else 0, self._left - dropped
            self.measured = replace(
                known, backward=held + tangents + peak, held=self._left if self.keeps_outputs else held
            )  # fmt: skip
        else:
            self._left, self.measured = left, replace(known, forward=peak, held=left)
        return result.pop()


def high_and_left(run: Callable[[], Any]) -> tuple[int, int]:
    """Highest point and end level of the CPU's memory, above the start, while `run()` executes."""
    from passes._torch import allocator_events

    level = peak = 0
    multiple = granule(torch.device("cpu"))
    for change in allocator_events(run):
        level += round_up(change, multiple) if change > 0 else -round_up(-change, multiple)
        peak = max(peak, level)
    return peak, level
