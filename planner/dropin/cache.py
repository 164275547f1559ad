"""What a call of a planned model does: find the plan that holds for it, make one where none does, run it."""

from __future__ import annotations

import inspect
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from passes._torch import (
    CLONES_BEFORE_CHANGES,
    dispatch_modes,
    function_modes,
    global_hooks,
    num_dispatch_modes,
    profiler_runs,
    saving_hooks_aside,
)
from passes.device import empty_cache, kind_of
from passes.errors import (
    CaptureError,
    ForwardFailed,
    InputMismatch,
    NoBackward,
    OnlyInEager,
    StateChanged,
    Unsupported,
)
from passes.exclusive import turn
from passes.printable import brief, describe_kind
from passes.run._torch import Autocast, active_saving_hooks, backward_number
from passes.run.arena import ask_for
from passes.run.stale import check_casts, note_plain
from passes.run.step import refuse_tracing
from passes.trace.arguments import argument_names, run_model, set_forward, state_tensors
from passes.trace.binding import binder
from passes.trace.carried import carried, carry
from passes.trace.first_call import Remembers, remember, remembered
from passes.trace.layouts import BACKWARD_AUTOCAST
from passes.trace.matching import Differs, match, match_arguments
from passes.trace.nodes import Change, put
from passes.trace.overlaps import overlaps
from passes.trace.places import user_level
from passes.trace.reads import Matched, Reads
from passes.trace.refuse import cached_parametrizations, has_sharded, is_sharded, untracked
from passes.trace.structure import Bound, flatten, held_objects
from passes.trace.templates import argument_path
from planner.decided import Decided
from planner.errors import CheckError, RegionError
from planner.options import AUTO, BUCKET
from planner.pipeline import Replan
from planner.ranks.sharded import Gathers, gathered_aside, input_dtype
from solvers.errors import BudgetError, PlannerError

from . import raised
from .courses import Courses
from .entry import Entry, Losses, Watched, describe_starts, is_planned_for, starts_of
from .fallback import Fallback
from .notices import REGION, SLOW_REPLANS, Notices
from .plan_key import Key, call_key, describe_tensor, key_difference, state_key
from .regions import RegionForward, are_of, regions_of, running_regions

CACHE_BYTES = 1 << 30  # of host memory, for the plans that are kept
DIFFERENCES = 2  # spot checks that found other results than the plain forward's, after which nothing is planned
STRAYS = 3  # calls that answer forward's questions otherwise than the sample, after which regions are planned
OPAQUE = 'a planned step runs as it is; torch.compile(model, backend="checkpoint_planner") compiles under a budget'
_HINT = 'on_new_shape="replan" plans such calls, "eager" runs them unplanned.'


