"""rewrite: joint graph + Schedule -> a forward and a backward GraphModule that execute exactly that schedule.

Each compute of the schedule becomes one node (its in-place twin where the schedule lets it take over an input); a view
is taken from its base, in as few steps as give it, right before its first use; fx's generated code drops every value
after its last use. What is executed is what was simulated. Two computes are one node where a batch norm's statistics
and its result are found one after the other (`passes.fuse.rules.join_batch_norms`): what they need besides inputs and
results is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from solvers.replay import Moment, copies, replay
from solvers.schedule import Schedule, Step, freed_after

from .alias import Aliases, Storage, device_of, is_view
from .codegen import Handover, boxed, resumed
from .errors import VerificationError
from .exclusive import interrupt_point
from .fuse.match import item
from .fuse.normal_form import shortest
from .fuse.rules import join_batch_norms
from .lower import Lowered
from .ops import donations, is_random
from .run.random import get_rng_state, run_with_rng_state
from .trace.capture import Traced

Leaving = dict[int, tuple[tuple[int, fx.Node], ...]]  # after a step of the schedule: gradients, by primal
NOTHING: Leaving = {}


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
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward_outputs: int
    saved_names: tuple[str, ...]
    saved_primals: tuple[int, ...]
    handovers: tuple[Handover, ...] = ()

    @property
    def leaves(self) -> tuple[tuple[int, ...], ...]:
        """The primals whose gradients leave together, group by group, the last at the backward's end."""
        gradients: Any = self.backward.graph.output_node().args[0]
        groups = tuple(handover.outputs for handover in self.handovers)
        early = {i for group in groups for i in group}
        return (*groups, tuple(i for i, g in enumerate(gradients) if g is not None and i not in early))


