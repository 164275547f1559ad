"""Parts: all that are captured of a step, and what hollow runs have taught of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from passes.alias import alias
from passes.errors import CaptureError, Unsupported
from passes.printable import few
from passes.profile import Measured, profile
from passes.run.tensors import is_laid_out
from passes.trace.arguments import state_tensors
from passes.trace.capture import EVERY_OUTPUT, Traced
from passes.trace.gradient_layouts import gradient_key
from passes.trace.layouts import Layouts, learned
from passes.trace.matching import Differs
from passes.trace.refuse import CACHED, refuse_sharded
from passes.trace.settings import set_slots
from planner.dropin.plan_key import Key, call_key, module_key, state_key
from planner.progress import Progress
from planner.sizes import Sizes

from .losses import CrossEntropy
from .part import Asked, Part

NO_GRADIENT = "nothing that it reads requires a gradient"


class Parts:
    """All parts of a step, and what hollow runs have taught so far.

    Attributes:
        layouts: how kernels lay out what they make, as far as running has shown it.
        keeps_logits: whether the caller holds what a model returns besides its loss.
        sizes: traces of the regions' calls at other sizes.
        refused: why a region stays eager, by its path.
        eager_calls: calls of regions that no gradient reaches, by path and number.
        heard: collectives that the step runs, between regions or in them.
        ordinary: sizes of what the step allocates between regions.
    """

    def __init__(self, layouts: Layouts, progress: Progress, keeps_logits: bool, sizes: Sizes) -> None:
        self.layouts, self.progress, self.keeps_logits, self.sizes = layouts, progress, keeps_logits, sizes
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
        layouts, sizes = {**self.layouts, **dict(asked.strides)}, self.sizes.of_region(path, number)

        def serves(part: Part) -> bool:
            return (sizes.may_ask or not part.traced.asked) and part.holds(module, key, asked, tensors, bound)

        for part in filter(serves, self.known):
            return part, False
        for part in self.sizes.parts:
            if part.layouts == layouts and serves(part):
                self.known.append(part)
                return part, True
        if not any(t.requires_grad for t in (*module.parameters(), *tensors)):
            self.refuse(path, NO_GRADIENT)
            return None, True
        alike = module_key(module), key
        try:
            if alike in self.errors:
                raise self.errors[alike]
            with self.progress.stage("capture"):
                part = self._capture(sizes, module, bound, key, asked, layouts)
            part.look(module, bound)
        except Differs as differs:  # it would be captured again in every run
            self.refuse(path, f"its forward reads another thing each time: {differs.now}, and then {differs.then}")
            return None, True
        except (CaptureError, Unsupported) as error:
            self.errors[alike] = _alone(error)
            self.refuse(path, str(error))
            return None, True
        self.known.append(part)
        self.sizes.parts.add(part)
        return part, True

    def _capture(
        self, sizes: Sizes, module: nn.Module, bound: Mapping[str, Any], key: Key, asked: Asked, layouts: Layouts
    ) -> Part:
        refuse_sharded(module, running=True)
        CACHED.check(module)
        traced = sizes.capture(
            module, bound, None, differentiated=EVERY_OUTPUT if asked.starts is None else asked.starts,
            keep_inputs=self.keeps_logits or type(module) is not CrossEntropy,
            layouts=layouts,
        )  # fmt: skip
        _refuse_left(traced)
        traced = replace(traced, changed_later=asked.changed)
        state = list(map(state_key, state_tensors(module, traced.state)))
        return Part(type(module), key, state, asked, layouts, traced, alias(traced.graph_module.graph))

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
    # A loss that adds such a tensor outside of the model is not in the sample's step, which regions are planned for.
    trained = [str(s) for s in traced.settings if any(traced.outputs[i].requires_grad for _, i in set_slots([s]))]
    if left := (*traced.left, *trained):
        raise Unsupported(
            "something that forward sets and others may read", left[0], "a planned region returns its outputs "
            "and sets nothing else, and the code after it would find what was there before",
            "Return it, or register it as a buffer.",
        )  # fmt: skip


def _alone(error: CaptureError | Unsupported) -> CaptureError | Unsupported:
    """The error without the frames that it came through: they hold tensors of the step, in cycles that autograd closes,
    which the collector does not see.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
