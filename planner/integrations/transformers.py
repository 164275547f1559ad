"""The planner in transformers' `Trainer`: `Trainer(..., callbacks=[PlanCallback(budget_mb=4000)])`."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from transformers import TrainerCallback

from planner.api import check_names
from planner.budget import Budget
from planner.plan import Plan
from solvers.errors import PlannerError

from .first_batch import FirstBatch


class PlanCallback(TrainerCallback):
    """Plans the model on the first batch that `Trainer` trains on, and runs the plan until training ends.

    The trainer's optimizer is counted, and with `gradient_accumulation_steps` above 1 so are the gradients that are
    added to (`gradients="accumulated"`).

    Args:
        budget_mb, options: those of `auto_checkpoint`; they come before what the trainer's arguments say.
    """

    def __init__(self, budget_mb: float | str | None = None, **options: Any) -> None:
        Budget(budget_mb)
        check_names("PlanCallback", options)
        if options.get("loss_fn") is not None:
            raise PlannerError(
                "PlanCallback takes no loss_fn: the model would return the loss alone, and Trainer looks for it in the "
                "model's output. A loss that Trainer computes itself is not in the plan: make room with reserve_mb."
            )
        self.budget_mb, self.options = budget_mb, options
        self.first: FirstBatch | None = None
        self.checkpointed: list[Any] = []

    @property
    def plan(self) -> Plan | None:
        """The plan; None until the first batch."""
        return self.first.plan if self.first else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the model up to be planned by the first batch."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        if args.n_gpu > 1:
            raise PlannerError(
                f"Trainer runs this model on {args.n_gpu} GPUs by nn.DataParallel, which a plan does not cover: start "
                "one process per GPU (torchrun), or let it see one GPU (CUDA_VISIBLE_DEVICES)."
            )
        if self.first is None or self.first.model is not model:
            self.close()
            gradients = "accumulated" if args.gradient_accumulation_steps > 1 else "fresh"
            options = {"optimizer": optimizer, "gradients": gradients, **self.options}
            fetched = args.gradient_accumulation_steps  # at once, and one batch is trained on
            self.first = FirstBatch(model, self.budget_mb, batches=fetched, **options)
        self._leave_checkpoints_to_the_plan(model)
        self.first.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model its own forward back; a further `trainer.train()` runs the same plan."""
        self.close()

    def close(self) -> None:
        """Leave the model as it was found. `Trainer` does not say when training ends by an error."""
        if self.first is not None:
            self.first.stop()
        for module in self.checkpointed:
            module.gradient_checkpointing = True
        self.checkpointed = []

    def _leave_checkpoints_to_the_plan(self, model: nn.Module) -> None:
        self.checkpointed += [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
        if not self.checkpointed:
            return
        warnings.warn(
            "gradient_checkpointing=True is switched off while the plan runs: the plan itself decides what is "
            "recomputed, and recomputes no more than the budget asks for. Leave the option out.",
            stacklevel=2,
        )
        for module in self.checkpointed:
            module.gradient_checkpointing = False
