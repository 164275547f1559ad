"""What a schedule makes the device's caching allocator hold: its own allocations, played step after step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice, takewhile

import torch
from torch import fx

from passes.allocator import ENDLESS, OWN_SEGMENT, CachingAllocator, Segment, unknown_settings
from passes.device import empty_cache, kind_of, room_bytes
from passes.lower import KEPT, UPDATE, GlueEvents, Lowered
from passes.profile import OpProfile
from passes.run._torch import segments_that_do_not_grow
from passes.run.arena import Arena
from passes.tape import Tape
from solvers.problem import Op
from solvers.replay import replay
from solvers.schedule import Schedule

from .optimizer import state_sizes

Profiles = dict[fx.Node, OpProfile]
Steps = tuple[tuple[int, ...], tuple[int, ...]]  # the events of the first step and of each later one, as of a `Tape`
Orders = list[tuple[Steps, tuple[int, ...]]]  # of what may happen, the steps, and the blocks that are there before
IDLE = "inactive"
STEPS, MOST_STEPS = 3, 8  # the second finds what the first left cached; the last shows that nothing more is needed


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device, at their highest.

    Attributes:
        allocated_bytes: as `torch.cuda.max_memory_allocated` counts, without what was there besides the step.
        reserved_bytes: as `torch.cuda.max_memory_reserved` counts.
    """

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Start:
    """The allocator as the step finds it.

    Attributes:
        segments: what it has reserved.
        others_bytes: what is allocated in them besides the step's parameters, buffers and inputs.
        room_bytes: what can be reserved in all before the device is full.
        expandable: whether the allocator's segments grow.
        descending: whether a new segment lies below those before it.
        range_bytes: addresses that torch sets aside for one that grows.
    """

    segments: tuple[Segment, ...]
    others_bytes: int
    room_bytes: int
    expandable: bool
    descending: bool
    range_bytes: int = ENDLESS


