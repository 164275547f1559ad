"""A traced step and a budget in, its two halves out: profiled, solved, rewritten, proved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from torch import fx

from passes.alias import Aliases, alias
from passes.lower import Lowered
from passes.ops import is_random
from passes.profile import OpProfile, profile
from passes.rewrite import Rewritten, rewrite
from passes.trace.capture import Traced
from passes.verify import verify
from solvers import minimum_budget, solve
from solvers.problem import Problem
from solvers.schedule import Schedule, plain_order, with_frees
from solvers.simulate import simulate

from ._torch_compile import outside_modes
from ._torch_inductor import HELD, WRITTEN
from .fusion import Fused, fuse
from .kernels import kinds

SECONDS_FOR_MINIMUM = 10.0
# (aliases, profiles, ops that run once) -> the Problem of the step
ToProblem = Callable[[Aliases, dict[fx.Node, OpProfile], Sequence[fx.Node]], Lowered]


@dataclass(frozen=True)
class Figures:
    """What one call of a graph holds, in bytes above its own inputs.

    Attributes:
        forward, backward: the highest point of either half.
        held: what stays between them: saved tensors and outputs.
        gradients: what the backward returns.
        outputs: what the forward returns.
    """

    forward: int
    backward: int
    held: int
    gradients: int
    outputs: int


@dataclass(frozen=True, eq=False)
class Ready:
    """A traced step before any decision, as a compiler sees it."""

    traced: Traced
    aliases: Aliases
    profiles: dict[fx.Node, OpProfile]
    lowered: Lowered
    fused: Fused | None

    @property
    def problem(self) -> Problem:
        """The step as the solvers see it: as the compiler will fuse it, where it does."""
        return self.fused.problem if self.fused else self.lowered.problem

    @cached_property
    def tangent_op(self) -> int:
        """Where the backward starts in `problem`."""
        return self.fused.ops.index(self.lowered.tangent_op) if self.fused else self.lowered.tangent_op

    @property
    def as_compiled(self) -> Lowered:
        """`problem` with what its ops and tensors are in the graph."""
        if self.fused is None:
            return self.lowered
        own, whole = self.lowered, self.lowered.problem
        nodes = tuple(own.nodes[i] for i in self.fused.ops)
        kept = [t for i in self.fused.ops for t in whole.ops[i].outputs]
        storages = tuple(own.storages[t] for t in kept)
        return replace(
            own, problem=self.problem, nodes=nodes, storages=storages, rng_state={}, tangent_op=self.tangent_op,
            tangents=tuple(kept.index(t) for t in own.tangents),
            node_op={n: i for i, n in enumerate(nodes) if n is not None},
            storage_tensor={s: t for t, s in enumerate(storages) if s is not None},
        )  # fmt: skip

    def decide(
        self, budget_bytes: int | None, *, solver: str, time_limit: float, gap: float, between: int = 0, after: int = 0
    ) -> Schedule:
        """The cheapest schedule found under a budget in which the graph's own inputs are counted.

        Args:
            between: bytes that others need while this graph waits between its halves.
            after: bytes that others hold while its backward runs.

        Raises:
            BudgetError: nothing found fits.
        """
        if budget_bytes is None:
            return self.plain
        problem = self._among(between, after)
        return solve(problem, budget_bytes, solver=solver, time_limit=time_limit, gap=gap).schedule

    def decide_held(self, level: float, *, solver: str, time_limit: float, gap: float) -> Schedule:
        """The cheapest schedule found that holds little between the halves, whatever else they need.

        Args:
            level: 0 holds the least known to work, 1 what the step without recompute holds.
        """
        least, plain = self._held_range
        budget = least + int(level * max(0, plain - least))
        return self.decide(budget, solver=solver, time_limit=time_limit, gap=gap, between=self.plain_peak)

    def _among(self, between: int, after: int) -> Problem:
        """The step with what others need while it runs."""
        first = self.tangent_op
        more = [0] * first + [max(between, after)] + [after] * (len(self.problem.ops) - first - 1)
        ops = [replace(op, workspace=op.workspace + m) for op, m in zip(self.problem.ops, more, strict=True)]
        return replace(self.problem, ops=tuple(ops))

    @cached_property
    def lowest(self) -> Schedule:
        """The schedule with the smallest peak known to work."""
        return minimum_budget(self.problem, time_limit=SECONDS_FOR_MINIMUM).schedule

    @cached_property
    def _held_range(self) -> tuple[int, int]:
        """The smallest peak known to work, and the plain one, with as much again in use between the halves."""
        strained = self._among(self.plain_peak, 0)
        plain = simulate(strained, self.plain).peak_bytes
        return minimum_budget(strained, time_limit=SECONDS_FOR_MINIMUM).minimum_bytes, plain

    @cached_property
    def plain(self) -> Schedule:
        """The step without recompute."""
        return with_frees(self.problem, plain_order(self.problem))

    @cached_property
    def plain_peak(self) -> int:
        """Its peak, the graph's own inputs included."""
        return self.peak_bytes(self.plain)

    def peak_bytes(self, schedule: Schedule) -> int:
        """The predicted peak, all that the Problem counts included."""
        return simulate(self.problem, schedule).peak_bytes

    @property
    def tangent_bytes(self) -> int:
        """What the backward is handed."""
        return sum(self.problem.tensors[t].bytes for t in self.problem.ops[self.tangent_op].outputs)

    def overhead(self, schedule: Schedule) -> float:
        """Recompute cost over the cost of the plain step."""
        return self.problem.overhead(simulate(self.problem, schedule).added_cost)

    def whole(self, schedule: Schedule) -> Schedule:
        """The schedule with what the compiler inlines."""
        return self.fused.unfused(schedule) if self.fused else schedule

    def rewritten(self, schedule: Schedule) -> Rewritten:
        """The schedule as two graphs, proved.

        Their nodes have in their meta `HELD`, for what the backward takes and others hold as well, and `WRITTEN`, for
        what is planned to be in memory rather than computed where it is read.
        """
        with outside_modes():  # views are tried out on tensors without data
            rewritten = rewrite(self.traced, self.aliases, self.lowered, self.whole(schedule))
            verify(self.traced, rewritten)
        pinned = {self.lowered.problem.tensors[t].name for t in self.lowered.problem.pinned}
        given = rewritten.backward.graph.find_nodes(op="placeholder")
        for node, name in zip_longest(given, rewritten.saved_names):
            node.meta[HELD] = (name or node.name) in pinned
        kept = {n.name for i in self.fused.ops if (n := self.lowered.nodes[i]) is not None} if self.fused else set()
        for node in (*rewritten.forward.graph.nodes, *rewritten.backward.graph.nodes):
            node.meta[WRITTEN] = node.meta.get("source") in kept
        return rewritten

    @cached_property
    def without_outputs(self) -> Ready:
        """The same, where nobody holds what the forward returned once it has ended."""
        own = self.lowered.problem
        held = tuple(t for t in own.outputs if own.tensors[t].category != "output")
        lowered = replace(self.lowered, problem=replace(own, outputs=held))
        fused = fuse(lowered.problem, kinds(lowered, self.profiles)) if self.fused else None
        return replace(self, lowered=lowered, fused=fused)

    def figures(self, schedule: Schedule) -> Figures:
        """What the schedule holds, as simulated."""
        found = simulate(self.problem, schedule)
        boundary = next(p for p, s in enumerate(schedule) if s == ("compute", self.tangent_op))
        static = self.problem.static_bytes
        return Figures(
            forward=max(found.moment_bytes[:boundary], default=static) - static,
            backward=max(found.moment_bytes[boundary:], default=static) - static,
            held=found.resident_bytes[boundary - 1] - static if boundary else 0,
            gradients=self._returned_bytes(late=True), outputs=self._returned_bytes(late=False),
        )  # fmt: skip

    def _returned_bytes(self, late: bool) -> int:
        """What one of the halves returns."""
        problem = self.problem
        returned = [t for t in problem.pinned if (problem.producer[t] >= self.tangent_op) == late]
        return sum(problem.tensors[t].bytes for t in returned)


def ready_for(traced: Traced, to_problem: ToProblem, *, timed: bool = False, fusing: bool = False) -> Ready:
    """Everything before the decision. Random ops run once: what they draw is kept, or its seed where the compiler draws
    from seeds.

    Raises:
        Unsupported: the graph holds something that a partition of ours would not keep.
    """
    graph = traced.graph_module.graph
    aliases = alias(graph)
    with outside_modes():
        profiles = profile(graph, timed=timed)
    once = [n for n in graph.nodes if n.op == "call_function" and is_random(n)]
    lowered = _out_of_place(to_problem(aliases, profiles, once))
    fused = fuse(lowered.problem, kinds(lowered, profiles)) if fusing else None
    return Ready(traced, aliases, profiles, lowered, fused)


def _out_of_place(lowered: Lowered) -> Lowered:
    """AOT autograd and Inductor take functional graphs: what runs in place is theirs to decide."""
    ops = tuple(replace(op, reuse=()) for op in lowered.problem.ops)
    return replace(lowered, problem=replace(lowered.problem, ops=ops))
