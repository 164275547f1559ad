"""Building one half of a planned step as a graph, node by node."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from solvers.replay import Moment
from solvers.schedule import Schedule, freed_after

from .alias import Aliases, Storage, device_of, is_view
from .codegen import Handover, Spaced
from .errors import VerificationError
from .exclusive import interrupt_point
from .fuse.match import item
from .fuse.normal_form import shortest
from .lower import Lowered
from .ops import donations, is_random
from .run.arena import Spacers, Spacing
from .run.random import get_rng_state, run_with_rng_state

Leaving = dict[int, tuple[tuple[int, fx.Node], ...]]  # after a step of the schedule: gradients, by primal
NOTHING: Leaving = {}


class Held(NamedTuple):
    """What is held while a node runs: all in all, and its workspace."""

    bytes: int
    workspace: int


def _mark() -> None:
    """Where gradients leave, in a graph that is being built."""


class Emitter:
    """Builds one of the two graphs, step by step."""

    def __init__(self, aliases: Aliases, lowered: Lowered) -> None:
        self.aliases, self.lowered = aliases, lowered
        self.graph = fx.Graph()
        self.current: dict[int, fx.Node] = {}
        self.static: dict[fx.Node, fx.Node] = {}
        self.views: dict[tuple[Any, ...], fx.Node] = {}
        self.marks: list[tuple[fx.Node, tuple[int, ...]]] = []
        self.computed: dict[int, fx.Node] = {}  # by the place of the step in the schedule

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
                self._compute(position, moments[position], freed_after(schedule, position))
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

    def spaced(self, spacing: Spacing | None, ask: Spacers) -> Spaced:
        """Where the half has spacers, by the names of its nodes."""
        names = {place: node.name for place, node in self.computed.items()}
        return Spaced(ask, {names[place]: sizes for place, sizes in (spacing.at if spacing else ()) if place in names})

    def _compute(self, position: int, moment: Moment, dropped: frozenset[int]) -> None:
        i, again = moment.step.index, moment.again
        node = self.lowered.nodes[i]
        if node is None:
            self._special(i)
            return
        new = self._replay(i, node) if again and is_random(node) else self.graph.node_copy(node, self.resolve)
        self.computed[position] = new
        if moment.donated is not None:
            self._write_over(moment.donated, node, new)
        self._copy_meta(new, node)
        new.meta["recompute_of"] = node.name if again else None
        new.meta["moment"] = Held(moment.moment_bytes, self.lowered.problem.ops[i].workspace)
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
