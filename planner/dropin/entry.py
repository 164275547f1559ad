"""A plan that is kept, what it holds for, and what its backward does where a loss is another than expected."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn

from passes._torch import as_distributed, is_distributed, swapped_state
from passes.lower import kept_primals, stateful_primals
from passes.run._torch import Autocast, active_autocast, backward_number, under_autocast
from passes.run.random import set_rng_state
from passes.run.step import ChangedInPlace
from passes.trace.arguments import state_tensors
from passes.trace.capture import Traced
from passes.trace.given import all_outputs, held_before, left_alone, put_back, targets_of
from passes.trace.layouts import BACKWARD_AUTOCAST, Layouts, gradient_key
from passes.trace.matching import Differs, match, match_arguments
from passes.trace.overlaps import overlaps
from passes.trace.reads import Matched, Reads
from passes.trace.settings import set_aside
from passes.trace.structure import Bound, held_objects, unflatten
from planner.decided import Decided
from solvers.errors import PlannerError

from .plan_key import Key, describe_autocast, state_key, torch_defaults

_OTHER_DRAWS = (
    ": the plain forward would be replayed, and does not draw the random numbers that compiled code has drawn. Call "
    "the model again, which is then planned for such a backward; or use the plan uncompiled."
)
_IRREPLAYABLE = (
    ": the plain forward would be replayed, but {}. Call the model again, which is then planned for such a backward."
)
BYTES_PER_OP = 23_000  # by the growth of a process that plans GPT-2 for 20 lengths
_OTHER_STRIDES = " with a gradient in other strides"

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter})


def _is_planned_for(tensor: Any) -> bool:
    return type(tensor) in _PLAIN or is_distributed(tensor)


_DECIDES = attrgetter("shape", "dtype", "device", "requires_grad")


@dataclass(eq=False)
class Entry:
    """A plan and what it holds for; `matched` are its reads as found on the model of the `PlanState` that has it.

    `starts` are the outputs that its backward was to start from when it was planned; `sharded` is whether
    `fully_shard` had been called; `regions` are those of a plan by regions, as `planner.dropin.regions` runs them, and
    `trained` is which of the model's parameters required a gradient then.
    """

    key: Key
    state: list[Any]
    planned: Decided
    starts: tuple[str, ...]
    outdated: bool = False
    matched: Matched | None = None
    regions: Any = None
    sharded: bool = False
    trained: list[bool] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """What the plan takes of host memory, about: its graphs, records and code, op by op."""
        return len(self.planned.prepared.problem.ops) * BYTES_PER_OP

    @property
    def reads(self) -> Reads:
        return self.planned.prepared.traced.reads

    def lacks(self, keys: Iterable[Any], layouts: Layouts) -> bool:
        """Whether it was planned without what backwards have shown of these (see `Fallback`)."""
        own = self.planned.prepared.traced.layouts
        return any(own.get(key) != layouts[key] for key in keys)

    def holds(
        self, model: nn.Module, loss_fn: Any, inputs: Sequence[torch.Tensor], bound: Mapping[str, Any]
    ) -> list[torch.Tensor] | None:
        """The model's parameters and buffers where the plan holds for a call now; its key is compared before."""
        if self.planned.runs:  # each region looks for itself
            parameters: list[torch.Tensor] = list(model.parameters())
            return parameters if self.trained == are_trained(parameters) else None
        tensors = self.unchanged(model, loss_fn)
        if tensors is None:
            return None
        if self.reads.arguments and self.matched is not None:
            try:
                match_arguments(self.reads, self.matched, model, held_objects(bound))
            except Differs:
                return None
        traced = self.planned.prepared.traced
        if traced.guard is not None and not traced.guard.holds([*tensors, *inputs]):
            return None
        if any(tensors[i]._backward_hooks for i in traced.within):
            return None
        return tensors if overlaps([*tensors, *inputs], traced.mutated) == traced.overlaps else None

    def unchanged(self, model: nn.Module, loss_fn: Any) -> list[torch.Tensor] | None:
        """The model's parameters and buffers where the plan holds for what the model is now."""
        tensors = self._state(model, loss_fn)
        if tensors is None or not (_PLAIN.issuperset(map(type, tensors)) or all(map(_is_planned_for, tensors))):
            return None
        alike = list(map(_DECIDES, tensors)) == self.state or list(map(state_key, tensors)) == self.state
        return tensors if alike else None

    def _state(self, model: nn.Module, loss_fn: Any) -> list[torch.Tensor] | None:
        """What was read is as it was: the same objects (the usual case, checked quickly), or equal ones."""
        tensors = self.matched.state() if self.matched else None
        if tensors is None:
            try:
                self.matched = match(self.reads, model, loss_fn)
            except Differs:
                self.matched = None
            else:
                tensors = self.matched.tensors()
        return tensors