class PlanState:
    """Everything behind a `PlannedModule`: the plans made, latest use first, and the checks before each call."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, replan: Replan, on_new_shape: str,
        signature: inspect.Signature,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.replan, self.on_new_shape = model, loss_fn, replan, on_new_shape
        self.signature, self.binder = signature, binder(signature)
        self.carried: tuple[str, ...] = ()  # attributes that are arguments of a step, too
        self.cache: list[Entry] = []
        self.idle: list[tuple[Key, list[bool]]] = []  # calls that cannot be planned, and what required a gradient then
        self.losses = Losses()
        self.last: Entry | None = None  # that ran by regions
        self.watched: Watched | None = None
        self.watching: bool | None = False  # whether backwards are looked at; None: it helps nothing
        self.unplanned = False
        self.applied: Any = None  # the `PlannedForward` that is being called
        self.notices = Notices(model)
        self.replans, self.numbers, self.of_state = Counter[str](), set[str](), set[str]()
        self.counts_on = False  # whether calls with other lengths are planned as a whole, each for its own
        self.first_call: Remembers | None = None  # that is yet to come
        self.is_copy = False  # of what was planned
        self.differences = 0  # that spot checks have found
        self.waiting = WeakSet[Fallback]()  # of the calls whose steps are not over
        self.apart = WeakKeyDictionary[Any, Fallback]()  # of those whose nodes may not hold it
        self.before_hooks: Any = None  # the hook that plans before those of `fully_shard` gather parameters
        self.looking = False  # whether that runs
        self.gathers: Gathers | None = None  # of a model with sharded modules
        self.courses = Courses()
        self.outdated: list[str] = []  # modules that hold whole parameters from before a change, in this call

    def start(self, bound: Mapping[str, Any], planned: Decided) -> None:
        """Remember the first plan, made for calls that look like `bound`."""
        self.notices.still_eval, self.carried = not self.model.training, carried(bound)
        self.gathers = Gathers() if has_sharded(self.model) else None
        self.look_at_gathers()
        self.traced_forward, self.first_call = self.model.__dict__.get("forward"), planned.prepared.traced.first_call
        self.first = replace(self._add(self.key_of(*flatten(dict(bound))), planned))  # a copy, never bound to the model

    def around(self, model: nn.Module) -> PlanState:
        """The same plans for another instance of the model; whether they hold for it is seen when it is called."""
        new = PlanState(model, self.loss_fn, self.replan, self.on_new_shape, self.signature)
        new.cache = [replace(entry, matched=None, regions=None) for entry in self.cache]
        new.first, new.latest, new.traced_forward = self.first, self.latest, None
        new.losses.expected, new.carried = self.losses.expected, self.carried
        new.first_call, new.is_copy = self.first.planned.prepared.traced.first_call, True  # it may not be whole yet
        new.gathers = Gathers() if self.gathers is not None else None
        return new

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound:
        """The arguments of a call by name, with the state that forward carries."""
        bound = self.binder(args, kwargs)
        carry(self.model, bound, self.carried)
        return bound

    def key_of(self, tensors: Sequence[torch.Tensor], template: Any) -> Key:
        """The same before and after the model's own hooks have cast the inputs, which `fully_shard` does."""
        return call_key(tensors, template, input_dtype(self.model))

    def _add(self, key: Key, planned: Decided, starts: tuple[str, ...] | None = None) -> Entry:
        """Remember a plan; those used longest ago are dropped when all take too much memory, except for two losses'."""
        with remembered(planned.prepared.traced.first_call):
            state = state_tensors(self.model, planned.prepared.traced.state)
        starts = starts_of(planned.prepared.traced) if starts is None else starts
        entry = Entry(key, list(map(state_key, state)), planned, starts, sharded=has_sharded(self.model))
        self.latest = planned
        self.cache = [entry, *(replace(e, regions=None) if e.key == key else e for e in self.cache)]
        while len(self.cache) > 2 and sum(e.nbytes for e in self.cache) > CACHE_BYTES:
            del self.cache[-1]
        return entry

    @property
    def root(self) -> nn.Module:
        """See `Plans`."""
        return self.model

    def run(self, bound: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Run the step planned for such a call, planning it first where that is asked for; else `plain`."""
        refuse_tracing()
        with turn(self.model):
            return self._run(bound, plain)

    def _run(self, bound: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], Any]) -> Any:
        self.notices.still_eval = False
        if global_hooks():
            self.notices.global_hooks()
            return self._unplanned(bound, plain)
        if modes := function_modes():
            self.notices.function_mode(modes[-1])
            return self._unplanned(bound, plain)
        if modes := dispatch_modes():
            self.notices.dispatch_mode(modes[-1])
        if self.outdated:
            self.notices.outdated(self.outdated)
            return self._unplanned(bound, plain)
        if self.differences >= DIFFERENCES:
            return self._unplanned(bound, plain)
        hooks = active_saving_hooks()
        if hooks and (self.first.by_regions or hooks.endswith(CLONES_BEFORE_CHANGES)):
            self.notices.saving_hooks(makes_way=True)
            return self._unplanned(bound, plain)
        before, (tensors, template) = carried(bound), flatten(dict(bound))
        entry, state = self._look(bound, tensors, template)
        if entry is None:
            return self._unplanned(bound, plain)
        if carried(bound) != before:  # it was planned anew, with state among its arguments
            tensors, _ = flatten(dict(bound))
        if entry.planned.plain:
            self.notices.gradients(entry.planned, state)
            return self._unplanned(bound, plain)
        if entry.by_regions:
            return self._by_regions(entry, bound, state, plain)
        return self._execute(entry, [*state, *tensors], bound, plain)

    def after_first_call(self) -> AbstractContextManager[None]:
        """The planned model as its first planned call leaves it, for the time of the block."""
        return remembered(None if self.is_copy else self.first_call)

    def _remember(self, bound: Mapping[str, Any]) -> None:
        """Leave what a plain first call with these arguments would: a length, which need not be the sample's."""
        first, self.first_call = self.first_call, None
        self.first.planned.prepared.sizes.first_call = None
        if first is not None:
            self._leave(first, bound)

    def _leave(self, first: Remembers, bound: Mapping[str, Any]) -> list[Change]:
        planned, device = self.first.planned, self.first.planned.prepared.device
        ask_for(planned.reservation.arena, device, self)  # else segments of other sizes would be reserved for it
        with saving_hooks_aside(), self.set_aside(), gathered_aside(self.model):
            left = first.of(self.model, bound, self.loss_fn)
        done = remember(left)
        empty_cache(device)  # the step finds the allocator as planned for
        return done

    def _remembered_again(
        self, key: Key, tensors: Sequence[torch.Tensor], bound: Mapping[str, Any], starts: tuple[str, ...] | None
    ) -> tuple[Entry | None, list[torch.Tensor]]:
        """The plan for calls that leave something whatever is there before (a table of the latest length).

        That has shown where such calls were planned with it in place twice, as it had gone between. Then the forward
        runs for it, as of now, and the plan holds where that is what it was made with.
        """
        made = (e.planned.prepared.traced.first_call for e in self.cache if e.key == key and e.again)
        if self._in_hooks or (first := next(made, None)) is None:
            return None, []
        done = self._leave(first, bound)
        entry, state = self.find(key, tensors, bound, starts)
        for change in reversed(done) if entry is None else ():
            put(change, change.before)
        return entry, state

    def _unplanned(self, bound: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], Any]) -> Any:
        note_plain(self.model)
        return plain(bound)

    def in_eval(self) -> None:
        """Say what there is to say of a call that is no training step, and runs plain."""
        note_plain(self.model)
        self.notices.in_eval()

    def _look(
        self, bound: Mapping[str, Any], tensors: Sequence[torch.Tensor], template: Any
    ) -> tuple[Entry | None, list[torch.Tensor]]:
        """The plan for such a call, made now where there is none and one may be made."""
        self._look_back()
        self._plan_course()
        key, starts = self.key_of(tensors, template), self.losses.predict()
        entry, state = self.find(key, tensors, bound, starts)
        if entry is None and self.first_call is not None:
            self._remember(bound)
            entry, state = self.find(key, tensors, bound, starts)
        if entry is None and not self._hindrance:
            entry, state = self._remembered_again(key, tensors, bound, starts)
        if entry is None or entry.outdated or entry.starts != (starts or entry.starts) or self._sharded_since(entry):
            trained = [t.requires_grad for t in (*self.model.parameters(), *tensors)]
            if not any(trained) or (key, trained) in self.idle:
                return None, []
            if entry is None and not self._may_plan(key, tensors, bound):
                return None, []
            if entry is not None and self._hindrance:
                return entry, state
            if entry is not None and self._in_hooks:
                if self.before_hooks is None and self._sharded_since(entry):
                    warnings.warn(
                        "fully_shard was called after this model was planned: its next call is planned anew, for what "
                        "it then holds. This one may not be under the budget.",
                        stacklevel=user_level(),
                    )
                self.plan_before_hooks()
                return entry, state
            if entry is not None and entry.strayed >= STRAYS:
                try:
                    return self._plan(key, bound, entry, starts)
                except PlannerError:
                    entry.outdated = False  # it serves the calls that do not stray
                    return entry, state
            try:
                return self._plan_as_can_be(key, bound, entry, starts)
            except NoBackward:  # merged adapters: as in eager, it is `backward` that would fail
                return None, []
            except (ForwardFailed, StateChanged) as error:  # the plain forward leaves what it leaves in eager
                warnings.warn(f"planned step not used, not under the budget: {error}", stacklevel=user_level())
                return None, []
            except (CaptureError, RegionError, OnlyInEager, Unsupported, CheckError) as error:  # training goes on
                if isinstance(error, CheckError) and self.first.planned.prepared.options.check is True:
                    raise
                self.idle.append((key, trained))
                warnings.warn(f"{error} Such calls run in eager, not under the budget.", stacklevel=user_level())
                return None, []
            except BudgetError as error:
                counts = self.first.planned.prepared.traced.counts
                if entry is None and counts and key == self.first.key:  # it may pick more than the sample did
                    self.idle.append((key, trained))
                    warnings.warn(f"{error}. Such calls run in eager, not under it.", stacklevel=user_level())
                    return None, []
                error.args = (f"{error}. {self._why_anew(entry, starts, key, tensors, bound)}",)
                if entry is None or not entry.by_regions:
                    raise
                self._go_on(entry, error)
        return entry, state

    def _why_anew(
        self, entry: Entry | None, starts: tuple[str, ...] | None, key: Key, inputs: Sequence[torch.Tensor],
        bound: Mapping[str, Any],
    ) -> str:  # fmt: skip
        """Why a call is planned anew, for whom no plan within the budget was found."""
        if entry is None:
            return f"This call is not as the sample: {self.difference(key, inputs, bound)}"
        if self._sharded_since(entry):
            return "fully_shard was called since the last plan."
        return (
            "This call is planned for such a backward as the last one was, from "
            f"{describe_starts(starts or entry.starts)} with gradients in its strides; the plan so far is for another, "
            f"from {describe_starts(entry.starts)}. With loss_fn= the loss is part of the plan from the start."
        )

    def _sharded_since(self, entry: Entry) -> bool:
        """Whether `fully_shard` was called since a plan by regions was made, which changes what the step holds."""
        places = (self.model, *(region.model for region in entry.regions or ()))
        return entry.by_regions and not entry.sharded and any(map(is_sharded, places))

    @property
    def _in_hooks(self) -> bool:
        """Whether hooks of the model have gathered its parameters for this call, in which nothing can be measured."""
        return not self.looking and has_sharded(self.model)

    @property
    def _hindrance(self) -> str:
        """Why nothing can be planned now. A profiler may hear of memory, and of those there can be one; a plan by
        regions runs backwards of its own to see what is held.
        """
        if not kind_of(self.first.planned.prepared.device).caches and profiler_runs():
            return "while a profiler runs (planning measures memory with one of its own)"
        if num_dispatch_modes():
            return "within a TorchDispatchMode (it would be told of planning's ops, and keep their tensors)"
        if self.first.by_regions and backward_number() >= 0:
            return "within a backward (a custom function's, a reentrant torch.utils.checkpoint's: leave that out)"
        if (name := next(untracked(self.model), None)) is not None:
            return f"while {name} is a tensor made under torch.inference_mode() (its clone() outside is not)"
        cached = next(cached_parametrizations(self.model), None) is not None
        return "within parametrize.cached() (open it in forward, or leave it out)" if cached else ""

    def plan_before_hooks(self) -> None:
        """From now on look for a call's plan before hooks of the model gather parameters for it."""
        if self.before_hooks is None:
            self.gathers = self.gathers or Gathers()
            self.before_hooks = self.model.register_forward_pre_hook(_before_hooks, prepend=True, with_kwargs=True)

    def look_at_gathers(self) -> None:
        """Find out, as a call begins, whether sharded modules hold what eager would use in a part of it only."""
        self.outdated = self.gathers.outdated(self.model) if self.gathers is not None else []

    def stop(self) -> None:
        """The plan was removed from the model."""
        if self.before_hooks is not None:
            self.before_hooks.remove()
            self.before_hooks = None

    def _by_regions(
        self, entry: Entry, bound: Mapping[str, Any], state: Sequence[torch.Tensor],
        plain: Callable[[Mapping[str, Any]], Any],
    ) -> Any:  # fmt: skip
        traced = entry.planned.prepared.traced
        check_casts(self.model)
        self.notices.gradients(entry.planned, state)
        regions = self._regions(entry)
        self.last = entry
        ask_for(entry.planned.reservation.arena, entry.planned.prepared.device, entry.planned)
        try:
            with running_regions(regions):
                output = plain(bound)
        finally:
            self.courses.look(entry, bound, self._plans_anew)
        if self.watching:
            self.losses.expected = started = self.losses.called(entry.starts)
            self.watched = Watched(started, traced, flatten(output)[0], entry.planned.prepared.layouts)
        return output

    def _regions(self, entry: Entry) -> list[RegionForward]:
        """The regions of a plan, in this model as it is."""
        if not entry.regions or not are_of(entry.regions, self.model):
            named = dict([*self.model.named_parameters(), *self.model.named_buffers()])
            _check_materialized(named.values(), lambda: list(named))
            others = [e.planned for e in self.cache if e is not entry and e.is_another_course_of(entry)]
            entry.regions = regions_of(self.model, entry.planned, others)
        found: list[RegionForward] = entry.regions
        return found

    def _changed_region(self, entry: Entry) -> InputMismatch | None:
        """How a region differs from what was planned for, before a step: one that changes within it runs plain.

        What is sharded is not there before its hooks have gathered it. Where regions change again and again, planning
        anew takes longer than it saves.
        """
        often = sum(times for name, times in self.replans.items() if name.startswith(REGION)) >= SLOW_REPLANS
        if not entry.by_regions or entry.sharded or often:
            return None
        regions, known = self._regions(entry), set[int]()
        with running_regions(regions):
            found = next(((r.path, differs) for r in regions if (differs := r.changed(known)) is not None), None)
        if found is None:
            return None
        path, differs = found
        return InputMismatch(f"{REGION}{path}", f"{differs.where} {differs.now}", differs.then, _HINT)

    def _look_back(self) -> None:
        """Where a region's backward was not one that was planned for, learn from what the step's own starts.

        The first such step shows that it does, the next one is looked at, then it is planned anew.
        """
        entry, self.last = self.last, None
        if entry is not None and entry.strayed < STRAYS and self._plans_anew:
            for region in (region for region in entry.regions if region.strays >= STRAYS):
                entry.planned.prepared.sizes.ask_no_more(region.path)
                entry.strayed, entry.outdated = STRAYS, True
        if entry is None or self.watching is None or all(r.surprise is None for r in entry.regions):
            return
        prepared = entry.planned.prepared
        autocast = next(r.surprise for r in entry.regions if r.surprise is not None)
        if autocast and BACKWARD_AUTOCAST not in prepared.traced.layouts:
            prepared.layouts.setdefault(BACKWARD_AUTOCAST, autocast)
            entry.outdated = True
        entry.outdated = entry.outdated or (self.watched is not None and self.watched.learned)
        self.watching = True

    def _plan_course(self) -> None:
        """Plan the call before this one where it called regions in a way that no plan was made for."""
        if self.courses.missed is None or self._hindrance:
            return
        if self._in_hooks:
            self.plan_before_hooks()
            return
        entry, bound = self.courses.take()
        try:
            added, _ = self._plan(entry.key, bound, None, entry.starts)
        except PlannerError as error:
            self.courses.give_up(entry, error)
        else:
            self.courses.planned(added, self.cache)

    def _go_on(self, entry: Entry, error: BudgetError) -> None:
        """Keep a plan whose regions replay: no other one keeps the budget."""
        warnings.warn(
            f"no plan for such a backward keeps the budget ({error}): steps go on replaying the plain forward of "
            "regions (correct, but not under the budget).",
            stacklevel=user_level(),
        )
        entry.outdated, self.watching, self.losses = False, None, Losses()

    def replayed(self, autocast: Autocast) -> None:
        """The next call is planned for that."""

    def strayed(self, entry: Entry) -> None:
        """Plan the next call by regions where such calls come again and again: the code between them runs in eager."""
        entry.strayed += 1
        options, sizes = entry.planned.prepared.options, entry.planned.prepared.sizes
        if entry.strayed == STRAYS and self._plans_anew and options.regions == AUTO:
            sizes.may_ask, entry.outdated = False, True
            warnings.warn(
                "calls answer forward's questions about values now one way, now another: the next one is planned by "
                "regions, where there are some.", stacklevel=user_level(),
            )  # fmt: skip

    def differed(self, entry: Entry) -> str:
        """See `Plans`."""
        self.differences += 1
        entry.outdated = True
        if self.differences < DIFFERENCES:
            return "The next one is planned anew."
        return "The model runs in eager from now on."

    def find(
        self, key: Key, inputs: Sequence[torch.Tensor], bound: Mapping[str, Any],
        starts: tuple[str, ...] | None = None,
    ) -> tuple[Entry | None, list[torch.Tensor]]:
        """The plan that holds for such a call of the model as it is now, with the model's parameters and buffers.

        One for a backward from `starts` where there is one; else one for another backward, if any holds. One of the
        whole model knows whether it is for these values; one by regions finds out as it runs.
        """
        with self._own_forward():
            for entry in sorted(self.cache, key=lambda e: e.rank(starts)):
                if entry.key == key:
                    state = entry.holds(self.model, self.loss_fn, inputs, bound)
                    if state is not None and self._changed_region(entry) is None:
                        self.cache = [entry, *(e for e in self.cache if e is not entry)]  # at once, for a Ctrl-C
                        return entry, state
        return None, []

    @property
    def _plans_anew(self) -> bool:
        return self.on_new_shape in ("replan", BUCKET)

    def _may_plan(self, key: Key, inputs: Sequence[torch.Tensor], bound: Mapping[str, Any]) -> bool:
        if self.on_new_shape == "error":
            raise self.difference(key, inputs, bound)
        mismatch = self.difference(key, inputs, bound)
        self.replans[mismatch.argument] += 1
        if _is_number(mismatch.got.rpartition("=")[2]):
            self.numbers.add(mismatch.argument)
        elif any(mismatch.argument == entry.name for entry in self.first.reads.entries):
            self.of_state.add(mismatch.argument)
        wanted = self._plans_anew
        hindrance = self._hindrance
        planned = wanted and not self._in_hooks and not hindrance
        said = "planning anew" if planned else "planned step not used"
        if wanted and hindrance:
            said = f"planned step not used {hindrance}"
        elif wanted and not planned and self.loss_fn is None and self.before_hooks is None:
            said = "planned from the next call on"
            self.plan_before_hooks()
        warnings.warn(f"{said}: {mismatch}", stacklevel=user_level())
        return planned

    def _plan(
        self, key: Key, bound: Mapping[str, Any], other: Entry | None, starts: tuple[str, ...] | None
    ) -> tuple[Entry, list[torch.Tensor]]:
        begin = time.monotonic()
        with saving_hooks_aside(), self.set_aside(), gathered_aside(self.model):
            planned = self.replan(self.model, bound, starts)
        if carried(bound) != self.carried:
            self.carried, key = carried(bound), self.key_of(*flatten(dict(bound)))
        # An entry whose model was changed since finds its objects again when it is next looked at.
        stale = other is not None and (other.outdated or self._sharded_since(other))
        self.cache = [replace(e, matched=None) for e in self.cache if not (stale and e is other)]
        seconds, buckets = time.monotonic() - begin, self.on_new_shape == BUCKET
        again = False
        if (first := planned.prepared.traced.first_call) is not None:
            earlier = (e.planned.prepared.traced.first_call for e in self.cache if e.key == key)
            again = any(e is not None and e.paths == first.paths for e in earlier)
            remember(first.left)
            planned.prepared.sizes.first_call = None
        self.notices.replanned(self.replans, self.numbers, self.of_state, seconds, len(self.cache), buckets)
        entry = self._add(key, planned, starts)
        entry.again = again
        return entry, state_tensors(self.model, planned.prepared.traced.state)

    def _plan_as_can_be(
        self, key: Key, bound: Mapping[str, Any], other: Entry | None, starts: tuple[str, ...] | None
    ) -> tuple[Entry, list[torch.Tensor]]:
        """Plan a call; where forward takes lengths from the sample's values, and calls have others, by regions.

        Where that cannot be had, it is planned as a whole for its own.
        """
        prepared, first = self.first.planned.prepared, self.first.planned.prepared.traced
        if other is None and first.counts and prepared.options.regions == AUTO and not self.counts_on:
            prepared.sizes.count(False)
            try:
                return self._plan(key, bound, other, starts)
            except (CaptureError, RegionError, BudgetError):
                prepared.sizes.count(True)
                self.counts_on = True
        return self._plan(key, bound, other, starts)

    def _execute(
        self, entry: Entry, primals: list[torch.Tensor], bound: Mapping[str, Any],
        plain: Callable[[Mapping[str, Any]], Any],
    ) -> Any:  # fmt: skip
        planned, traced = entry.planned, entry.planned.prepared.traced
        _check_materialized(
            primals, lambda: [*(e.name for e in traced.state), *argument_names(traced.input_template)]
        )
        if entry.key.autocast and any(p.is_leaf and p.requires_grad for p in primals[len(traced.state) :]):
            _check_cast_leaves(primals, planned)
        self.notices.saving_hooks()
        self.notices.gradients(planned, primals)
        self.notices.waiting(planned, self.waiting)
        fallback = Fallback(self, entry, bound, partial(self.through, self.applied))
        output = raised.run(planned, fallback, primals, bound, partial(self._unplanned, bound, plain))
        self.waiting.add(fallback)
        return output

    def difference(
        self, key: Key, inputs: Sequence[torch.Tensor], bound: Mapping[str, Any]
    ) -> InputMismatch:
        """How a call differs from those of a plan that is built like it; of the first where none is."""
        like = next((e for e in self.cache if e.key.inputs[0] == key.inputs[0]), self.first)
        if (found := key_difference(key, like.key)) is not None:
            return InputMismatch(*found, _HINT)
        if self.first.by_regions and self.first.its_parameters(self.model) is None:
            return InputMismatch("(parameters)", "others, or others requiring a gradient", "those at planning", _HINT)
        try:
            with self._own_forward():
                matched = match(self.first.reads, self.model, self.loss_fn)
                state = matched.tensors() or []
                match_arguments(self.first.reads, matched, self.model, held_objects(bound))
        except Differs as differs:
            return InputMismatch(differs.where, differs.now, differs.then, _HINT)
        entries = self.first.reads.entries
        for entry, tensor, expected in zip(entries, state, self.first.state, strict=False):
            if (got := state_key(tensor)) != expected:
                return InputMismatch(entry.name, describe_tensor(got), describe_tensor(expected), _HINT)
            if not is_planned_for(tensor):
                return InputMismatch(entry.name, describe_kind(type(tensor)), "a plain tensor", _HINT)
        traced = self.first.planned.prepared.traced
        if hooked := [i for i in traced.within if state[i]._backward_hooks]:
            return InputMismatch(traced.primal_names[hooked[0]], "a tensor with hooks", "one without", _HINT)
        given = [*state, *inputs]
        if len(given) == traced.num_primals and (met := set(overlaps(given, traced.mutated)) ^ set(traced.overlaps)):
            one, other = (argument_path(traced.primal_names[i]) for i in min(met))
            now = "shares memory with" if min(met) not in traced.overlaps else "shares no memory with"
            return InputMismatch(other, f"what {now} {one}, which forward overwrites", "it otherwise", _HINT)
        for plan in self.cache:
            if plan.key == key and (changed := self._changed_region(plan)) is not None:
                return changed
        if traced.guard is None:
            return InputMismatch("(the call)", "one that no plan is for", "the sample's", _HINT)
        answers = brief(f"the sample's {list(traced.guard.answers)}")
        lengths = "other lengths, or " if traced.counts else ""
        return InputMismatch("(values)", f"{lengths}other answers to the model's `if`s", answers, _HINT)

    def plain(self, bound: Mapping[str, Any]) -> Any:
        """The plain step's forward."""
        with turn(self.model), self.set_aside():
            return run_model(self.model, self.loss_fn, self.signature, bound)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let `model(...)` be the model's own forward in the block, where the plan was applied to it."""
        before, self.unplanned = self.unplanned, True
        try:
            with self._own_forward():
                yield
        finally:
            self.unplanned = before

    def match(self, reads: Reads) -> Matched:
        """Find in the model, as it is now, what a forward read."""
        with self.set_aside():
            return match(reads, self.model, self.loss_fn)

    @contextmanager
    def through(self, applied: Any) -> Iterator[None]:
        """Calls in the block come through `applied`: what was put around it since runs anyway and is not planned."""
        before, self.applied = self.applied, applied
        try:
            yield
        finally:
            self.applied = before

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        """Undo `plan.apply` in the block."""
        own = self.model.__dict__
        current = own.get("forward")
        applied = self.applied or (current if getattr(current, "runs_plan", False) else None)
        if applied is None:
            yield
            return
        try:
            set_forward(self.model, applied.previous)
            yield
        finally:  # no call, in which a Ctrl-C could come
            if current is None:  # it was there only while a wrapper's forward ran
                own.pop("forward", None)
            else:
                own["forward"] = current


