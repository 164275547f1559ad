"""The traces of a model's calls, and of its regions': one that differs from calls before in its sizes alone is made
without tracing, or refused as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from passes._torch import local_part
from passes.errors import CaptureError, StateChanged, Unsupported
from passes.printable import brief
from passes.trace.answers import Unanswered
from passes.trace.asking import sample_answers
from passes.trace.capture import Traced, capture
from passes.trace.carried import Carries
from passes.trace.first_call import FirstCall, Remembers, remembered
from passes.trace.gradient_layouts import gradient_orders
from passes.trace.isolate import in_training
from passes.trace.layouts import BACKWARD_AUTOCAST, Layouts
from passes.trace.nodes import PLAIN
from passes.trace.notation import Pinned
from passes.trace.refuse import storage_kind
from passes.trace.sizes import Pattern, pattern
from passes.trace.structure import flatten

from .dropin.plan_key import Key, call_key, module_key

BUILDS = 3  # patterns that are tried for one kind of call
MISSES = 4  # calls in a row for which a pattern does not hold, after which it is dropped
IN_EVAL = (
    "the model was in eval mode: this plans a training step, which runs once model.train() was called; until then the "
    "model's own forward runs"
)
_Seen = tuple[list[torch.Tensor], Traced]


class Sizes:
    """Captures the calls of a model.

    Two kinds of call differ in more than sizes. The first two sizes of a kind are traced; the third is traced with
    symbols (`passes.trace.sizes`), and what comes of that serves it and all sizes after it for which it holds. What
    never could be traced is tried again ever less often, as long as the model looks the same.

    Args:
        is_first: whether the model is planned for the first time: it is then traced with what its forward remembers at
            its first call in place. Later on, in the place of what it remembers, this would put an end to the plans.
        of_region: whether it is of a region's calls. What is in eval mode is planned in it there (a model is planned
            for training), and nothing can be remembered.

    Attributes:
        may_ask: whether the forward may be run for what it asks about values that it computes (`passes.trace.answers`).
        may_count: whether a trace may hold for inputs with the sample's numbers alone (`passes.trace.value_guards`).
        first_call: what forward remembers of the latest call that was traced, if that is yet to come.
    """

    def __init__(self, is_first: bool = True, of_region: bool = False, may_count: bool = True) -> None:
        self.kinds: dict[Any, _Kind] = {}
        self.regions: dict[tuple[str, int], Sizes] = {}
        self.refused: dict[Any, _Refused | None] = {}  # None: it was traced
        self.parts = WeakSet[Any]()  # of the plans by regions that are still there
        self.is_first, self.is_region = is_first, of_region
        self.first_call: Remembers | None = None
        self.first_of: Key | None = None
        self.may_ask, self.may_count = True, may_count

    def of_region(self, path: str, number: int) -> Sizes:
        """Those of one of a region's calls in a step."""
        return self.regions.setdefault((path, number), Sizes(is_first=False, of_region=True, may_count=False))

    def count(self, may_count: bool) -> None:
        """From now on trace so; what was refused is tried again where that is new."""
        if may_count != self.may_count:
            self.may_count = may_count
            self.refused.clear()

    def ask_no_more(self, path: str) -> None:
        """Refuse what asks about values in a region: its calls answer now one way, now another."""
        for (known, _), sizes in self.regions.items():
            sizes.may_ask = sizes.may_ask and known != path

    def capture(
        self, model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None, *,
        differentiated: tuple[str, ...] | None, keep_outputs: bool = True, keep_inputs: bool = True, layouts: Layouts,
    ) -> Traced:  # fmt: skip
        """`passes.trace.capture.capture`."""
        if model.training or self.is_region:
            return self._capture(model, bound, loss_fn, differentiated, keep_outputs, keep_inputs, layouts)
        with in_training(model):
            traced = self._capture(model, bound, loss_fn, differentiated, keep_outputs, keep_inputs, layouts)
        return replace(traced, notes=(IN_EVAL, *traced.notes))

    def _capture(
        self, model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None,
        differentiated: tuple[str, ...] | None, keep_outputs: bool, keep_inputs: bool, layouts: Layouts,
    ) -> Traced:  # fmt: skip
        tensors, template = flatten(dict(bound))
        kind, call, key, orders = _Kind(), None, None, gradient_orders(layouts)
        if not any(map(storage_kind, tensors)):  # else capture refuses such a call by name
            key = call_key(tensors, template)
            looks = tuple((t.dim(), t.dtype, t.device, t.requires_grad) for t in tensors)
            outside = key.inputs[0], key.autocast, key.defaults, layouts.get(BACKWARD_AUTOCAST)
            call = looks, outside
            kind = self.kinds.setdefault((call, differentiated, keep_outputs, keep_inputs, orders), kind)
            self._check(call, model)
        if key is None or key != self.first_of:
            self.first_call, self.first_of = None, key
        # What kernels were seen to lay out in ways of their own is known for single sizes.
        if kind.seen and orders is not None:
            with remembered(self.first_call):
                made = kind.made(model, bound, loss_fn, tensors, differentiated, (keep_outputs, keep_inputs), layouts)
            if made is not None:
                return made
        options: dict[str, Any] = {
            "differentiated": differentiated, "keep_outputs": keep_outputs, "keep_inputs": keep_inputs,
            "layouts": layouts,
        }  # fmt: skip
        try:
            traced = self._captured(model, bound, loss_fn, options)
        except (CaptureError, Unsupported) as error:
            if type(error) in (CaptureError, Unsupported):  # others may come once
                self._refuse(call, model, error)
            raise
        kind.add(tensors, traced)
        if self.first_call is not None:
            traced = replace(traced, first_call=self.first_call)
        if self.first_call is not None and self.first_call.left:
            places = brief(", ".join(change.path for change in self.first_call.left))
            note = f"the first planned call leaves, as a plain one does, {places}"
            traced = replace(traced, notes=(*traced.notes, note))
        self.refused[call] = None
        return traced

    def _captured(
        self, model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None, options: dict[str, Any]
    ) -> Traced:  # fmt: skip
        """The trace, with what a first call remembers in place, and with the sample's answers where they are needed."""
        is_first = first = self.is_first
        self.is_first = False
        may_remember, may_ask, asked = True, self.may_ask, None
        options["may_count"] = self.may_count and not (dist.is_available() and dist.is_initialized())
        while True:
            try:
                with remembered(self.first_call):
                    return capture(
                        model, bound, loss_fn, is_first=is_first, may_remember=may_remember, asked=asked,
                        may_ask=may_ask, **options,
                    )  # fmt: skip
            except FirstCall as call:
                found = call.remembers
                if self.is_region and not found.evolves:
                    raise _remembers(found) from None
                left = () if self.is_region else found.of(model, bound, loss_fn)
                if not (left or first or found.evolves):
                    raise _left_in_eager(found) from None
                self.first_call = None if self.is_region else replace(found, left=left)
                is_first, may_remember, may_ask, asked = False, False, self.may_ask, None
            except Carries:
                self.is_first, self.first_call = first, None
                raise
            except Unanswered:
                may_ask = False
                with remembered(self.first_call):
                    asked = sample_answers(model, bound, loss_fn)

    def _check(self, call: Any, model: nn.Module) -> None:
        """Raise what tracing such a call of the model raised, where it never could be traced."""
        refused = self.refused.get(call)
        if refused is not None and refused.passes and refused.looks == _looks_of(model):
            refused.passes -= 1
            raise _twin(refused.error)

    def _refuse(self, call: Any, model: nn.Module, error: Exception) -> None:
        """Try it at the next call, and then after 1, 3, 7, ... calls that it is refused at unseen."""
        looks, known = _looks_of(model), self.refused.get(call)
        if call not in self.refused or (known is not None and known.looks != looks):
            self.refused[call] = _Refused(looks, _twin(error))
        elif known is not None:
            known.times += 1
            known.passes = 2**known.times - 1


