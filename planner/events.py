"""What a schedule asks of the device's caching allocator, event by event, as of a `Tape`: step after step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile

from torch import fx

from passes.allocator import LEAVE
from passes.fuse.rules import may_be_joined
from passes.lower import KEPT, LEFT_BEFORE, UPDATE, GlueEvents, Lowered
from passes.profile import OpProfile
from passes.run.arena import Spacing
from passes.tape import Tape
from solvers.problem import Op
from solvers.replay import replay
from solvers.schedule import Schedule

from .optimizer import state_sizes
from .packing import Run, with_spacers

Profiles = dict[fx.Node, OpProfile]
Steps = tuple[tuple[int, ...], tuple[int, ...]]  # the events of the first step and of each later one
Workspaces = tuple[tuple[int, ...], tuple[int, ...]]  # of the forward's thread and of autograd's


@dataclass(frozen=True)
class Order:
    """What steps of a schedule ask for, in one order of what may happen.

    Attributes:
        state_bytes: the optimizer's state, which the first update of the parameters makes.
        before: the gradients that are accumulated, where they are there before the first step, and not part of it.
        workspaces: what cuBLAS keeps once it is used.
    """

    lowered: Lowered
    profiles: Profiles
    schedule: Schedule
    state_bytes: int = 0
    before: tuple[int, ...] = ()
    workspaces: Workspaces = ((), ())

    @cached_property
    def steps(self) -> Steps:
        """The gradients and outputs of each step are dropped after it."""
        recorder = self._recorder()
        return recorder.step(self.schedule), recorder.step(self.schedule)

    @cached_property
    def apart(self) -> Apart:
        """The same with cuBLAS's workspaces made before, where the steps make them."""
        recorder = self._recorder()
        recorder.step(self.schedule)
        made = {way: Counter(sizes) for way, sizes in zip((False, True), self.workspaces, strict=True)}
        are_made = not any(made[way] - recorder.kept[way] for way in made)
        recorder, steps, runs = self._recorder(), [], []
        recorder.kept = made if are_made else recorder.kept
        for _ in range(2):
            steps.append(recorder.step(self.schedule))
            runs.append(tuple(recorder.runs))
        before = tuple(size for sizes in self.workspaces for size in sizes) if are_made else ()
        return Apart((steps[0], steps[1]), runs, before)

    @property
    def length(self) -> int:
        """Events of a step."""
        return len(self.steps[1])

    def asked(self, spacing: Spacing | None) -> tuple[Steps, tuple[int, ...]]:
        """The steps, and what is there before them."""
        if spacing is None:
            return self.steps, self.before
        return self.apart.spaced(dict(spacing.at)), (*self.before, *self.apart.workspaces)

    def _recorder(self) -> _Recorder:
        lowered = self.lowered
        recorder = _Recorder(lowered, self.profiles, state_sizes(self.state_bytes, lowered.gradient_bytes))
        recorder.before = () if self.before else recorder.before
        return recorder


@dataclass(frozen=True)
class Apart:
    """What steps ask for.

    Attributes:
        runs: of either step, the ops around which spacers may be.
        workspaces: of cuBLAS, which are made before.
    """

    steps: Steps
    runs: Sequence[Sequence[Run]]
    workspaces: tuple[int, ...]

    def spaced(self, at: Mapping[int, Sequence[int]]) -> Steps:
        """The steps with spacers around ops, by their places in the schedule."""
        first, later = (with_spacers(e, runs, at) for e, runs in zip(self.steps, self.runs, strict=True))
        return first, later


MORE_STEPS = 3  # until what a step finds and leaves lies where it does in all later ones


class _Recorder:
    """Attributes:
    events: of the step so far; an allocation is known by its number among them.
    held: the allocation that holds a tensor.
    kept: what ops have left behind for ever, on the forward's thread and on the backward's.
    runs: the ops of the step around which spacers may be.
    between: allocations of code that is not in the graph.
    left: of what a step leaves in attributes the allocations, by the tensors that they are in the next one.
    waiting: state from before the first step, which it replaces.
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
        self.runs: list[Run] = []
        self.left: dict[int, int] = {}
        self.waiting = {t for t in lowered.before if lowered.storages[t] is not None}

    def step(self, schedule: Schedule) -> tuple[int, ...]:
        """The events of a step; where it finds what the one before it has left, those of several."""
        self.events, self.count, self.runs = [], 0, []
        self._step(schedule)
        for _ in range(MORE_STEPS if self.left else 0):
            self._step(schedule)
        for block in self.left.values():
            self._release(block)
        self.left.clear()
        return tuple(self.events)

    def _step(self, schedule: Schedule) -> None:
        backward = False
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
            start = len(self.events)
            self._compute(i, moment.donated, backward)
            node = self.lowered.nodes[i]
            if node is not None and not may_be_joined(node):
                self.runs.append(Run(k, start, len(self.events)))
        self._update()
        self.left |= {old: self.held.pop(new) for old, new in self.lowered.before.items() if new in self.held}
        for t in list(self.held):
            self._drop(t)
        for block in self.between.values():
            self._release(block)
        self.between.clear()

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
        if self.waiting and self.waiting <= {tensor}:
            self.events.append(LEAVE)
        self.waiting.discard(tensor)
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
        if op.name == LEFT_BEFORE:
            self.held |= {t: self.left.pop(t) for t in op.outputs if t in self.left}
            return
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