def are_trained(parameters: Iterable[torch.Tensor]) -> list[bool]:
    """Which of them require a gradient."""
    return [p.requires_grad for p in parameters]


REMEMBERED_CALLS = 128
LONGEST_RUN = 32  # of calls that are compared: 4,096 comparisons at most


class Losses:
    """From which outputs the backward of the next call will start, told by the calls before.

    What most often came after the longest run of calls like the last ones comes again. Calls whose backward has not
    begun yet are taken as predicted, and prove nothing: there are many where a cell is called in a loop.

    Attributes:
        expected: the outputs of the call made last; None until a backward started from others than planned for.
        astray: backwards in a row that were none that was planned for; after `patience` of them one forgets what the
            first ones have shown. Of a cell in a loop, all calls have one backward, whose `number` is that of the last.
    """

    def __init__(self) -> None:
        self.astray, self.patience, self.number = 0, 3, -1
        self.expected: Started | None = None
        self.recent: deque[Started] = deque(maxlen=REMEMBERED_CALLS)

    def predict(self) -> tuple[str, ...] | None:
        """The outputs that the next call's backward will start from; None where nothing was learned yet."""
        if self.expected is None:
            return None
        calls = list(self.recent) or [self.expected]
        paths = [call.paths for call in calls]
        seen = [i for i, call in enumerate(calls) if call.seen]
        runs = {i: _equal_run(paths, i) for i in seen}
        longest = max(runs.values(), default=0)
        if not longest and (calls[-1].seen or not seen):
            return paths[-1]
        votes = Counter(paths[i] for i in reversed(seen) if runs[i] == longest)
        return votes.most_common(1)[0][0]

    def called(self, paths: tuple[str, ...]) -> Started:
        """Note a call whose backward is to start from `paths`, until it is seen to start elsewhere."""
        self.recent.append(Started(paths))
        return self.recent[-1]


def _equal_run(paths: Sequence[tuple[str, ...]], i: int) -> int:
    """How many of the calls before call `i` are, in order, like the last ones."""
    length = 0
    while length < min(i, LONGEST_RUN) and paths[i - 1 - length] == paths[-1 - length]:
        length += 1
    return length


@dataclass
class Started:
    """The outputs that one call's backward starts from; `seen` is whether it has begun."""

    paths: tuple[str, ...]
    seen: bool = False


def starts_of(traced: Traced) -> tuple[str, ...]:
    return tuple(leaf.path for leaf in traced.outputs if leaf.differentiated)


class Plans(Protocol):
    """What a fallback needs of whoever keeps the plans of a model, or of a region of one."""

    model: nn.Module
    cache: list[Entry]
    losses: Losses

    def plain(self, bound: Mapping[str, Any]) -> Any:
        """The plain step's forward."""

    def match(self, reads: Reads) -> Matched:
        """Find in the model, as it is now, what a forward read."""

    def replayed(self, autocast: Autocast) -> None:
        """Note that a backward, under that autocast, was none that was planned for."""