@dataclass
class _Refused:
    """What could not be traced.

    Attributes:
        looks: what the model looked like.
        times: how often it was tried again; `passes`: how many calls it is not tried in before the next time.
    """

    looks: Any
    error: Exception
    times: int = 0
    passes: int = 0


class _Kind:
    """Calls that differ in their sizes alone."""

    def __init__(self) -> None:
        self.seen: list[_Seen] = []  # the two traced last, at two sizes
        self.pattern: Pattern | None = None
        self.builds = self.misses = 0

    def add(self, tensors: list[torch.Tensor], traced: Traced) -> None:
        """Remember a trace; of the inputs the shapes alone."""
        shapes = [torch.empty(shape, device="meta") for shape in _shapes(tensors)]
        others = [pair for pair in self.seen if _shapes(pair[0]) != _shapes(shapes)]
        self.seen = [*others[-1:], (shapes, traced)]
        if traced.asked or traced.counts:  # a trace with symbols has no answers
            self.builds = BUILDS

    def made(self, model: nn.Module, bound: Any, loss_fn: Any, tensors: Any, differentiated: Any,
             keep: tuple[bool, bool], layouts: Layouts) -> Traced | None:  # fmt: skip
        """The trace of a call from a pattern; None where there is none that holds for it."""
        found = self._resized(model, loss_fn, bound, differentiated, layouts)
        calls = [_shapes(tensors), *(_shapes(shapes) for shapes, _ in self.seen)]
        if found is not None or len(self.seen) < 2 or self.builds == BUILDS or not _may_be_symbols(calls):
            return found
        self.builds += 1
        try:
            self.pattern = pattern(model, loss_fn, bound, differentiated, layouts, *keep, self.seen)
        except Pinned:
            self.builds = BUILDS
            return None
        except Exception:  # noqa: BLE001 - whatever it is: the call is traced as usual, which says what there is to say
            return None
        return self._resized(model, loss_fn, bound, differentiated, layouts)

    def _resized(self, model: nn.Module, loss_fn: Any, bound: Any, differentiated: Any, layouts: Layouts) -> Any:
        if self.pattern is None:
            return None
        try:
            made = self.pattern.resized(model, loss_fn, bound, differentiated, layouts)
        except Exception:  # noqa: BLE001 - as above
            self.misses += 1
            if self.misses == MISSES:
                self.pattern, self.misses = None, 0
            return None
        self.misses = 0
        return made