def rewrite(traced: Traced, aliases: Aliases, lowered: Lowered, schedule: Schedule) -> Rewritten:
    """Emit `schedule` as two GraphModules."""
    boundary = schedule.index(Step("compute", lowered.tangent_op))
    moments = list(replay(lowered.problem, schedule))
    saved = _crossing(lowered, schedule, moments, boundary)
    forward = _Emitter(aliases, lowered)
    for node in traced.placeholders[: traced.num_primals]:
        forward.placeholder(node)
    forward.emit(schedule, moments, range(boundary))
    outputs: Any = traced.graph_module.graph.output_node().args[0]
    returned = [forward.result(n) for n in outputs[: traced.num_forward_outputs]]
    forward.output([*returned, *(forward.current[t] for t in saved)])
    join_batch_norms(forward.graph)
    backward = _Emitter(aliases, lowered)
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
    handovers = backward.handovers()
    root = traced.graph_module
    return Rewritten(
        forward=boxed(forward.graph, root, "Forward"),
        backward=resumed(backward.graph, root, "Backward", handovers),
        num_forward_outputs=traced.num_forward_outputs,
        saved_names=tuple(lowered.problem.tensors[t].name for t in saved),
        saved_primals=tuple(read_primals),
        handovers=handovers,
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
    """Which primal each storage is, but for inputs of a region, which are held like tensors of its own."""
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


def _mark() -> None:
    """Where gradients leave, in a graph that is being built."""


class _Emitter:
    """Builds one of the two graphs, step by step."""

    def __init__(self, aliases: Aliases, lowered: Lowered) -> None:
        self.aliases, self.lowered = aliases, lowered
        self.graph = fx.Graph()
        self.current: dict[int, fx.Node] = {}
        self.static: dict[fx.Node, fx.Node] = {}
        self.views: dict[tuple[Any, ...], fx.Node] = {}
        self.marks: list[tuple[fx.Node, tuple[int, ...]]] = []

    def placeholder(self, node: fx.Node) -> None:
        new = self._copy_meta(self.graph.placeholder(node.name), node)
        tensor = self.lowered.storage_tensor.get(self.aliases.of[node])  # type: ignore[arg-type]
        if tensor is None:
            self.static[node] = new
        else:  # an input of a region, held like a tensor of its own
            self.current[tensor] = new

    def tangent(self, node: fx.Node) -> None:
        new = self._copy_meta(self.graph.placeholder(node.name), node)
        storage = self.aliases.of[node]
        self.current[self.lowered.storage_tensor[storage]] = new  # type: ignore[index]

    def saved(self, tensor: int, source: fx.Node) -> None:
        self.current[tensor] = self._copy_meta(self.graph.placeholder(source.name), source)

    def output(self, values: list[Any]) -> None:
        self.graph.output(tuple(values))

    def emit(self, schedule: Schedule, moments: list[Moment], positions: range, leaving: Leaving = NOTHING) -> None:
        for position in positions:
            interrupt_point()
            if schedule[position].kind == "compute":
                self._compute(moments[position], freed_after(schedule, position))
            if position in leaving:
                for _, gradient in leaving[position]:
                    self.resolve(gradient)
                self.marks.append((self.graph.call_function(_mark), tuple(i for i, _ in leaving[position])))

    def handovers(self) -> tuple[Handover, ...]:
        """Which outputs leave before the end, after which node, in place of the marks."""
        found: dict[fx.Node, tuple[int, ...]] = {}
        waiting: tuple[int, ...] = ()
        for mark, outputs in self.marks:
            waiting, before = waiting + outputs, mark.prev
            self.graph.erase_node(mark)
            if before.op not in ("placeholder", "root"):
                found[before] = (*found.get(before, ()), *waiting)
                waiting = ()
        results: Any = self.graph.output_node().args[0]
        early = {i for outputs in found.values() for i in outputs}
        if found and all(r is None or i in early for i, r in enumerate(results)):
            found.popitem()  # the last to leave do so at the end
        return tuple(Handover(node.name, outputs) for node, outputs in found.items())

    def resolve(self, node: Any) -> Any:
        """The new graph's value for a node of the joint graph, taking views of its base where needed."""
        if not isinstance(node, fx.Node):
            return node
        if node in self.static:
            return self.static[node]
        if node.op == "get_attr":
            self.static[node] = self._copy_meta(self.graph.get_attr(str(node.target)), node)
            return self.static[node]
        if is_view(node):
            return self._view(node)
        storage = self.aliases.of[node]
        assert isinstance(storage, Storage)
        try:
            return self.current[self.lowered.storage_tensor[storage]]
        except KeyError:
            raise VerificationError(f"{node.name!r} is read where it is not live", node=node.name) from None

    def result(self, node: Any) -> Any:
        """The same for what a caller gets: a view is a tensor of its own, so that who looks for holders finds it."""
        seen = isinstance(node, fx.Node) and node not in self.static and is_view(node)
        return self._view(node, in_short=False) if seen else self.resolve(node)

    def _view(self, node: fx.Node, in_short: bool = True) -> fx.Node:
        same, earlier = shortest(node) if in_short else (node, None)
        if same is not node:
            found: fx.Node = self.resolve(same)
            return found
        sources = tuple(self.resolve(earlier or a) for a in node.all_input_nodes)
        key = (node.target, sources, repr(node.args[1:]), repr(node.kwargs))
        if key not in self.views:
            mapping = dict(zip(node.all_input_nodes, sources, strict=True))
            self.views[key] = self._copy_meta(self.graph.node_copy(node, lambda a: mapping[a]), node)
        return self.views[key]

    def _compute(self, moment: Moment, dropped: frozenset[int]) -> None:
        i, again = moment.step.index, moment.again
        node = self.lowered.nodes[i]
        if node is None:
            self._special(i)
            return
        new = self._replay(i, node) if again and is_random(node) else self.graph.node_copy(node, self.resolve)
        if moment.donated is not None:
            self._write_over(moment.donated, node, new)
        self._copy_meta(new, node)
        new.meta["recompute_of"] = node.name if again else None
        for t in moment.born:  # what was live keeps its copy, as simulated
            if t not in dropped:  # a result that nobody reads
                storage = self.lowered.storages[t]
                assert storage is not None
                self.current[t] = self._output(new, storage)

    def _write_over(self, taken: int, node: fx.Node, new: fx.Node) -> None:
        """Make `new` write its result into the memory of the argument that lives in tensor `taken`."""
        for position, twin in donations(node).items():
            source = node.args[position]
            storage = self.aliases.of[source] if isinstance(source, fx.Node) else None
            if isinstance(storage, Storage) and self.lowered.storage_tensor.get(storage) == taken:
                new.target = twin.target
                if twin.out is not None:
                    new.kwargs = {**new.kwargs, twin.out: new.args[position]}
                return
        raise VerificationError(f"{node.name!r} cannot write over {taken}", node=node.name)

    def _output(self, new: fx.Node, storage: Storage) -> fx.Node:
        if not isinstance(self.aliases.of[storage.node], tuple):
            return new
        return item(self.graph, new, storage.index)

    def _special(self, i: int) -> None:
        """Taking a generator's state; gradient copies are autograd's own and leave no node."""
        tensors = self.lowered.problem.ops[i].outputs
        if not self.lowered.problem.ops[i].optional:
            return
        owner = self.lowered.nodes[i + 1]
        assert owner is not None
        state = self.graph.call_function(get_rng_state, (str(device_of(owner)),))
        size = self.lowered.problem.tensors[tensors[0]].bytes
        state.meta["val"] = torch.empty(size, dtype=torch.uint8, device="meta")
        self.current[tensors[0]] = state

    def _replay(self, i: int, node: fx.Node) -> fx.Node:
        state = self.current[self.lowered.rng_state[i]]
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.resolve)
        target: Any = node.target
        return self.graph.call_function(run_with_rng_state, (state, str(device_of(node)), target, *args), kwargs)

    @staticmethod
    def _copy_meta(new: fx.Node, old: fx.Node) -> fx.Node:
        kept = ("val", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag")
        new.meta = {k: old.meta[k] for k in kept if k in old.meta}
        new.meta["source"] = old.meta.get("source", old.name)
        return new
