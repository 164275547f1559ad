"""rewrite: joint graph + Schedule -> a forward and a backward GraphModule that execute exactly that schedule.

Each compute of the schedule becomes one node (its in-place twin where the schedule lets it take over an input); a view
is taken from its base, in as few steps as give it, right before its first use; fx's generated code drops every value
after its last use. What is executed is what was simulated. Two computes are one node where a batch norm's statistics
and its result are found one after the other (`passes.fuse.rules.join_batch_norms`): what they need besides inputs and
results is the same. So are the halves of a convolution's backward where there is room and no allocator to foretell
(`join_convolutions`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from solvers.replay import Moment, copies, replay
from solvers.schedule import Schedule, Step

from .alias import Aliases, is_view
from .codegen import Handover, boxed, resumed
from .emitter import Emitter, Leaving
from .errors import VerificationError
from .fuse.rules import join_batch_norms, join_convolutions
from .lower import Lowered
from .run.arena import Spacers, Spacing
from .trace.capture import Traced


@dataclass(frozen=True)
class Rewritten:
    """The two halves of a planned step.

    Attributes:
        forward: takes the primals; returns new values of mutated primals, the outputs, then the saved tensors.
        backward: takes `[saved tensors, saved primals, tangents]`; its graph returns one gradient or None per primal,
            and its code yields them in groups (`passes.codegen.ResumedCodeGen`).
        num_forward_outputs: how many values of `forward` come before the saved tensors.
        saved_names: what is saved, by the graph's names.
        saved_primals: which primals the backward reads.
        handovers: which gradients leave before the backward's end, and where.
        spacers: what asks for the halves' spacers.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward_outputs: int
    saved_names: tuple[str, ...]
    saved_primals: tuple[int, ...]
    handovers: tuple[Handover, ...] = ()
    spacers: Spacers = field(default_factory=Spacers, compare=False)

    @property
    def leaves(self) -> tuple[tuple[int, ...], ...]:
        """The primals whose gradients leave together, group by group, the last at the backward's end."""
        gradients: Any = self.backward.graph.output_node().args[0]
        groups = tuple(handover.outputs for handover in self.handovers)
        early = {i for group in groups for i in group}
        return (*groups, tuple(i for i, g in enumerate(gradients) if g is not None and i not in early))


def rewrite(
    traced: Traced, aliases: Aliases, lowered: Lowered, schedule: Schedule, peak_bytes: int | None = None,
    *, as_scheduled: bool = False, spacing: Spacing | None = None,
) -> Rewritten:  # fmt: skip
    """Emit `schedule` as two GraphModules.

    Args:
        peak_bytes: what may be held at once, by the count of `lowered`; as much as the schedule holds, if not given.
        as_scheduled: the halves of a convolution's backward are not joined, so that a caching allocator is asked for
            what the schedule says, in that order.
        spacing: where the halves have spacers.
    """
    boundary = schedule.index(Step("compute", lowered.tangent_op))
    moments = list(replay(lowered.problem, schedule))
    saved = _crossing(lowered, schedule, moments, boundary)
    forward = Emitter(aliases, lowered)
    for node in traced.placeholders[: traced.num_primals]:
        forward.placeholder(node)
    forward.emit(schedule, moments, range(boundary))
    outputs: Any = traced.graph_module.graph.output_node().args[0]
    returned = [forward.result(n) for n in outputs[: traced.num_forward_outputs]]
    forward.output([*returned, *(forward.current[t] for t in saved)])
    join_batch_norms(forward.graph)
    backward = Emitter(aliases, lowered)
    handed: Any = forward.graph.output_node().args[0]
    for t, source in zip(saved, handed[traced.num_forward_outputs :], strict=True):
        backward.saved(t, source)
    read_primals = _read_primals(traced, aliases, lowered, schedule[boundary:])
    for i in read_primals:
        backward.placeholder(traced.placeholders[i])
    for node in traced.placeholders[traced.num_primals :]:
        backward.tangent(node)
    leaving = _leaving(traced, aliases, lowered, schedule, boundary)
    backward.emit(schedule, moments, range(boundary + 1, len(schedule)), leaving)
    backward.output([backward.resolve(n) for n in traced.gradients])
    join_batch_norms(backward.graph)
    if not as_scheduled:
        join_convolutions(backward.graph, peak_bytes or max(moment.moment_bytes for moment in moments))
    handovers = backward.handovers()
    root, ask = traced.graph_module, Spacers(spacing.growth, spacing.workspaces) if spacing else Spacers()
    return Rewritten(
        forward=boxed(forward.graph, root, "Forward", forward.spaced(spacing, ask)),
        backward=resumed(backward.graph, root, "Backward", handovers, backward.spaced(spacing, ask)),
        num_forward_outputs=traced.num_forward_outputs,
        saved_names=tuple(lowered.problem.tensors[t].name for t in saved),
        saved_primals=tuple(read_primals),
        handovers=handovers,
        spacers=ask,
    )