def _remembers(found: Remembers) -> Unsupported:
    return Unsupported(
        "something that forward remembers at its first call", found.paths[0], "a planned region returns its outputs "
        "and sets nothing else, and a call of another shape would find it as the first one has left it",
        "Call the model once before planning.",
    )  # fmt: skip


def _left_in_eager(found: Remembers) -> StateChanged:
    return StateChanged(
        "something that a call in training adds to what forward remembers", found.paths[0], "the forward cannot be run "
        "now for what it leaves there (another thread runs, or other ranks would have to run it, too)",
        "Calls like this one are planned once it is there.",
    )  # fmt: skip


def _looks_of(model: nn.Module) -> Any:
    """What its refusal may depend on: as for `module_key`, and plain values on modules and on their objects."""
    values = []
    for module in model.modules():
        for value in vars(module).values():
            own = getattr(value, "__dict__", {}) if not isinstance(value, nn.Module) else {}
            values += [v for v in (value, *own.values()) if isinstance(v, PLAIN)]
    return module_key(model), values


def _twin(error: Exception) -> Exception:
    """The error without the frames that it came through, which hold tensors, and without what is added to it later."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(vars(error))
    return made


def _shapes(tensors: list[torch.Tensor]) -> list[torch.Size]:
    return [local_part(t).shape for t in tensors]


def _may_be_symbols(calls: list[list[torch.Size]]) -> bool:
    """Whether no two calls have the same sizes, and those that differ are not 0 or 1, which torch takes apart."""
    sizes = zip(*([n for shape in call for n in shape] for call in calls), strict=True)
    differ = [each for each in sizes if len(set(each)) > 1]
    return len(set(zip(*differ, strict=True))) == len(calls) and all(min(each) > 1 for each in differ)
