"""Regions while a step runs: for the time of the model's forward, their own `forward` is the planned one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from passes._torch import arrived, dispatch_modes, function_modes, global_hooks, is_compiled
from passes.run._torch import Autocast, active_saving_hooks, under_transform
from passes.trace.arguments import call_signature, copied_forward, set_forward
from passes.trace.binding import binder, call_bound
from passes.trace.expected import unless_none
from passes.trace.matching import Differs, match
from passes.trace.reads import Matched, Reads
from passes.trace.structure import flatten
from passes.trace.templates import Template
from planner.decided import Decided, PlannedRun
from planner.ranks.sharded import gathered_parameters, sources_of
from planner.regions.losses import LOSS, looking_at_losses, region_module

from . import raised
from .entry import Entry, Losses, starts_of
from .fallback import Fallback
from .plan_key import Key, Look, call_key, key_difference


class Unplanned(NamedTuple):
    """A region's call that ran plain: which one, why, and whether planning it `helps` the next one like it."""

    call: str
    why: str
    helps: bool


class RegionForward:
    """The `forward` of a region: each call runs the plan of that call, and what has none runs plain.

    Attributes:
        root: the model that it is a region of.
        traced: the module's own `forward` when it was planned (None: its class's); `previous` is the one of now.
        eager_calls: calls that no gradient reaches, by their numbers; `sometimes_eager`: another course plans none.
        is_right: whether no spot check has found it to compute something else than the plain one.
        strays: how many calls answered forward's questions otherwise than the sample, and ran plain.
        surprise: the autocast of a backward that was not one that was planned for; None where each was.
        scattered: parameters that `fully_shard` gathers for it, or for another module of the model.
        lent: whether calls have parameters of their own (`functional_call`), so that the module's tell nothing.
        modes: the user's dispatch modes, as the step began.
        unplanned: the first call of this step that ran plain and should not have; None where there was none.

    Dynamo does not see it: it is there only while a planned model's forward runs, which Dynamo leaves alone.
    """

    runs_plan = True

    def __init__(
        self, root: nn.Module, module: nn.Module, path: str, runs: Sequence[PlannedRun],
        others: Sequence[PlannedRun] = (), eager_calls: Collection[int] = (), sometimes_eager: bool = False,
        scattered: Sequence[Any] = (), lent: bool = False,
    ) -> None:  # fmt: skip
        self.root, self.model, self.path, self.scattered = root, module, path, scattered
        self.eager_calls, self.sometimes_eager, self.lent = eager_calls, sometimes_eager, lent
        self.traced = self.previous = module.__dict__.get("forward")
        self.signature = call_signature(module)
        self.__signature__, self.bind = self.signature, binder(self.signature)
        self.losses, self.calls, self.strays, self.is_right = Losses(), 0, 0, True
        self.apart = WeakKeyDictionary[Any, Fallback]()
        self.surprise: Autocast | None = None
        self.unplanned: Unplanned | None = None
        self.modes: list[Any] = []
        every = [*runs, *others]
        self.numbers, self.cache = [run.number for run in every], [self._entry(run) for run in every]
        self.own = self.cache[: len(runs)]
        self.looks: dict[int, tuple[Look | None, Entry]] = {}

    def _entry(self, run: PlannedRun) -> Entry:
        return Entry(run.key, list(run.state), run.planned, starts_of(run.planned.prepared.traced))

    def _entries(self, number: int) -> Iterator[Entry]:
        """The plans, those of a call first."""
        yield from (entry for n, entry in zip(self.numbers, self.cache, strict=False) if n == number)
        if number not in self.eager_calls:
            yield from self.cache

    def _planned(self, number: int, inputs: Sequence[torch.Tensor], template: Template) -> Iterator[Entry]:
        """The plans for calls that look like this one, that of its number's last call first."""
        look, last = self.looks.get(number, (None, None))
        if look is not None and last is not None and look.is_of(inputs, template):
            yield last
        key = call_key(inputs, template)
        for entry in self._entries(number):
            if entry.key == key:
                self.looks[number] = Look.of(inputs, template), entry
                yield entry

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the region has while no plan runs."""
        return self.previous or type(self.model).forward.__get__(self.model)

    def stands_for(self) -> Any:
        """What it is for guards (`stood_for`)."""
        return unless_none(self.previous)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied_forward(self.model, self.previous, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # something around it was compiled since it was planned
            return self.original(*args, **kwargs)
        number, self.calls = self.calls, self.calls + 1
        if not (self.is_right and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        if self.previous is not self.traced or active_saving_hooks():  # a checkpoint would run the plain one again
            self._miss(number, "its forward is another one, or runs under hooks on saved tensors", helps=False)
            return self.original(*args, **kwargs)
        if global_hooks() or function_modes() or dispatch_modes() != self.modes:
            self._miss(number, "hooks of every module, or a mode, are there for it", helps=False)
            return self.original(*args, **kwargs)
        bound = arrived(self.bind(args, kwargs))
        inputs, template = flatten(bound)
        if under_transform(inputs):
            self._miss(number, "it is under a transform of torch.func", helps=False)
            return self.original(*args, **kwargs)
        for entry in self._planned(number, inputs, template):
            if (state := entry.holds(self.model, None, inputs, bound)) is not None:
                primals = [*state, *inputs]
                sources = sources_of(self.scattered, primals) if self.scattered else None
                plain, fallback = partial(self.original, *args, **kwargs), Fallback(self, entry, bound)
                return raised.run(entry.planned, fallback, primals, bound, plain, sources)
        if self.unplanned is None:
            self._miss(number, *self._difference(number, call_key(inputs, template)))
        return self.original(*args, **kwargs)

    def _difference(self, number: int, key: Key) -> tuple[str, bool]:
        """How a call that no plan is for differs from the one of its number; whether a plan for it would serve others.

        What the module itself is may change with each step: that is found as one begins, if anything is to be planned.
        """
        if (changed := self.changed()) is not None:
            return f"{changed.where} {changed.now}, planned for {changed.then}", False
        planned = next(self._entries(number), None)
        if planned is None:
            return "the sample did not call it", True
        if (differs := key_difference(key, planned.key)) is None:
            return "it answers the model's `if`s otherwise", True
        return "{} is {}, planned for {}".format(*differs), True

    def _miss(self, number: int, why: str, helps: bool) -> None:
        """Note that a call runs plain."""
        if self.unplanned is None and number not in self.eager_calls and not self.sometimes_eager:
            self.unplanned = Unplanned(f"call {number + 1} of region {self.path}", why, helps)

    def changed(self, known: set[int] | None = None) -> Differs | None:
        """How the module differs from what its plans were made for; None where one of them holds, or there is none.

        Args:
            known: of which plans' reads those of classes, functions and globals were just found to hold: equal
                regions share them.
        """
        known = set() if known is None else known
        if not self.own or any(self._holds(entry, known) for entry in self.own):
            return None
        try:
            match(self.own[0].reads, self.model, None)
        except Differs as differs:
            return differs
        return Differs("(state)", "parameters or buffers of other shapes or types", "those at planning")

    def _holds(self, entry: Entry, known: set[int]) -> bool:
        fixed = id(entry.reads)
        if entry.unchanged(self.model, None, fixed=fixed not in known, lent=self.lent) is None:
            return False
        known.add(fixed)
        return True

    def plain(self, bound: Mapping[str, Any]) -> Any:
        """The region's own forward, for calls that are replayed."""
        return call_bound(self.original, self.signature, bound)

    def match(self, reads: Reads) -> Matched:
        """Find in the region, as it is now, what its forward read."""
        return match(reads, self.model, None)

    def replayed(self, autocast: Autocast) -> None:
        """Note that the step's own backward has to be looked at."""
        self.surprise = autocast

    def strayed(self, entry: Entry) -> None:
        """See `Plans`."""
        self.strays += 1

    def differed(self, entry: Entry) -> str:
        """See `Plans`."""
        self.is_right = False
        return "This region runs in eager from now on."

    def start(self) -> None:
        """Be the module's forward, unless that was compiled since it was planned: the compiler would look into this."""
        current = self.model.__dict__.get("forward")
        self.calls, self.unplanned, self.modes = 0, None, dispatch_modes()
        self.previous = self.previous if current is self else current
        if not is_compiled(self.model):
            set_forward(self.model, self)

    def end(self) -> None:
        """Undo `start`."""
        set_forward(self.model, self.previous)