def reads(traced: Traced, rewritten: Rewritten) -> tuple[tuple[int, ...], ...]:
    """Which parameters the backward reads before each handover, and after the last."""
    graph, parameters = rewritten.backward.graph, {i for i, e in enumerate(traced.state) if e.is_parameter}
    inputs = [n for n in graph.nodes if n.op == "placeholder"][len(rewritten.saved_names) :]
    roots = {n: {i} & parameters for n, i in zip(inputs, rewritten.saved_primals, strict=False)}
    after, found = {handover.after for handover in rewritten.handovers}, [set[int]()]
    for node in (n for n in graph.nodes if n.op == "call_function"):
        read = set().union(*(roots.get(a, ()) for a in node.all_input_nodes))
        if is_view(node):
            roots[node] = read
        found[-1] |= read
        if node.name in after:
            found.append(set())
    return tuple(tuple(sorted(each)) for each in found)


def _crossing(lowered: Lowered, schedule: Schedule, moments: list[Moment], boundary: int) -> list[int]:
    """Tensors written before the boundary whose copy a step after it reads, in order of writing.

    At the boundary itself a region's inputs are read: whoever runs the step holds them until then.
    """
    gradients, first_read = _returned_by_backward(lowered), dict[int, int]()
    for position, moment in enumerate(moments[boundary + 1 :], boundary + 1):
        for t in moment.reads:
            first_read.setdefault(t, position)
    crossing = [c for c in copies(lowered.problem, schedule) if c.made < boundary < c.until]
    return [c.tensor for c in crossing if c.tensor in gradients or first_read.get(c.tensor, c.until + 1) <= c.until]


def _returned_by_backward(lowered: Lowered) -> frozenset[int]:
    """Forward tensors that are gradients themselves (the gradient of `w` in `(w * x).sum()` with x saved)."""
    return frozenset(
        t for t, tensor in enumerate(lowered.problem.tensors)
        if tensor.category == "gradient" and lowered.problem.producer[t] < lowered.problem.num_forward
    )  # fmt: skip


def _read_primals(traced: Traced, aliases: Aliases, lowered: Lowered, schedule: Schedule) -> list[int]:
    position = _positions(traced, aliases, lowered)
    read = set(_last_reads(traced, aliases, lowered, schedule))
    for gradient in traced.gradients:
        if isinstance(gradient, fx.Node):
            read.update(position[s] for s in aliases.storages(gradient) if s in position)
    return sorted(read)


def _last_reads(traced: Traced, aliases: Aliases, lowered: Lowered, schedule: Schedule) -> dict[int, int]:
    """The primals that ops of the schedule read, each with the last step that does."""
    position = _positions(traced, aliases, lowered)
    last: dict[int, int] = {}
    for place, (kind, i) in enumerate(schedule):
        node = lowered.nodes[i] if kind == "compute" else None
        if node is not None:
            last.update(dict.fromkeys(_primals_of(node, aliases, position), place))
    return last


def _positions(traced: Traced, aliases: Aliases, lowered: Lowered) -> dict[Any, int]:
    """Which primal each storage is, except for inputs of a region, which are held like tensors of its own."""
    primals = enumerate(traced.placeholders[: traced.num_primals])
    return {aliases.of[p]: i for i, p in primals if aliases.of[p] not in lowered.storage_tensor}


def _primals_of(node: fx.Node, aliases: Aliases, position: dict[Any, int]) -> list[int]:
    return [position[s] for a in node.all_input_nodes for s in aliases.storages(a) if s in position]


def _leaving(
    traced: Traced, aliases: Aliases, lowered: Lowered, schedule: Schedule, boundary: int
) -> Leaving:
    """The gradients, by primal, that leave after each step of the schedule.

    Raises:
        VerificationError: a parameter is read once its gradient has left, in a schedule that counts on that.
    """
    place = {step.index: p for p, step in enumerate(schedule[boundary:], boundary) if step.kind == "compute"}
    last = _last_reads(traced, aliases, lowered, schedule)
    found: Leaving = {}
    for leave in lowered.leaves:
        after = max(place[leave.after], *(last.get(i, -1) for i in leave.primals))
        if after > place[leave.after] and lowered.nodes[leave.after] is None:
            name = traced.placeholders[leave.primals[0]].name
            raise VerificationError(f"the schedule reads {name!r} once its gradient has left", node=name)
        found[after] = (*found.get(after, ()), *((i, traced.gradients[i]) for i in leave.primals))
    return found