class Fallback:
    """Backward from other outputs than planned for, under another autocast, or with gradients in other layouts.

    The plain model replays the forward; later calls are replanned. Where the forward was compiled and drew random
    numbers, or what it read has changed since, it cannot be replayed: only the second.

    Args:
        bound: the call's arguments, before forward has changed them.
        as_called: makes the model in a block what it was called as.
    """

    def __init__(
        self, state: Plans, entry: Entry, bound: Mapping[str, Any],
        as_called: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        prepared = entry.planned.prepared
        self.state, self.traced, self.layouts = state, prepared.traced, prepared.layouts
        self.key, self.compiled, self.as_called = entry.key, entry.planned.compiled, as_called
        self.started = state.losses.called(entry.starts)
        self.before = held_before(self.traced.changes, bound)

    def __call__(
        self,
        primals: Sequence[torch.Tensor],
        generators: dict[str, torch.Generator],
        gradients: dict[int, torch.Tensor],
    ) -> list[Any]:
        wanted = {leaf.index: leaf for leaf in self.traced.outputs if leaf.index in gradients}
        paths = tuple(leaf.path for leaf in wanted.values())
        expected = paths == starts_of(self.traced)
        autocast = active_autocast() != self.traced.backward_autocast
        learned = self._learn({wanted[i].path: g for i, g in gradients.items()}, autocast)
        new = bool(learned) or not expected
        how = f" under {describe_autocast(active_autocast())}" if autocast else _OTHER_STRIDES if expected else ""
        self.state.replayed(active_autocast())
        where = ", ".join(p or "the output" for p in paths)
        started = f"backward started from {where}{how}, which the plan did not expect"
        try:
            if self.compiled and generators:
                raise PlannerError(f"{started}{_OTHER_DRAWS}")
            if why := self._irreplayable(primals):
                raise ChangedInPlace(f"{started}{_IRREPLAYABLE.format(why)}")
            warnings.warn(
                f"{started}: this step replays the plain forward (correct, but not under the budget); "
                f"{'later calls are planned for it' if new else 'so will others, as a plan is for one kind of start'}.",
                stacklevel=2,
            )
            with self.as_called():
                return self._replay(primals, generators, gradients)
        finally:
            if learned:
                for entry in self.state.cache:
                    concerned = (autocast or entry.starts == paths) and entry.lacks(learned, self.layouts)
                    entry.outdated = entry.outdated or concerned
            self.started.paths, self.started.seen = paths, True
            self.state.losses.expected = self.started

    def not_needed(self) -> None:
        """See `passes.run.step.Fallback`."""
        self.started.seen, self.state.losses.astray = True, 0

    def _irreplayable(self, primals: Sequence[torch.Tensor]) -> str | None:
        """Why the forward cannot be replayed; None where it can."""
        lost = set(stateful_primals(self.traced)) - set(kept_primals(self.traced))
        if lost:
            return f"it overwrote {self.traced.primal_names[min(lost)]}, whose old value was not kept"
        since = "what it reads was changed between forward and backward"
        for (name, then), (_, now) in zip(self.key.defaults, torch_defaults(), strict=True):
            if now != then and not name.startswith("autocast"):  # a replay has the forward's own
                return f"{since}: torch's {name} is {now}, in the forward {then}"
        try:
            with self.as_called():
                matched = self.state.match(self.traced.reads)
                with self._given(primals[len(self.traced.state) :]) as bound:
                    match_arguments(self.traced.reads, matched, self.state.model, held_objects(bound))
        except Differs as differs:
            return f"{since}: {differs.where} {differs.now}, in the forward {differs.then}"
        return None

    def _learn(self, gradients: Mapping[str, torch.Tensor], autocast: bool) -> set[Any]:
        """Plan for gradients in these strides, under this autocast, from now on; nothing where this plan is for others.

        Another plan of the same model may have learned them since this one was made. Where none comes any more that
        the plan is for (the first step had a loss of its own), it is for those that do.
        """
        losses = self.state.losses
        losses.astray, losses.number = losses.astray + (backward_number() != losses.number), backward_number()
        keys: dict[Any, Any] = {gradient_key(path, g): tuple(g.stride()) for path, g in gradients.items()}
        if autocast:
            keys = {BACKWARD_AUTOCAST: active_autocast()}
        if not any(key in self.traced.layouts for key in keys):
            self.layouts.update({key: layout for key, layout in keys.items() if key not in self.layouts})
        elif losses.astray >= losses.patience:
            self.layouts.update(keys)
            losses.astray, losses.patience = 0, 2 * losses.patience
        elif any(self.layouts.get(key) != layout for key, layout in keys.items()):
            return set()
        return set(keys)

    @contextmanager
    def _given(self, inputs: Sequence[torch.Tensor]) -> Iterator[Bound]:
        """The call's arguments as forward was given them, with other tensors."""
        bound = Bound(unflatten(self.traced.input_template, inputs), self.traced.by_name)
        with left_alone(bound):
            put_back(self.before, bound)
            yield bound

    def _replay(
        self,
        primals: Sequence[torch.Tensor],
        generators: dict[str, torch.Generator],
        gradients: dict[int, torch.Tensor],
    ) -> list[Any]:
        state, traced = self.state, self.traced
        leaves = [p.detach().requires_grad_(p.requires_grad) for p in primals]
        count = len(traced.state)
        for i in traced.mutated:
            leaves[i] = leaves[i].clone()
        given = state_tensors(state.model, traced.state)
        named = {e.name: as_distributed(t, g) for e, t, g in zip(traced.state, leaves, given, strict=False)}
        devices = [d for d in generators if d != "cpu"]
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), swapped_state(state.model, named):
            for device, generator in generators.items():
                set_rng_state(generator.get_state(), device)
            # Autocast casts a leaf once for all its uses and adds up their gradients in that dtype; others each time.
            pairs = zip(leaves[count:], primals[count:], strict=True)
            arguments = [t if p.is_leaf else t.view_as(t) for t, p in pairs]
            aside = set_aside(traced.settings, state.model)
            with under_autocast(self.key.autocast), aside, self._given(arguments) as bound:
                targets = targets_of(traced.changes, bound)
                outputs = all_outputs(self.state.plain(bound), traced.output_template, traced.changes, targets)
        indices = [leaf.index for leaf in traced.outputs]
        started = [(o, gradients[i]) for o, i in zip(outputs, indices, strict=True) if i in gradients]
        inputs = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad([o for o, _ in started], inputs, [g for _, g in started], allow_unused=True))
        return [next(found) if t.requires_grad else None for t in leaves]


class Watched:
    """What the backward of one call of a model planned by regions starts from, seen at its outputs.

    Attributes:
        learned: whether a gradient came in other strides than planned for; `layouts` has those to plan for.
    """

    def __init__(self, started: Started, traced: Traced, outputs: Sequence[torch.Tensor], layouts: Layouts) -> None:
        self.started, self.known, self.layouts, self.learned = started, traced.layouts, layouts, False
        self.paths, self.seen = [leaf.path for leaf in traced.outputs], set[str]()
        for path, tensor in zip(self.paths, outputs, strict=False):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, path, tuple(tensor.stride())))

    def _note(self, path: str, expected: tuple[int, ...], gradient: torch.Tensor | None) -> None:
        if gradient is None:  # another output of the same region has one
            return
        self.seen.add(path)
        self.started.paths, self.started.seen = tuple(p for p in self.paths if p in self.seen), True
        key, strides = gradient_key(path, gradient), tuple(gradient.stride())
        if key not in self.known and strides != expected:
            self.layouts.setdefault(key, strides)
            self.learned = True