@contextmanager
def running_regions(regions: Sequence[RegionForward]) -> Iterator[None]:
    """Let the regions' modules run their plans in the block."""
    loss = next((region.model for region in regions if region.path == LOSS), None)
    try:
        for region in regions:
            region.start()
        with looking_at_losses(loss) if loss is not None else nullcontext():
            yield
    finally:
        for region in reversed(regions):
            region.end()


def are_of(regions: Sequence[RegionForward], model: nn.Module) -> bool:
    """Whether these regions are still modules of the model, and none of their paths leads to another one."""
    return all(region.path == LOSS or _module_at(model, region.path) is region.model for region in regions)


def regions_of(model: nn.Module, planned: Decided, others: Sequence[Decided] = ()) -> list[RegionForward]:
    """The regions of a plan, as they are in `model`; one that the sample did not call runs like the most frugal.

    Args:
        others: plans of calls that look the same and take other courses between the regions.
    """
    own, besides = _runs(model, planned), [_runs(model, other) for other in others]
    paths = list(dict.fromkeys(path for runs in (own, *besides) for path in runs))
    found = {id(m): (path, m) for path in reversed(paths) if (m := _module_at(model, path)) is not None}
    modules = dict(reversed(found.values()))  # each once: some may have become one since
    known = [d.prepared.regions for d in (planned, *others) if d.prepared.regions is not None]
    scattered = gathered_parameters(model)
    made = [
        RegionForward(
            model, m, path, own.get(path, ()), [run for runs in besides for run in runs.get(path, ())],
            {n for r in known for p, n in r.eager_calls if p == path}, any(path in r.eager for r in known), scattered,
            any(run.lent for r in known for run in r.crossings.runs if run.path == path),
        ) for path, m in modules.items()
    ]  # fmt: skip
    spare = {path for r in known for path in r.spare}
    if spare and not scattered:
        with running_regions(made):
            for region in made:
                if region.path in spare and region.changed() is not None:
                    region.own = region.cache = []  # of the same class, and not its equal: a Sequential, say
    return made


def _runs(model: nn.Module, planned: Decided) -> dict[str, list[PlannedRun]]:
    """The runs of each region, by its path."""
    found: dict[str, list[PlannedRun]] = {}
    for run in planned.runs:
        found.setdefault(run.path, []).append(run)
    frugal = sorted(planned.runs, key=lambda run: -run.planned.solution.added_cost)
    for path in planned.prepared.regions.spare if planned.prepared.regions is not None else ():
        kind = type(_module_at(model, path))
        found[path] = [run for run in frugal if type(_module_at(model, run.path)) is kind]
    return found


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    """The module that a region's path stands for, unless it was taken out of the model."""
    try:
        return region_module(model, path)
    except AttributeError:
        return None
