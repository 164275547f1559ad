"""The hollow run: one step of the user's model in which regions keep nothing, so that all that is left is glue.

Each region runs the true submodule without autograd, and returns gradients of zeros. Everything that crosses its edge
lies in memory of a size of its own, by which it is recognised among the allocator's events; marks are allocations, too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from passes._torch import StorageWeakRef
from passes.alias import Storage
from passes.lower import KEPT
from passes.memory import place
from passes.profile import Counting
from passes.run.listeners import Listeners
from passes.run.mixing import Versions
from passes.trace.capture import OutputLeaf
from passes.trace.constructs import settings_of_kernels
from passes.trace.given import Given

from .find import Candidates
from .part import Part
from .parts import Parts

PAD = 7  # hardly any ordinary tensor has such a size in bytes: a mask may


class Edge:
    """A storage that crosses the edge of a region.

    Attributes:
        size, address: by which it is found among the allocator's events.
        run, storage: the run of a region that makes it, and what it is there; None where glue makes it.
        born, died: indices of the first mark at which it was there, and at which it was gone.
    """

    def __init__(self, size: int, run: int | None = None, storage: Storage | None = None) -> None:
        self.size, self.run, self.storage = size, run, storage
        self.born, self.died = 0, -1
        self.memory: Any = None
        self.address = 0


@dataclass(eq=False)
class Run:
    """One run of a region in the sample step.

    Attributes:
        inputs, gradients: what holds each input, and each gradient that its backward starts from; None for memory that
            is there before and after the step.
        given: those of the outputs that the region's backward starts from, None where there is none, for as long as
            what is handed over may be one of them.
        views: the part's, as they were handed out.
        overlapping: outputs with a gradient that share memory with others, likewise.
        listeners: who listens to the outputs.
        read: by its number, each primal that its backward may read, as it was when the forward ended.
        constants: what its graph holds itself, likewise.
        lent: whether it has parameters for this call only (`functional_call`), which are not the model's own.
    """

    path: str
    number: int
    part: Part
    inputs: list[Edge | None]
    lent: bool = False
    gradients: list[Edge | None] = field(default_factory=list)
    given: list[torch.Tensor | None] = field(default_factory=list)
    views: Versions = field(default_factory=lambda: Versions(()))
    overlapping: Versions = field(default_factory=lambda: Versions(()))
    listeners: Listeners = field(default_factory=lambda: Listeners((), (), ()))
    read: dict[int, Versions] = field(default_factory=dict)
    constants: Versions = field(default_factory=lambda: Versions(()))
    ended: bool = False

    def let_go(self) -> None:
        """Keep no tensor of the step."""
        self.given.clear()
        self.views = self.overlapping = self.constants = Versions(())
        self.listeners, self.read = Listeners((), (), ()), {}


@dataclass(frozen=True)
class Mark:
    """A moment of the hollow run: a region's `forward` or `backward` begins or ends, the step's own backward begins."""

    kind: str
    run: int
    size: int


@dataclass(frozen=True, eq=False)
class Crossings:
    """What a Problem of the step is composed from.

    Attributes:
        events: the allocator's: addresses (0 where they are not told; `KEPT`) and signed sizes.
        edges, found: storages that cross the edges of regions, made by regions and made by glue.
    """

    runs: Sequence[Run]
    marks: Sequence[Mark]
    events: Sequence[tuple[int, int]]
    edges: Mapping[int, Edge]
    found: Mapping[int, Edge]


class Hollow:
    """What one hollow run showed; see the module.

    Attributes:
        events: as of `Crossings`.
        again: whether something was learned or refused, so that another run will differ.
        candidates, called: the modules that may be regions, and how often each was called.
        accumulated_bytes: whole gradients that sharded modules kept from a step before.
        outputs: what the model returned, and each of those tensors without its data.
        descend: whether the children of what cannot be a region are tried in its place.
        thread: the one that runs it, which alone may capture, and whose memory is measured.
        settings: of torch, under which kernels run around it.
        stand_ins: of the model's own parameters, by their ids: code may hold these elsewhere, in a list.
        own: the ids of what the step has in their places.
        nodes, given: the contexts of its autograd nodes, and what regions were called with, as it was then.
    """

    def __init__(
        self, model: nn.Module, static: Iterable[torch.UntypedStorage], parts: Parts, device: torch.device,
        candidates: Candidates,
    ) -> None:  # fmt: skip
        self.model, self.parts, self.device = model, parts, device
        self.descend, self.candidates = candidates.descend, dict(candidates.chosen)
        self.thread, self.settings = threading.get_ident(), settings_of_kernels()
        self.home = torch.get_default_device()  # which, where nothing has data, is the meta device meanwhile
        self.static = set(map(place, static))
        self.marks: list[Mark] = []
        self.edges: dict[int, Edge] = {}
        self.found: dict[int, Edge] = {}
        self.runs: list[Run] = []
        self.events: list[tuple[int, int]] = []
        self.again = self.inside = self.late = False
        self.counting: Counting | None = None
        self.called: dict[str, int] = {}
        self.accumulated_bytes = 0
        self.outputs: list[tuple[OutputLeaf, torch.Tensor]] = []
        self.sizes: set[int] = set()
        self.latest: dict[int, int] = {}  # the last size that was given to what is that large
        self.nodes: list[Any] = []
        self.given: list[Given] = []
        self.stand_ins: dict[int, torch.Tensor] = {}
        self.own = frozenset[int]()

    @property
    def imagined(self) -> bool:
        """Whether nothing has data."""
        return self.device.type == "meta"

    @property
    def crossings(self) -> Crossings:
        return Crossings(self.runs, self.marks, self.events, self.edges, self.found)

    def mark(self, kind: str, run: int = -1) -> None:
        for edge in self.found.values():
            if edge.died < 0 and edge.memory.expired():
                edge.died = len(self.marks)
        size = self._size(0)
        self.marks.append(Mark(kind, run, size))
        if self.counting is None:
            self._memory(size)

    def close(self) -> None:
        """Let nothing of it live on in what regions were called with (a cache of keys), which their parts hold."""
        while self.nodes:
            self.nodes.pop().__dict__.clear()
        while self.given:
            self.given.pop().restore()
        self.stand_ins.clear()
        for run in self.runs:  # which plans keep: what they heard of holds the step's tensors, copies of buffers too
            run.let_go()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Around what a region does itself."""
        self.inside = True
        if self.counting is not None:
            self.counting.on = False
        try:
            yield
        finally:
            self.inside = False
            if self.counting is not None:
                self.counting.on = True

    def storage(self, like: int, run: int, made: Storage) -> torch.UntypedStorage:
        """New memory for something that a run of a region makes."""
        size = self._size(like)
        self.edges[size] = Edge(size, run, made)
        return self._memory(size)

    def _memory(self, size: int) -> torch.UntypedStorage:
        if self.imagined:  # where ops are looked at, as no allocator tells anything
            return torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
        return torch.UntypedStorage(size, device=self.device)

    def edge(self, tensor: torch.Tensor) -> Edge | None:
        """What holds a tensor that crosses an edge."""
        memory = tensor.untyped_storage()
        size = memory.nbytes()
        if not size or place(memory) in self.static:
            return None
        if size in self.edges:
            return self.edges[size]
        if memory._cdata not in self.found:  # the weak reference keeps the address from being used anew
            edge = self.found[memory._cdata] = Edge(size)
            edge.memory, edge.born, edge.address = StorageWeakRef(memory), len(self.marks), memory.data_ptr()
        return self.found[memory._cdata]

    def _size(self, like: int) -> int:
        first = like + -like % 64 + PAD
        size = self.latest.get(first, first)
        while size in self.sizes or size in self.parts.ordinary:
            size += 64
        self.sizes.add(size)
        self.latest[first] = size
        return size

    def tell_kept(self, first: Hollow) -> None:
        """Put in what an equal run before this one asked for alone, and has kept: workspaces of cuBLAS."""
        spare = Counter(n for _, n in first.events if n > 0) - Counter(n for _, n in self.events if n > 0)
        live = {address: i for i, (address, size) in enumerate(first.events) if size > 0}
        for i, (address, size) in enumerate(first.events):
            if size < 0 and live.get(address, i) < i:
                del live[address]
        for i in sorted(live.values()):
            size = first.events[i][1]
            if spare[size]:
                spare[size] -= 1
                self.events.insert(i, (KEPT, size))

    @property
    def kept(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes of that, in the forward's thread and in the backward's."""
        begins = next(mark.size for mark in self.marks if mark.kind == "backward")
        at = [size for _, size in self.events].index(begins)
        forward, backward = (
            tuple(n for address, n in part if address == KEPT) for part in (self.events[:at], self.events[at:])
        )
        return forward, backward

    def ordinary_sizes(self) -> set[int]:
        """What the step itself allocates, also where something of this run has that size by chance."""
        times = Counter(size for _, size in self.events if size > 0)
        return {size for size, count in times.items() if count > 1 or size not in self.sizes}


# The step ------------------------------------------------------------------------------------------------------------


