"""Parts: what regions look like once captured; runs of equal regions share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from passes._torch import is_dense
from passes.alias import Aliases, Storage, alias
from passes.errors import CaptureError, Unsupported
from passes.leaves import casts, read_views, sums
from passes.printable import few
from passes.profile import Measured, OpProfile, profile
from passes.run.tensors import is_laid_out
from passes.trace.arguments import state_tensors
from passes.trace.capture import EVERY_OUTPUT, Traced, capture
from passes.trace.layouts import Layouts, gradient_key, learned
from passes.trace.matching import Differs, match, match_arguments
from passes.trace.reads import Matched
from passes.trace.refuse import CACHED, refuse_sharded
from passes.trace.structure import held_objects
from planner.dropin.plan_key import Key, call_key, module_key, state_key
from planner.progress import Progress

from .losses import CrossEntropy

NO_GRADIENT = "nothing that it reads requires a gradient"


@dataclass(eq=False)
class Part:
    """A captured region.

    Attributes:
        key, state: what a call of it, and its parameters and buffers, look like.
        asked: the outputs that its backward starts from, as it was captured for, and the strides of their gradients.
    """

    kind: type
    key: Key
    state: list[Any]
    asked: Asked
    traced: Traced
    aliases: Aliases
    profiles: dict[fx.Node, OpProfile] | None = None

    @cached_property
    def results(self) -> Any:
        return self.traced.graph_module.graph.output_node().args[0]

    @cached_property
    def output_nodes(self) -> list[fx.Node | None]:
        """For each output its node; None for an output that is an input, a parameter or a buffer itself."""
        first = len(self.traced.mutated)
        return [None if leaf.input is not None else self.results[first + leaf.index] for leaf in self.traced.outputs]

    @cached_property
    def output_values(self) -> list[Any]:
        """For each of them, as far as it was made here, a tensor without data."""
        return [None if n is None else n.meta["val"] for n in self.output_nodes]

    @cached_property
    def output_storages(self) -> list[Storage | None]:
        """For each of them its storage."""
        found: list[Any] = [None if n is None else self.aliases.of[n] for n in self.output_nodes]
        return found

    @cached_property
    def gradients(self) -> list[fx.Node | None]:
        """For each primal its gradient, if it has one."""
        found: list[fx.Node | None] = list(self.results[self.traced.num_forward_outputs :])
        return found

    @cached_property
    def sums(self) -> dict[int, str]:
        """Primals whose gradient may be a sum."""
        return sums(self.traced)

    @cached_property
    def views(self) -> tuple[int, ...]:
        """Outputs that are views in the plain step, which reads them itself."""
        return read_views(self.traced)

    @cached_property
    def casts(self) -> dict[int, str]:
        """Parameters that autocast casts in it."""
        return casts(self.traced) if self.key.autocast else {}

    @cached_property
    def position(self) -> dict[Any, int]:
        """Which placeholder a storage is."""
        return {self.aliases.of[p]: i for i, p in enumerate(self.traced.placeholders)}

    @cached_property
    def dense(self) -> list[bool]:
        """Which placeholders leave no gaps in their memory."""
        return [is_dense(p.meta["val"]) for p in self.traced.placeholders]

    @cached_property
    def returns_primals(self) -> bool:
        """Whether a gradient lies in the memory of a primal."""
        return any(position < self.traced.num_primals for position in self._handed_on)

    @cached_property
    def differentiated(self) -> list[int]:
        """The outputs, by number, whose gradients its backward starts from."""
        return [leaf.index for leaf in self.traced.outputs if leaf.input is None and leaf.differentiated]

    @cached_property
    def returns_tangents(self) -> bool:
        """Whether a gradient lies in the memory of one that the backward starts from."""
        return any(position >= self.traced.num_primals for position in self._handed_on)

    @cached_property
    def _handed_on(self) -> list[int]:
        storages = [self.aliases.of[n] for n in self.gradients if n is not None]
        return [self.position[s] for s in storages if s in self.position]

    def holds(
        self, module: nn.Module, key: Key, asked: Asked, inputs: Sequence[torch.Tensor], bound: Mapping[str, Any]
    ) -> bool:
        """Whether capturing `module` for such a call would give this part again."""
        if type(module) is not self.kind or key != self.key or asked != self.asked:
            return False
        try:
            matched = self.look(module, bound)
        except Differs:
            return False
        guard, state = self.traced.guard, matched.tensors()
        if state is None or list(map(state_key, state)) != self.state:
            return False
        return guard is None or guard.holds([*state, *inputs])

    def look(self, module: nn.Module, bound: Mapping[str, Any]) -> Matched:
        """Find in a module, and in what it is called with, what this part's forward read.

        Raises:
            Differs: something is not what was read.
        """
        matched = match(self.traced.reads, module, None)
        match_arguments(self.traced.reads, matched, module, held_objects(bound))
        return matched


@dataclass(frozen=True)
class Asked:
    """What a run is captured for.

    Attributes:
        starts, strides: what its backward starts from: the outputs' paths (None: all), and strides by `gradient_key`.
        changed: primals that code after it changes in place: nothing in the backward may read them.
    """

    starts: tuple[str, ...] | None = None
    strides: tuple[tuple[Any, tuple[int, ...]], ...] = ()
    changed: tuple[int, ...] = ()


class Parts:
    """All parts of a step, and what hollow runs have taught so far.

    Attributes:
        layouts: how kernels lay out what they make, as far as running has shown it.
        keeps_logits: whether the caller holds what a model returns besides its loss.
        refused: why a region stays eager, by its path.
        eager_calls: calls of regions that no gradient reaches, by path and number.
        heard: collectives that the step runs, between regions or in them.
        ordinary: sizes of what the step allocates between regions.
    """

    def __init__(self, layouts: Layouts, progress: Progress, keeps_logits: bool = True) -> None:
        self.layouts, self.progress, self.keeps_logits = layouts, progress, keeps_logits
        self.known: list[Part] = []
        self.asked: dict[tuple[str, int], Asked] = {}
        self.refused: dict[str, str] = {}
        self.eager_calls: set[tuple[str, int]] = set()
        self.heard: set[str] = set()
        self.errors: dict[Any, CaptureError | Unsupported] = {}  # of modules that look alike, called in one way
        self.measured: dict[Any, Measured] = {}
        self.ordinary: set[int] = set()

    def find(
        self, path: str, number: int, module: nn.Module, bound: Mapping[str, Any], tensors: list[torch.Tensor],
        template: Any,
    ) -> tuple[Part | None, bool]:  # fmt: skip
        """The part for a call, and whether anything is new: it was captured now, or refused."""
        key, asked = call_key(tensors, template), self.asked.get((path, number), Asked())
        for part in self.known:
            if part.holds(module, key, asked, tensors, bound):
                return part, False
        if not any(t.requires_grad for t in (*module.parameters(), *tensors)):
            self.refuse(path, NO_GRADIENT)
            return None, True
        alike = module_key(module), key
        try:
            if alike in self.errors:
                raise self.errors[alike]
            part = self._capture(module, bound, key, asked)
            part.look(module, bound)
        except Differs as differs:  # it would be captured again in every run
            self.refuse(path, f"its forward reads another thing each time: {differs.now}, and then {differs.then}")
            return None, True
        except (CaptureError, Unsupported) as error:
            self.errors[alike] = _alone(error)
            self.refuse(path, str(error))
            return None, True
        self.known.append(part)
        return part, True

    def _capture(self, module: nn.Module, bound: Mapping[str, Any], key: Key, asked: Asked) -> Part:
        refuse_sharded(module, running=True)
        CACHED.check(module)
        layouts = {**self.layouts, **dict(asked.strides)}
        with self.progress.stage("capture"):
            starts = EVERY_OUTPUT if asked.starts is None else asked.starts
            keeps = self.keeps_logits or type(module) is not CrossEntropy
            traced = capture(module, bound, None, differentiated=starts, keep_inputs=keeps, layouts=layouts)
            traced = replace(traced, changed_later=asked.changed)
            aliases = alias(traced.graph_module.graph)
        _refuse_left(traced)
        state = list(map(state_key, state_tensors(module, traced.state)))
        return Part(type(module), key, state, asked, traced, aliases)

    def refuse(self, path: str, why: str) -> bool:
        """Leave a region to eager; whether that is new."""
        new = path not in self.refused
        self.refused.setdefault(path, why)
        return new

    def leave(self, path: str, number: int, any_call: bool) -> bool:
        """Leave a call, or any, that no gradient reaches to eager; whether that is new."""
        if any_call:
            return self.refuse(path, "no gradient reaches it")
        self.eager_calls.add((path, number))
        return True

    def learn(self, path: str, number: int, part: Part, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Note from which outputs, and in which strides, a backward starts; whether another part is needed."""
        returned = {leaf.index: leaf for leaf in part.traced.outputs if leaf.input is None}
        given = {i: g for i, g in enumerate(gradients) if g is not None}
        strides = [tuple(t.meta["val"].stride()) for t in part.traced.placeholders[part.traced.num_primals :]]
        if part.differentiated == list(given) and all(map(is_laid_out, given.values(), strides)):
            return False
        paths = {i: returned[i].path for i in given}
        known = tuple((gradient_key(paths[i], g), tuple(g.stride())) for i, g in given.items())
        return self._ask(path, number, starts=tuple(paths.values()), strides=known)

    def learn_of_changes(self, path: str, number: int, changed: tuple[int, ...]) -> bool:
        """Note which primals of a run were changed in place before its backward; whether another part is needed."""
        return bool(changed) and self._ask(path, number, changed=changed)

    def _ask(self, path: str, number: int, **what: Any) -> bool:
        known = self.asked.get((path, number), Asked())
        asked = self.asked[path, number] = replace(known, **what)
        return asked != known

    def profile(self, measure: bool, timed: bool) -> bool:
        """Profile what was not yet; whether that showed layouts in which regions have to be captured anew."""
        for part in self.known:
            if part.profiles is None:
                part.profiles = profile(
                    part.traced.graph_module.graph, measure=measure, timed=timed, progress=self.progress.each,
                    known=self.measured,
                )  # fmt: skip
        made: Layouts = {}
        for part in self.known:
            layouts = {n: p.result_layouts for n, p in (part.profiles or {}).items()}
            made.update(learned(part.traced.graph_module.graph, layouts))
        if all(self.layouts.get(key) == strides for key, strides in made.items()):
            return False
        self.layouts.update(made)
        self.known.clear()
        return True


def _refuse_left(traced: Traced) -> None:
    for where, names in traced.repeated:
        raise Unsupported(
            f"torch.utils.checkpoint around an update of {few(names)}", where, "the plain step makes it again in the "
            "backward, a planned region would not", "Leave the checkpoint out: the plan decides what is recomputed.",
        )  # fmt: skip
    if traced.left:
        raise Unsupported(
            "something that forward sets and others may read", traced.left[0], "a planned region returns its outputs "
            "and sets nothing else, and the code after it would find what was there before",
            "Return it, or register it as a buffer.",
        )  # fmt: skip


def _alone(error: CaptureError | Unsupported) -> CaptureError | Unsupported:
    """The error without the frames that it came through: they hold tensors of the step, in cycles that autograd closes,
    which the collector does not see.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
