"""What a backward that is another than planned for does: the plain model replays the forward."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from passes.device import kind_of
from passes.exclusive import turn
from passes.lower import kept_primals, stateful_primals
from passes.run._torch import DEFAULTS, active_autocast, backward_number, torch_defaults
from passes.run.listeners import REMEDY, Taken
from passes.run.step import ChangedInPlace
from passes.trace.gradient_layouts import gradient_key
from passes.trace.late import Late
from passes.trace.layouts import BACKWARD_AUTOCAST
from passes.trace.matching import Differs, match_arguments
from passes.trace.structure import held_objects
from solvers.errors import PlannerError

from .entry import Entry, describe_starts, starts_of
from .on_host import saved_on_host, workspaces_given_back
from .plain_forward import PlainForward
from .plan_key import describe_autocast
from .plans import Plans
from .spot_check import Expected, compared

_OTHER_DRAWS = (
    ": the plain forward would be replayed, and does not draw the random numbers that compiled code has drawn. Call "
    "the model again, which is then planned for such a backward; or use the plan uncompiled."
)
_CAPTURED = (
    ": the plain forward would be replayed, and a CUDA graph that is captured keeps no generator's state. Run some "
    "steps before the capture, which are then planned for such a backward."
)
_IRREPLAYABLE = (
    ": the plain forward would be replayed, but {}. Call the model again, which is then planned for such a backward."
)
_PATIENCE_SECONDS = 60.0
_OTHER_STRIDES = " with a gradient in other strides"
_HOOKED = " with a hook or retain_grad() on {}, an output that this is computed from"
_ONE_KIND = "so will others, as a plan is for one kind of start."
_HOW = {
    False: "correct, but not under the budget",
    True: "correct, but slow, as what it saves waits in the host's memory, and the budget may not hold",
}


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
        self.entry = entry
        self.state, self.traced, self.layouts = state, prepared.traced, prepared.layouts
        self.key, self.compiled, self.as_called = entry.key, entry.planned.compiled, as_called
        self.late, self.read_late = entry.matched.late if entry.matched is not None else Late(), list[tuple[Any, int]]()
        self.device = prepared.device
        self.numbers = entry.numbers()
        self.started = state.losses.called(entry.starts)
        self.plain = PlainForward(state, self.traced, self.key.autocast, bound)
        self.thread = threading.get_ident()
        self.raised: Exception | None = None
        self.expected: Expected | None = None

    def __call__(
        self,
        primals: Sequence[torch.Tensor],
        generators: dict[str, torch.Generator | None],
        gradients: dict[int, torch.Tensor],
        taken: dict[int, Taken],
    ) -> list[Any]:
        self.expected = None
        # On a GPU this is autograd's thread, which those that have the turn may wait for.
        own = self.device.type == "cpu"
        with turn(self.state.root) if own else turn(self.state.root, self.thread, _PATIENCE_SECONDS):
            return self._gradients(primals, generators, gradients, taken)

    def _gradients(
        self,
        primals: Sequence[torch.Tensor],
        generators: dict[str, torch.Generator | None],
        gradients: dict[int, torch.Tensor],
        taken: dict[int, Taken],
    ) -> list[Any]:
        wanted = {leaf.index: leaf for leaf in self.traced.outputs if leaf.index in gradients}
        paths = tuple(leaf.path for leaf in wanted.values())
        expected = paths == starts_of(self.traced)
        autocast = active_autocast() != self.traced.backward_autocast
        hooked = describe_starts(leaf.path for leaf in self.traced.outputs if leaf.index in taken)
        as_planned = hooked and expected and not autocast
        learned = set() if as_planned else self._learn({wanted[i].path: g for i, g in gradients.items()}, autocast)
        new = bool(learned) or not expected
        how = f" under {describe_autocast(active_autocast())}" if autocast else _OTHER_STRIDES if expected else ""
        how = _HOOKED.format(hooked) if hooked else how
        if not as_planned:
            self.state.replayed(active_autocast())
        started = f"backward started from {describe_starts(paths)}{how}, which the plan did not expect"
        try:
            known = {device: generator for device, generator in generators.items() if generator is not None}
            if self.compiled and generators:
                raise PlannerError(f"{started}{_OTHER_DRAWS}")
            if len(known) < len(generators):
                raise PlannerError(f"{started}{_CAPTURED}")
            if why := self._irreplayable(primals):
                raise ChangedInPlace(f"{started}{_IRREPLAYABLE.format(why)}")
            next_ones = "later calls are planned for it." if new else _ONE_KIND
            next_ones = f"so will others. {REMEDY.format('what follows from it')}" if hooked else next_ones
            warnings.warn(
                f"{started}: this step replays the plain forward ({_HOW[kind_of(self.device).caches]}); {next_ones}",
                stacklevel=2,
            )
            with self.as_called(), workspaces_given_back(self.device):
                try:
                    return self._replay(primals, known, gradients, taken, saved_on_host(self.device, primals))
                except RuntimeError as error:
                    if "saved tensor hooks" not in str(error):  # which torch.func refuses
                        raise
                    return self._replay(primals, known, gradients, taken, nullcontext())
        finally:
            self._outdate(paths, learned, autocast)

    def _outdate(self, paths: tuple[str, ...], learned: set[Any], autocast: bool) -> None:
        """Let later calls be planned for a backward from these outputs, and for what was learned of it."""
        if learned:
            for entry in self.state.cache:
                concerned = (autocast or entry.starts == paths) and entry.lacks(learned, self.layouts)
                entry.outdated = entry.outdated or concerned
        self.started.paths, self.started.seen = paths, True
        self.state.losses.expected = self.started

    def changed(self) -> str:
        """See `passes.run.step.Fallback`."""
        return self.late.changed_since(self.read_late) or self.entry.changed_since(self.numbers, in_backward=True)

    @property
    def path(self) -> str:
        """See `passes.run.step.Fallback`."""
        paths = (path for path, module in self.state.root.named_modules() if module is self.state.model)
        return next(paths, "")

    def compare(self, results: Sequence[torch.Tensor]) -> None:
        """See `passes.run.step.Fallback`."""
        if self.expected is not None:
            self.expected.compare(results)

    def compared(
        self, gradients: Mapping[int, torch.Tensor], planned: Callable[[], list[Any]] | None
    ) -> list[Any] | None:
        """See `passes.run.step.Fallback`."""
        expected, self.expected = self.expected, None
        return None if expected is None or planned is None else compared(self, expected, gradients, planned)

    def not_needed(self) -> None:
        """See `passes.run.step.Fallback`."""
        self.started.seen, self.state.losses.astray = True, 0

    def ran(self) -> None:
        """Note that the forward is over, and what it left."""
        self.read_late = self.late.state_now()

    def learn(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """See `passes.run.step.Fallback`."""
        autocast = active_autocast() != self.traced.backward_autocast
        named = {leaf.path: gradients[leaf.index] for leaf in self.traced.outputs if leaf.index in gradients}
        self._outdate(tuple(named), self._learn(named, autocast), autocast)

    def failed(self, error: Exception) -> None:
        """See `passes.run.step.Fallback`."""
        self.raised = error

    def strayed(self) -> None:
        """Note that the forward's questions are answered otherwise than in the sample."""
        self.state.strayed(self.entry)

    def _irreplayable(self, primals: Sequence[torch.Tensor]) -> str | None:
        """Why the forward cannot be replayed; None where it can."""
        lost = set(stateful_primals(self.traced)) - set(kept_primals(self.traced))
        if lost:
            return f"it overwrote {self.traced.primal_names[min(lost)]}, whose old value was not kept"
        since = "what it reads was changed between forward and backward"
        if changed := self.entry.changed_since(self.numbers):
            return f"{since}: {changed}"
        for name, then, now in zip(DEFAULTS, self.key.defaults, torch_defaults(), strict=True):
            if now != then and not name.startswith("autocast"):  # a replay has the forward's own
                return f"{since}: torch's {name} is {now}, in the forward {then}"
        try:
            with self.as_called():
                matched = self.state.match(self.traced.reads)
                with self.plain.given(primals[len(self.traced.state) :]) as bound:
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

    def _replay(
        self, primals: Sequence[torch.Tensor], generators: dict[str, torch.Generator],
        gradients: dict[int, torch.Tensor], taken: dict[int, Taken], saving: AbstractContextManager[Any],
    ) -> list[Any]:  # fmt: skip
        numbered = self.plain.run(primals, leaves := self.plain.leaves(primals), generators, saving)
        for i, listener in taken.items():
            listener.move_to(numbered[i])
        started: list[Any] = [numbered[i] if taken else get_gradient_edge(numbered[i]) for i in gradients]
        if not taken:  # nobody holds what the backward does not read, as in eager
            numbered = {}
        inputs = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad(started, inputs, list(gradients.values()), allow_unused=True))
        for i, listener in taken.items():
            listener.hand_over(numbered[i])
        return [next(found) if t.requires_grad else None for t in leaves]
