"""flat: one graph of all runs of regions, for whoever looks at nodes: reports, hints, plan files. It is never run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from passes.alias import Aliases, Storage
from passes.lower import Lowered
from passes.profile import OpProfile
from passes.trace.arguments import StateEntry
from passes.trace.modules import FORWARD_STACK, STACK

from .compose import Composed
from .part import Part


def suffixes(count: int) -> list[str]:
    """What names of each run's ops and tensors end in."""
    return [f"_r{r}" for r in range(count)]


class FlatGraph:
    """Copies of the parts' graphs, one for each run.

    Attributes:
        nodes: for each run its part's nodes, and their copies.
    """

    def __init__(
        self, entries: Sequence[StateEntry], values: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]
    ) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.nodes: list[dict[fx.Node, fx.Node]] = []
        self.profiles: dict[fx.Node, OpProfile] = {}
        self.state: dict[str, fx.Node] = {}
        for i, (entry, value) in enumerate(zip(entries, values, strict=True)):
            node = self._placeholder(f"state_{i}", value)
            self.state.update((name, node) for name in (entry.name, *entry.aliases))
        for i, value in enumerate(inputs):
            self._placeholder(f"input_{i}", value)

        for i, value in enumerate(tangents):
            self._placeholder(f"tangents_{i}", value)

    def add(self, part: Part, path: str, suffix: str) -> None:
        """Copy the graph of a run's part; names end in `suffix`, module paths begin with `path`."""
        copies: dict[fx.Node, fx.Node] = {}
        placeholders = part.traced.placeholders
        for node, entry in zip(placeholders, part.traced.state, strict=False):
            copies[node] = self.state[f"{path}.{entry.name}"]
        for node in part.traced.graph_module.graph.nodes:
            if node in copies or node.op == "output":
                continue
            copies[node] = new = self.graph.node_copy(node, copies.__getitem__)
            new.name = f"{node.name}{suffix}"
            new.meta = _below(path, node.meta)
            if node.op == "placeholder":
                new.target = new.name
            if node.op == "get_attr":
                new.target = f"{node.target}{suffix}"
                setattr(self.root, str(new.target), getattr(part.traced.graph_module, str(node.target)))
            if part.profiles and node in part.profiles:
                self.profiles[new] = part.profiles[node]
        self.nodes.append(copies)

    def of(self, runs: Sequence[tuple[str, Part]]) -> fx.GraphModule:
        """The graph of these runs, by their modules' paths, with its constants."""
        for (path, part), suffix in zip(runs, suffixes(len(runs)), strict=True):
            self.add(part, path, suffix)
        self.graph.output(())
        return _NeverRun(self.root, self.graph)

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value.detach().to("meta")
        return node


class _NeverRun(fx.GraphModule):
    """A graph with its constants, and no code."""

    def recompile(self) -> Any:
        """Nothing calls it."""


def _below(path: str, meta: dict[str, Any]) -> dict[str, Any]:
    new = dict(meta)
    for kind in (STACK, FORWARD_STACK):
        if meta.get(kind):
            inner = {f"{k}:{path}": (f"{path}.{p}" if p else path, name) for k, (p, name) in meta[kind].items()}
            new[kind] = inner
    if not (meta.get(STACK) or meta.get(FORWARD_STACK)):  # an op of the region's own forward
        new[STACK] = {path: (path, "")}
    return new


@dataclass(frozen=True)
class Besides:
    """What is there besides the runs of regions; as in `Lowered`."""

    accumulated_bytes: int
    gradient_bytes: tuple[int, ...]


def lowered_of(
    composed: Composed, lowered: Sequence[Lowered], flat: FlatGraph, aliases: Aliases, besides: Besides
) -> Lowered:
    """What each op and tensor of the flat Problem is in the flat graph."""
    nodes: list[fx.Node | None] = []
    for place in composed.local:
        own = None if place is None else lowered[place[0]].nodes[place[1]]
        nodes.append(None if own is None or place is None else flat.nodes[place[0]][own])
    storages: list[Storage | None] = [None] * len(composed.problem.tensors)
    rng_state: dict[int, int] = {}
    for r, tensors in enumerate(composed.tensors):
        for t, new in tensors.items():
            own_storage = lowered[r].storages[t]
            if new is not None and own_storage is not None and storages[new] is None:
                storages[new] = _copied(own_storage, flat.nodes[r], aliases)
    for i, place in enumerate(composed.local):
        if place is not None and place[1] in lowered[place[0]].rng_state:
            found = composed.tensors[place[0]][lowered[place[0]].rng_state[place[1]]]
            rng_state[i] = -1 if found is None else found
    of_storage = {s: t for t, s in enumerate(storages) if s is not None}
    return Lowered(
        composed.problem, tuple(nodes), tuple(storages), rng_state, (), composed.problem.num_forward,
        {n: i for i, n in enumerate(nodes) if n is not None}, of_storage, besides.accumulated_bytes,
        gradient_bytes=besides.gradient_bytes, glue=composed.glue, before=composed.before,
    )  # fmt: skip


def _copied(storage: Storage, copies: dict[fx.Node, fx.Node], aliases: Aliases) -> Storage | None:
    found = aliases.of[copies[storage.node]]
    return found[storage.index] if isinstance(found, tuple) else found
