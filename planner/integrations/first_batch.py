"""Planning in somebody else's loop: on the first real batch, as the trainer calls the model with it."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from passes._torch import pytree
from passes.run._torch import under_transform
from passes.trace.arguments import bind_call, call_signature
from passes.trace.refuse import has_sharded
from planner.api import auto_checkpoint
from planner.budget import Budget
from planner.plan import Plan
from planner.ranks.wrapper import (
    check_wrapper,
    group_of,
    inner_module,
    running_wrapper,
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
        BudgetError: `budget_mb` is not a budget. What planning raises comes out of the first training call.
    """
    return FirstBatch(model, budget_mb, **options).start()


class FirstBatch:
    """A model that runs a plan from its first training call on.

    Args:
        called: told of that call before anything is planned.
        batches: how many further ones the trainer holds while it trains on one; there is room left for them.

    Attributes:
        plan: the plan; None until that call.
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
        self.hook: Any = None

    def start(self) -> FirstBatch:
        """Plan at the next training call; run the plan where there is one already."""
        self.stop()
        if self.plan is not None:
            self.plan.apply(self.model)
        elif has_sharded(self.model):  # before its hooks gather anything
            self.hook = self.model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        else:
            self.model.forward = _Waiting(self.model, self._planned)
        return self

    def stop(self) -> None:
        """Let the model run its own forward again."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        current: Any = self.model.__dict__.get("forward")
        if isinstance(current, _Waiting) and current.planned == self._planned:
            current.put_back()
        elif self.plan is not None and getattr(current, "module", None) is self.plan.module:
            self.plan.remove(self.model)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if has_sharded(self.model):
            raise PlannerError("fully_shard was called on what is to be planned on its first batch: call it before.")
        self._plan(args, kwargs)
        return self.model.forward(*args, **kwargs)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_trained(model, args, kwargs):
            self._plan(args, kwargs)

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stop()
        if self.called is not None:
            self.called()
        sample = bind_call(call_signature(self.model, self.options.get("loss_fn")), args, kwargs)
        held = sum(t.nbytes for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        around = running_wrapper(self.model)  # of which the model is a part: it is planned without, as it runs now
        if around is not None:
            check_wrapper(around)
            for note in wrapper_notes(around):
                warnings.warn(note, stacklevel=2)
        reserve_mb = self.options.get("reserve_mb", 0) + (self.batches * held + wrapper_bytes(around)) / MIB
        options = {"group": group_of(around), **self.options, "reserve_mb": reserve_mb}
        options["gradients"] = wrapper_gradients(around, options.get("gradients", "fresh"))
        self.plan = auto_checkpoint(self.model, sample, self.budget_mb, **options)
        self.plan.apply(self.model)
        log.info("planned on the first batch: %r", self.plan)


class _Waiting:
    """The `forward` of a model that has not been trained yet."""

    def __init__(self, model: nn.Module, planned: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self.model, self.planned = model, planned
        self.previous = model.__dict__.get("forward")
        self.own: Callable[..., Any] = model.forward
        self.__name__ = "forward"
        self.__signature__ = inspect.signature(model.forward)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trained = _is_trained(self.model, args, kwargs)
        return self.planned(args, kwargs) if trained else self.own(*args, **kwargs)

    def put_back(self) -> None:
        if self.previous is None:
            del self.model.forward
        else:
            self.model.forward = self.previous


def _is_trained(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one to plan for: it may have a backward, and no transform of `torch.func` runs it."""
    if not (model.training and torch.is_grad_enabled()):
        return False
    tensors = [*model.parameters(), *(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))]
    return any(t.requires_grad for t in tensors) and not under_transform(tensors)