@torch.compiler.disable(reason=OPAQUE)
def _before_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of a model and of `plan.module`, which runs the model's hooks as well."""
    state: PlanState | None = module.__dict__.get("_plan_state")
    applied: Any = module.__dict__.get("forward")
    if getattr(applied, "runs_plan", False):
        state = applied.state
    if state is None or state.unplanned:
        return
    state.look_at_gathers()
    if state.outdated or global_hooks() or function_modes() or not module.training or not torch.is_grad_enabled():
        return
    bound = state.bind(args, kwargs)
    state.looking = True
    try:
        with turn(state.model):
            state._look(bound, *flatten(dict(bound)))
    finally:
        state.looking = False


def _check_materialized(tensors: Iterable[torch.Tensor], names: Callable[[], list[str]]) -> None:
    for position, tensor in enumerate(tensors):
        if tensor.device.type == "meta":
            raise PlannerError(
                f"{names()[position]!r} is on the meta device, so there is no data to compute with: a plan can be made "
                "from such a model, but to run it materialise it first, with model.to_empty(device=...) and "
                "load_state_dict."
            )


def _check_cast_leaves(primals: Sequence[torch.Tensor], planned: Decided) -> None:
    """Autocast would cast a leaf once for all its uses, and add up their gradients in that dtype: none is traced so."""
    for i in planned.cast_often:
        if primals[i].is_leaf:
            traced = planned.prepared.traced
            name = argument_names(traced.input_template)[i - len(traced.state)]
            raise Unsupported(
                f"the argument {name!r}, a leaf with several uses that autocast casts", "the call",
                "eager casts it once and adds up the gradients of its uses in the lower precision, a plan casts it for "
                "each use", f"Pass `{name}.view_as({name})`, or plan without autocast.",
            )  # fmt: skip


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