def start_of(tensors: Iterable[torch.Tensor], device: torch.device) -> Start | None:
    """The allocator with nothing cached, and `tensors` in it; None where there is none, or one that is not known."""
    if not kind_of(device).caches or unknown_settings():
        return None
    empty_cache(device)
    snapshot = [s for s in torch.cuda.memory_snapshot() if s["device"] == (device.index or 0)]
    segments = tuple(
        Segment(
            s["address"], s["segment_type"] == "small", tuple((b["size"], b["state"] != IDLE) for b in s["blocks"]),
            s["is_expandable"],
        )
        for s in snapshot
    )
    ours = {t.untyped_storage().data_ptr() for t in tensors if t.device == device}
    used = [b for s in snapshot for b in s["blocks"] if b["state"] != IDLE]
    others = sum(b["size"] for b in used if b["address"] not in ours)
    expandable = any(s["is_expandable"] for s in snapshot)
    total = torch.cuda.mem_get_info(device)[1]
    return Start(segments, others, room_bytes(device) or 0, expandable, _descends(device), total + total // 8)


def _descends(device: torch.device) -> bool:
    """Whether the driver places segments downwards: two of the smallest that are not shared are asked for."""
    try:
        first = torch.empty(OWN_SEGMENT, dtype=torch.uint8, device=device)
        with segments_that_do_not_grow():
            second = torch.empty(OWN_SEGMENT, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    found = second.data_ptr() < first.data_ptr()
    del first, second
    empty_cache(device)
    return found


def asked(
    lowered: Lowered, profiles: Profiles, schedule: Schedule, state_bytes: int = 0, gradients_first: bool = False
) -> Steps:
    """What steps ask of the allocator, the gradients and outputs of each being dropped after it.

    Args:
        state_bytes: the optimizer's state, which the first update of the parameters makes.
        gradients_first: whether the gradients that are accumulated are there before the first step, and not part of it.
    """
    recorder = _Recorder(lowered, profiles, state_sizes(state_bytes, lowered.gradient_bytes))
    recorder.before = () if gradients_first else recorder.before
    return recorder.step(schedule), recorder.step(schedule)


def footprint(
    steps: Steps, start: Start, reserve_bytes: int = 0, arena: Arena = (), gradients: Iterable[int] = ()
) -> Footprint:
    """Play steps until one needs no more than those before.

    Args:
        reserve_bytes: what is set aside on top of both figures.
        arena: what the first step asks for in advance (`passes.run.arena`).
        gradients: what is there before that.
    """
    allocator = CachingAllocator(
        expandable=start.expandable, segments=start.segments, descending=start.descending,
        range_bytes=start.range_bytes,
    )  # fmt: skip
    allocator.play(tuple(filter(None, gradients)))
    for size in arena:
        allocator.reserve(size)
    for count in range(MOST_STEPS):
        before = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        allocator.play(steps[min(count, 1)])
        if count + 1 >= STEPS and before == (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes):
            break
    allocated = allocator.peak_allocated_bytes - start.others_bytes
    return Footprint(allocated + reserve_bytes, allocator.peak_reserved_bytes + reserve_bytes)


def larger_of(found: Iterable[Footprint]) -> Footprint:
    """The larger figures of some."""
    every = list(found)
    return Footprint(max(f.allocated_bytes for f in every), max(f.reserved_bytes for f in every))


class _Recorder:
    """Attributes:
    events: of the step so far; an allocation is known by its number among them.
    held: the allocation that holds a tensor.
    kept: what ops have left behind for ever, on the forward's thread and on the backward's.
    between: allocations of code that is not in the graph.
    """

    def __init__(self, lowered: Lowered, profiles: Profiles, state: tuple[int, ...]) -> None:
        self.lowered, self.profiles = lowered, profiles
        self.events: list[int] = []
        self.count = 0
        self.held: dict[int, int] = {}
        self.kept: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        self.between: dict[int, int] = {}
        self.before = lowered.gradient_bytes if lowered.accumulated_bytes else ()
        self.state = state  # not made yet

    def step(self, schedule: Schedule) -> tuple[int, ...]:
        self.events, self.count, backward = [], 0, False
        self._keep(self.before)
        self.before = ()
        moments = list(replay(self.lowered.problem, schedule))
        for k, moment in enumerate(moments):
            kind, i = moment.step
            if kind == "free":
                self._drop(i)
                continue
            if i in self.lowered.glue:
                after = takewhile(lambda m: m.step.kind == "free", islice(moments, k + 1, None))
                self._play_glue(self.lowered.glue[i], {m.step.index for m in after}, backward)
                continue
            backward = backward or i == self.lowered.tangent_op
            if self.lowered.problem.ops[i].name == UPDATE:
                self._update()
            self._compute(i, moment.donated, backward)
        self._update()
        for t in list(self.held):
            self._drop(t)
        for block in self.between.values():
            self._release(block)
        self.between.clear()
        return tuple(self.events)

    def _allocate(self, size: int) -> int:
        self.events.append(size)
        self.count += 1
        return self.count - 1

    def _release(self, made: int) -> None:
        self.events.append(-1 - made)

    def _update(self) -> None:
        """The first update of the parameters makes the optimizer's state, while the gradients are there."""
        self._keep(self.state)
        self.state = ()

    def _keep(self, sizes: Iterable[int]) -> None:
        """Allocate for good."""
        for size in filter(None, sizes):
            self._allocate(size)

    def _drop(self, tensor: int) -> None:
        block = self.held.pop(tensor, None)
        if block is not None:
            self._release(block)

    def _play_glue(self, events: GlueEvents, freed: Collection[int], backward: bool) -> None:
        """Args: freed: the tensors that are freed right after it."""
        for size, block, tensor in events:
            if block == KEPT:
                if not self.kept[backward][size]:
                    self.kept[backward][size] += 1
                    self._keep((size,))
            elif size > 0 and tensor is None:
                self.between[block] = self._allocate(size)
            elif tensor is not None:
                if size > 0:
                    self.held[tensor] = self._allocate(size)
                elif tensor in freed:
                    self._drop(tensor)
            elif block in self.between:  # what was there before the step is not the step's
                self._release(self.between.pop(block))

    def _compute(self, i: int, donated: int | None, backward: bool) -> None:
        op, node = self.lowered.problem.ops[i], self.lowered.nodes[i]
        profile = self.profiles.get(node) if node is not None else None
        tape = profile.tape if profile is not None else None
        given = None if donated is None else self.held.pop(donated, None)
        made = self._play(tape, given, backward) if tape else self._plain(self._pieces(op))
        for t in op.outputs:
            storage = self.lowered.storages[t]
            k = tape.results[storage.index] if tape and storage and storage.index < len(tape.results) else None
            block = made.pop(k, None) if k is not None else None
            if block is None and t == op.outputs[0] and given is not None:
                block, given = given, None
            if block is None and self.lowered.problem.tensors[t].bytes:
                block = self._allocate(self.lowered.problem.tensors[t].bytes)
            if block is not None and t in self.held:
                self._release(block)  # an output that was live keeps its old copy
            elif block is not None:
                self.held[t] = block
        for block in made.values():
            self._release(block)

    def _play(self, tape: Tape, given: int | None, backward: bool) -> dict[int, int]:
        """The allocations that are left at the op's end; the first result's is not made where memory is given."""
        skipped = tape.results[0] if given is not None and tape.results else None
        made: dict[int, int] = {}
        count, missing = 0, self._missing(tape, backward)
        for place, event in enumerate(tape.events):
            self._keep(missing.pop(place, ()))
            if event < 0:
                if (block := made.pop(-1 - event, None)) is not None:
                    self._release(block)
                continue
            if count != skipped:
                made[count] = self._allocate(event)
            count += 1
        self._keep(size for sizes in missing.values() for size in sizes)
        return made

    def _plain(self, workspace: Iterable[int]) -> dict[int, int]:
        return {-1 - k: self._allocate(size) for k, size in enumerate(workspace) if size}

    def _pieces(self, op: Op) -> tuple[int, ...]:
        """What it holds for a moment: the update of all parameters at once (`foreach`) a block for each of them."""
        sizes = self.lowered.gradient_bytes
        whole = op.name != UPDATE or op.workspace < sum(sizes)
        return (op.workspace,) if whole else state_sizes(op.workspace, sizes)

    def _missing(self, tape: Tape, backward: bool) -> dict[int, list[int]]:
        """What the op leaves behind for ever and no op before it has, by the event that it comes before.

        cuBLAS keeps a workspace for each thread that runs products: autograd's has its own.
        """
        missing: dict[int, list[int]] = {}
        wanted: Counter[int] = Counter()
        for place, size in tape.kept:
            wanted[size] += 1
            if self.kept[backward][size] < wanted[size]:
                self.kept[backward][size] += 1
                missing.setdefault(place, []).append(size)
        return missing
