"""What is said, once each, about calls of a planned model that its plan is not for or that hold more than it counts."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from passes._torch import local_part, pytree
from passes.printable import brief
from passes.run._torch import active_saving_hooks
from passes.trace.places import user_level
from planner.decided import Decided
from planner.options import BUCKET
from planner.ranks.sharded import gathered_gradients, kept_whole_bytes
from solvers.errors import MIB

REGION = "region "  # how the name of one begins where a mismatch is told
SLOW_REPLANS = 5  # after so many, and each time they have doubled, it is said what they cost
REMEDIES = {
    "fresh": 'plan with gradients="accumulated"', "accumulated": "raise reserve_mb",
    "consumed": 'free each in a hook (register_post_accumulate_grad_hook), plan with gradients="accumulated"',
}  # fmt: skip


class Notices:
    """Warnings about one model, and which of them were given.

    Attributes:
        still_eval: planned in eval mode, and not called in training mode since.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.said: set[str] = set()
        self.noticed_hooks = self.noticed_gradients = self.noticed_waiting = self.noticed_eval = False
        self.still_eval = False
        self.replan_seconds, self.next_slow = 0.0, SLOW_REPLANS

    def replanned(
        self, replans: Counter[str], numbers: Collection[str], of_state: Collection[str], seconds: float, kept: int,
        buckets: bool,
    ) -> None:  # fmt: skip
        """Say after several replans, and rarely after that, what is slowing training, and what helps.

        Args:
            replans: how often what a call differs in was planned for anew.
            numbers: those that were a number.
            of_state: those that are parameters and buffers.
            buckets: whether new shapes go into buckets already.
        """
        self.replan_seconds += seconds
        count = replans.total()
        if count < self.next_slow:
            return
        self.next_slow = 2 * count
        (most, _), *_ = replans.most_common(1)
        of_shapes = not most.startswith(("(", REGION)) and most not in numbers and most not in of_state
        instead = "eager" if buckets or not of_shapes else f'{BUCKET}" or "eager'
        advice = "pad or bucket the inputs to fewer shapes" if of_shapes else "let it stay, or change it rarely"
        if most in numbers:
            advice = "pass a number that changes as a tensor, or keep it in a buffer: one plan serves all its values"
        what = "; ".join(f"{name}: {times}" for name, times in replans.most_common(3))
        warnings.warn(
            f"{count} calls were planned anew so far, which took {self.replan_seconds:.1f} s of training, as they "
            f"differ from the sample in {what}. {kept} plans are kept: {advice}, "
            f'or pass on_new_shape="{instead}".',
            stacklevel=user_level(),
        )

    def gradients(self, planned: Decided, primals: Iterable[torch.Tensor]) -> None:
        """Say once that there is what the plan does not count: gradients from before the step, or whole parameters."""
        if self.noticed_gradients or planned.budget_bytes is None:
            return
        held = [local_part(p.grad) for p in primals if p.is_leaf and p.grad is not None]
        whole, kept = (gathered_gradients(self.model), kept_whole_bytes(self.model)) if planned.runs else ([], 0)
        if not held and not whole and not kept:
            return
        options = planned.prepared.options
        counted = options.reserve_bytes + planned.prepared.lowered.accumulated_bytes
        each = {id(g): g for g in (*held, *whole)}.values()
        extra = kept + sum(g.numel() * g.element_size() for g in each if g.layout == torch.strided) - counted
        if extra <= 0:
            return
        self.noticed_gradients = True
        what = "gradients and whole parameters (set_reshard_after_backward(False))" if kept else "gradients"
        reserved = f"reserve_mb={math.ceil((options.reserve_bytes + extra) / MIB)}"
        remedy = f"{REMEDIES[options.gradients]} or {reserved}, or call zero_grad() before the forward"
        warnings.warn(
            f"this step holds {extra / MIB:.3f} MiB of {what} that the plan did not count: "
            f"{f'plan with {reserved}' if kept else remedy}.",
            stacklevel=user_level(),
        )

    def waiting(self, planned: Decided, calls: Iterable[Any]) -> None:
        """Say once that a call whose backward has not begun holds what the plan of the next one does not count."""
        counted = planned.budget_bytes is None or planned.prepared.options.flight is not None
        if self.noticed_waiting or counted or all(call.started.seen for call in calls):
            return
        self.noticed_waiting = True
        warnings.warn(
            "an earlier call waits for its backward, and holds what it needs there: a budget is for one call and its "
            "backward. Call backward() after each, plan a module whose forward makes all of these calls, or leave "
            "room with reserve_mb.",
            stacklevel=user_level(),
        )

    def of_eval(self, output: Any) -> Any:
        """Say once, should a backward begin at what a call in eval mode returned, that the call ran plain."""
        if self.noticed_eval or not torch.is_grad_enabled():
            return output
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._trained_in_eval)
        return output

    def _trained_in_eval(self, gradient: torch.Tensor) -> None:
        if not self.noticed_eval:
            self.noticed_eval = True
            warnings.warn(
                f"a backward runs through a call of this {type(self.model).__name__} in eval mode: its own forward "
                "ran, and not under the budget. Call model.train() for training steps, and eval() on the "
                "submodules that are to stay in eval mode (dropout, batch norms).",
                stacklevel=user_level(),
            )

    def in_eval(self) -> None:
        """Say once that a model planned in eval mode runs plain as long as it is in it, gradients or not."""
        if not self.still_eval or not torch.is_grad_enabled():
            return
        self.still_eval, self.noticed_eval = False, True
        warnings.warn(
            f"this {type(self.model).__name__} was planned in eval mode (from_pretrained returns models in it) and "
            "still is: its own forward runs, and not under the budget. Call model.train() for training steps, or "
            "evaluate under torch.no_grad().",
            stacklevel=user_level(),
        )

    def saving_hooks(self, makes_way: bool = False) -> None:
        """Say once that hooks on saved tensors have no effect on a planned step, or that it makes way for them."""
        if self.noticed_hooks or not (owner := active_saving_hooks()):
            return
        self.noticed_hooks = True
        numbers = "the numbers" if owner.startswith("torch.") else "gradients"
        effect = (
            "which decides what is kept there: the plan makes way, and the step is not under the budget."
            if makes_way else
            "which saves no memory there: a planned step holds its saved tensors itself, and "
            f"{numbers} are those without these hooks."
        )  # fmt: skip
        warnings.warn(
            f"a planned module is called under {owner}, {effect} Plan the module that contains this one, or leave the "
            "wrapper out (torch.utils.checkpoint would also run the planned forward a second time).",
            stacklevel=user_level(),
        )

    def outdated(self, modules: Sequence[str]) -> None:
        """Say once that modules hold whole parameters from before a change."""
        self._once(
            "outdated", f"fully_shard kept the whole parameters of {brief(', '.join(modules))} (after "
            "set_reshard_after_backward(False) or unshard()), perhaps from before an optimizer changed their "
            "parts: eager uses the old ones in this forward and new ones in its backward. Such steps run plain, "
            "and not under the budget. Call reshard() on each of these modules before optimizer.step(), or "
            "set_reshard_after_backward(True) before the last backward that comes before it; in the place of "
            "unshard(), set_modules_to_forward_prefetch.",
        )  # fmt: skip

    def global_hooks(self) -> None:
        """Say once that hooks of every module keep the plan from being used."""
        self._once(
            "hooks", "hooks of every module (register_module_forward_hook and its like) are registered: the model's "
            "own forward runs as long as they are, and not under the budget. Register them on submodules instead.",
        )  # fmt: skip

    def dispatch_mode(self, mode: object) -> None:
        """Say once that a mode looks at ops that are not those of the plain step."""
        self._once(
            "dispatch mode", f"a TorchDispatchMode ({type(mode).__qualname__}) is active: it is told of ops of the "
            "planned step, which are not all those of the model's own forward. If it changes what they return, remove "
            "the plan.",
        )  # fmt: skip

    def function_mode(self, mode: object) -> None:
        """Say once that a mode that may change what functions do keeps the plan from being used."""
        self._once(
            "function mode", f"a TorchFunctionMode ({type(mode).__qualname__}) is active: the model's own forward runs "
            "as long as it is, and not under the budget.",
        )  # fmt: skip

    def _once(self, what: str, text: str) -> None:
        """Warn, unless something was said of this before."""
        if what not in self.said:
            self.said.add(what)
            warnings.warn(text, stacklevel=user_level())
