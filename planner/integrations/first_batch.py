"""Planning in somebody else's loop: on the first real batch, as the trainer calls the model with it."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from passes._torch import pytree, saving_hooks_aside
from passes.errors import ForwardFailed
from passes.run._torch import under_transform
from passes.trace.arguments import call_signature, set_forward
from passes.trace.binding import bind_call
from passes.trace.refuse import has_sharded
from planner.api import auto_checkpoint, check_names
from planner.budget import Budget
from planner.dropin.forward import StandIn, stand_in, stand_in_within
from planner.plan import Plan
from planner.ranks.wrapper import (
    check_wrapper,
    group_of,
    inner_module,
    running_wrapper,
    unsent_bytes,
    wrapper_bytes,
    wrapper_gradients,
    wrapper_notes,
)
from solvers.errors import MIB, PlannerError

log = logging.getLogger("planner")


def plan_on_first_batch(model: nn.Module, budget_mb: float | str | None = None, **options: Any) -> FirstBatch:
    """Let `model` be planned by its next training call, in whatever precision and with whatever arguments that has.

    Call it when the model is ready to be trained: wrapped, on its device, adapters attached. The call returns what
    `plan.applied` would; calls under `eval()` or `no_grad`, of a frozen model, or within `torch.func` run the
    model's own forward and plan nothing.

    Args:
        model: as for `plan.apply`: it keeps its class, methods, hooks and state. Of a DistributedDataParallel what it
            wraps is planned.
        budget_mb, options: those of `auto_checkpoint`.

    Raises:
        BudgetError: `budget_mb` is not a budget. What planning raises comes out of the training call, and the next one
            is planned, until `stop()`.
        PlannerError: the model waits for its first batch already.
    """
    check_names("plan_on_first_batch", options)
    return FirstBatch(model, budget_mb, **options).start()


class FirstBatch:
    """A model that runs a plan from its first training call on.

    Args:
        called: told of that call before anything is planned.
        batches: how many further ones the trainer holds while it trains on one; there is room left for them.

    Attributes:
        plan: the plan; None until that call.
        failed: whether planning ended in an error; another one may then take this one's place.
    """

    def __init__(
        self, model: nn.Module, budget_mb: float | str | None = None, *, called: Callable[[], Any] | None = None,
        batches: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        Budget(budget_mb)
        self.model = inner_module(model)  # whose forward is told the arguments by name
        self.budget_mb, self.called, self.options = budget_mb, called, options
        self.batches = batches
        self.plan: Plan | None = None
        self.failed = False
        self.hook: Any = None
        self.waiting: _Waiting | None = None

    def start(self) -> FirstBatch:
        """Plan at the next training call; run the plan where there is one already."""
        self.stop()
        if self.waiting is not None and self.waiting.is_inside:
            self.waiting.asleep = False
        elif self.plan is not None:
            self.plan.apply(self.model)
        elif has_sharded(self.model):  # before its hooks gather anything
            self.hook = self.model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        else:
            waiting = stand_in_within(self.model)
            if isinstance(waiting, _Waiting):
                if not waiting.first.failed:
                    raise PlannerError(
                        f"this {type(self.model).__name__} waits for its first batch already: call stop() of what "
                        "plan_on_first_batch returned then, or close() of the PlanCallback."
                    )
                waiting.first.stop()
            previous, signature = self.model.__dict__.get("forward"), inspect.signature(self.model.forward)
            self.waiting = self.model.forward = _Waiting(self.model, previous, signature, self)
        return self

    def stop(self) -> None:
        """Let the model run its own forward again."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        current: Any = stand_in(self.model.__dict__.get("forward"))
        if self.waiting is not None and current is self.waiting:
            set_forward(self.model, self.waiting.previous)
            self.waiting = None
        elif self.plan is not None and getattr(current, "module", None) is self.plan.module:
            self.plan.remove(self.model)
        elif self.waiting is not None:
            self.waiting.asleep = True

    def planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan of a call that the model waited for, and apply it."""
        if has_sharded(self.model):
            raise PlannerError("fully_shard was called on what is to be planned on its first batch: call it before.")
        self._plan(args, kwargs)

    @torch.compiler.disable
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_trained(model, args, kwargs):
            self.stop()
            try:
                self._plan(args, kwargs)
            except BaseException:
                self.start()
                raise

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.called is not None:
            self.called()
        sample = bind_call(call_signature(self.model, self.options.get("loss_fn")), args, kwargs)
        held = self.batches * sum(t.nbytes for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        around = running_wrapper(self.model)  # of which the model is a part: it is planned without, as it runs now
        if around is not None:
            check_wrapper(around)
            for note in wrapper_notes(around):
                warnings.warn(note, stacklevel=2)
        gradients = self.options.get("gradients", "fresh")
        held += wrapper_bytes(around) + unsent_bytes(around, gradients)
        options = {"group": group_of(around), **self.options, "gradients": wrapper_gradients(around, gradients)}
        options["reserve_mb"] = self.options.get("reserve_mb", 0) + held / MIB
        self.failed = True
        with saving_hooks_aside():  # a checkpoint around the model counts what is saved
            self.plan = auto_checkpoint(self.model, sample, self.budget_mb, **options)
        self.failed = False
        self.plan.apply(self.model)
        log.info("planned on the first batch: %r", self.plan)


class _Waiting(StandIn):
    """The `forward` of a model that has not been trained yet.

    What is put around it before its first batch (a trainer's autocast) stays around the plan, and is not planned. A
    copy of the model waits for a first batch of its own.

    Attributes:
        first: whose model it is, or was copied from.
        applied: the plan's forward, once there is one.
        asleep: whether nothing is to be planned, nor a plan to be run.
    """

    __slots__ = ("applied", "asleep", "first")
    waits_for_a_batch = True  # `passes.trace.refuse`: planning it would plan within its planning

    def __init__(
        self, model: nn.Module, previous: Callable[..., Any] | None, signature: inspect.Signature, first: FirstBatch
    ) -> None:
        super().__init__(model, previous, signature)
        self.first = first
        self.applied: StandIn | None = None
        self.asleep = False

    @property
    def is_inside(self) -> bool:
        """Whether it runs within the model's forward, as far as that tells what it is wrapped around."""
        return stand_in_within(self.model) is self

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.applied is None and not self.asleep and _is_trained(self.model, args, kwargs):
            self._plan(args, kwargs)
        run = self.original if self.asleep or self.applied is None else self.applied
        return run(*args, **kwargs)

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan the forward from before, and run the plan where this one runs, or in its place if nothing is around."""
        around: Any = self.model.__dict__.get("forward")
        set_forward(self.model, self.previous)
        self.asleep = True
        try:
            self.first.planned(args, kwargs)
            self.applied = self.model.__dict__["forward"]
        except ForwardFailed as error:  # raised by the own forward, it leaves what it leaves in eager
            warnings.warn(f"not planned yet, not under the budget: {error}", stacklevel=3)
        finally:
            self.asleep = False
            if self.applied is None or around is not self:  # what was not planned is planned by the next call
                set_forward(self.model, around)

    def copied(self, model: nn.Module, memo: dict[int, Any]) -> _Waiting:
        first = FirstBatch(model, self.first.budget_mb, batches=self.first.batches, **self.first.options)
        new = first.waiting = _Waiting(model, copy.deepcopy(self.previous, memo), self.__signature__, first)
        first.plan, new.asleep = self.first.plan, self.asleep
        new.applied = self.applied.copied(model, memo) if self.applied is not None else None
        return new


def _is_trained(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one to plan for: it may have a backward, and no transform of `torch.func` runs it."""
    if not (model.training and torch.is_grad_enabled()):
        return False
    tensors = [*model.parameters(), *(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))]
    return any(t.requires_grad for t in tensors) and not under_transform(tensors)
