"""A plan that is kept, what it holds for, and from which outputs the backwards of its calls start."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from passes._torch import is_distributed, look_alike
from passes.trace.arguments import parameters_of
from passes.trace.capture import Traced
from passes.trace.gradient_layouts import gradient_key
from passes.trace.layouts import Layouts
from passes.trace.matching import Differs, match, match_arguments
from passes.trace.overlaps import Overlaps, lie_apart, overlaps, spans
from passes.trace.reads import Matched, Reads
from passes.trace.structure import held_objects
from passes.trace.unregistered import numbers_of
from planner.decided import Decided

from .plan_key import Key, arrangement, manner, state_key

BYTES_PER_OP = 23_000  # by the growth of a process that plans GPT-2 for 20 lengths

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter})


def is_planned_for(tensor: Any) -> bool:
    """Whether it is of a class of which its shape, type and layout tell all that a plan is for."""
    return type(tensor) in _PLAIN or is_distributed(tensor)


def _decides(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, t.requires_grad, arrangement(t), manner(t)


@dataclass(eq=False)
class Entry:
    """A plan and what it holds for; `matched` are its reads as found on the model of the `PlanState` that has it.

    `starts` are the outputs that its backward was to start from when it was planned; `strayed` is how many calls have
    answered the forward's questions otherwise than its sample; `again` is whether such calls were planned twice with
    what they leave in place (a table of the latest length); `sharded` is whether `fully_shard` had been called;
    `regions` are those of a plan by regions, as `planner.dropin.regions` runs them, and `parameters` the ids of those
    of the model that such a plan was last found to be for. `alike` tells quickly that tensors are like those that the
    plan was last found to hold for; `spans` are the bytes that each primal reaches over. `calls` is how many ran it,
    `compared` which of them was compared last, and `repeatable` whether the plain forward gave the same twice
    (`spot_check`).
    """

    key: Key
    state: list[Any]
    planned: Decided
    starts: tuple[str, ...]
    outdated: bool = False
    strayed: int = 0
    again: bool = False
    matched: Matched | None = None
    regions: Any = None
    sharded: bool = False
    parameters: Sequence[int] = ()
    alike: Callable[..., bool] | None = None
    spans: Sequence[int] | None = None
    calls: int = 0
    compared: int = 0
    repeatable: bool = True

    @property
    def nbytes(self) -> int:
        """What the plan takes of host memory, about: its graphs, records and code, op by op."""
        return len(self.planned.prepared.problem.ops) * BYTES_PER_OP

    @property
    def by_regions(self) -> bool:
        return bool(self.planned.runs)

    @property
    def reads(self) -> Reads:
        return self.planned.prepared.traced.reads

    @cached_property
    def constants(self) -> dict[torch.Tensor, bool]:
        """What the halves hold themselves, as forward reads it and nothing registers it; whether the backward does."""
        halves = self.planned.rewritten
        return dict.fromkeys(halves.forward.buffers(), False) | dict.fromkeys(halves.backward.buffers(), True)

    def numbers(self) -> list[tuple[int, int]]:
        """What tells of those in the constants, one by one."""
        return list(map(numbers_of, self.constants))

    def changed_since(self, numbers: Sequence[tuple[int, int]], in_backward: bool = False) -> str:
        """Which constant (that the backward reads) has others, in words; "" for none."""
        for (tensor, read_again), then in zip(self.constants.items(), numbers, strict=True):
            if numbers_of(tensor) != then and (read_again or not in_backward):
                return f"{self.reads.path_of(tensor)} was changed in place, or given other data"
        return ""

    def lacks(self, keys: Iterable[Any], layouts: Layouts) -> bool:
        """Whether it was planned without what backwards have shown of these (see `Fallback`)."""
        own = self.planned.prepared.traced.layouts
        return any(own.get(key) != layouts[key] for key in keys)

    def rank(self, starts: tuple[str, ...] | None) -> tuple[bool, bool]:
        """Which of several plans that hold is used: the least, and the one used last of those."""
        return self.outdated or self.starts != (starts or self.starts), self.by_regions

    def is_another_course_of(self, other: Entry) -> bool:
        """Whether it is by regions, for calls that look the same, and for the same backward."""
        by_regions = self.by_regions and other.by_regions and not self.outdated
        return by_regions and (self.key, self.starts, self.trained) == (other.key, other.starts, other.trained)

    def holds(
        self, model: nn.Module, loss_fn: Any, inputs: Sequence[torch.Tensor], bound: Mapping[str, Any]
    ) -> list[torch.Tensor] | None:
        """The model's parameters and buffers where the plan holds for a call now; its key is compared before."""
        if self.by_regions:  # each region looks for itself
            return self.its_parameters(model)
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
        return tensors if not traced.mutated or self._overlaps([*tensors, *inputs]) == traced.overlaps else None

    @cached_property
    def trained(self) -> dict[str, bool]:
        """Which of the model's parameters required a gradient when it was planned."""
        return {entry.name: entry.requires_grad for entry in self.reads.entries if entry.is_parameter}

    def its_parameters(self, model: nn.Module) -> list[torch.Tensor] | None:
        """The model's parameters; None where there are others than at planning, or others are tied or trained."""
        parameters = parameters_of(model)
        if len(parameters) != len(self.trained):
            return None
        if list(map(id, parameters)) != self.parameters:
            named: dict[str, Any] = dict(nn.Module.named_parameters(model, remove_duplicate=False))
            found: list[Any] = [named.get(name) for name in self.trained]
            if set(map(id, found)) != set(map(id, parameters)):
                return None
            parameters, self.parameters = found, list(map(id, found))
        return parameters if [p.requires_grad for p in parameters] == list(self.trained.values()) else None

    def _overlaps(self, primals: Sequence[torch.Tensor]) -> Overlaps:
        if self.spans is None:
            self.spans = spans(primals) or ()
        apart = self.spans and lie_apart(primals, self.spans)
        return () if apart else overlaps(primals, self.planned.prepared.traced.mutated)

    def unchanged(
        self, model: nn.Module, loss_fn: Any, fixed: bool = True, lent: bool = False
    ) -> list[torch.Tensor] | None:
        """The model's parameters and buffers where the plan holds for what the model is now.

        Args:
            fixed: whether to look at what was read of classes, functions and globals, too.
            lent: whether calls bring parameters of their own, so that those of now may be any.
        """
        tensors = self._state(model, loss_fn, fixed)
        if tensors is not None and (lent or (self.alike is not None and self.alike(*tensors))):
            return tensors
        if tensors is None or not (_PLAIN.issuperset(map(type, tensors)) or all(map(is_planned_for, tensors))):
            return None
        alike = list(map(_decides, tensors)) == self.state or list(map(state_key, tensors)) == self.state
        self.alike = look_alike(tensors) if alike else self.alike
        return tensors if alike else None

    def _state(self, model: nn.Module, loss_fn: Any, fixed: bool) -> list[torch.Tensor] | None:
        """What was read is as it was: the same objects (the usual case, checked quickly), or equal ones."""
        tensors = self.matched.state(fixed) if self.matched else None
        if tensors is None:
            try:
                self.matched = match(self.reads, model, loss_fn)
            except Differs:
                self.matched = None
            else:
                tensors = self.matched.tensors()
        return tensors


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


def describe_starts(paths: Iterable[str]) -> str:
    return ", ".join(path or "the output" for path in paths)


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
