"""The planner in Lightning: `Trainer(callbacks=[PlanCallback(budget_mb=4000)])`."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.api import check_names
from planner.budget import Budget
from planner.plan import Plan
from solvers.errors import PlannerError

from .first_batch import FirstBatch

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class PlanCallback(Callback):
    """Plans the network that `training_step` calls, on the first batch, and runs the plan until training ends.

    The network is the `LightningModule` itself where `training_step` calls `self(...)`, and otherwise the first
    submodule with parameters that it calls. What `training_step` computes from the network's output (a loss, metrics)
    is not part of the plan: `reserve_mb` makes room for it.

    The trainer's optimizer is counted. Lightning holds the gradients of the step before through the next forward, so
    gradients are counted as `"accumulated"`.

    Args:
        budget_mb, options: those of `auto_checkpoint`; they come before what the trainer says.
        module: path of the network, where it is another one.
    """

    def __init__(self, budget_mb: float | str | None = None, *, module: str | None = None, **options: Any) -> None:
        Budget(budget_mb)
        check_names("PlanCallback", options)
        self.budget_mb, self.module, self.options = budget_mb, module, options
        self.networks: dict[str, FirstBatch] = {}
        self.chosen: str | None = None
        self.watched: list[Any] = []
        self.said: set[str] = set()

    @property
    def plan(self) -> Plan | None:
        """The plan; None until the first batch."""
        return None if self.chosen is None else self.networks[self.chosen].plan

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the network up to be planned by the first batch."""
        self.close()
        found = _networks(pl_module, self.module)
        if self.plan is None or found.get(self.chosen or "") is not self.networks[self.chosen or ""].model:
            options = {"optimizer": _optimizer(trainer), "gradients": "accumulated", **self.options}
            self.chosen = None
            self.networks = {
                name: FirstBatch(network, self.budget_mb, called=partial(self._choose, name), batches=1, **options)
                for name, network in found.items()
            }
        for name in self.networks if self.chosen is None else [self.chosen]:
            self.networks[name].start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the network its own forward back; a further `trainer.fit()` runs the same plan."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same where training ends by an error."""
        self.close()

    def close(self) -> None:
        """Leave the model as it was found."""
        for handle in self.watched:
            handle.remove()
        for network in self.networks.values():
            network.stop()
        self.watched = []

    def _choose(self, name: str) -> None:
        """The network is about to be planned: the others run as they are, and that is said if they are called."""
        self.close()
        self.chosen = name
        planned = set(self.networks[name].model.modules())
        for other, network in self.networks.items():
            if network.model not in planned and not planned & set(network.model.modules()):
                self.watched.append(network.model.register_forward_pre_hook(self._outside(other)))

    def _outside(self, other: str) -> Any:
        @torch.compiler.disable
        def called(module: nn.Module, args: Any) -> None:
            if module.training and other not in self.said:
                self.said.add(other)
                warnings.warn(
                    f"training_step calls {self.chosen!r}, which is planned, and {other!r}, which the plan does not "
                    "cover: its memory is not counted. Call both from one forward, name the larger one "
                    "(PlanCallback(module=...)), or make room with reserve_mb.",
                    stacklevel=2,
                )

        return called


def _networks(pl_module: nn.Module, name: str | None) -> dict[str, nn.Module]:
    """What may be planned, by its path: whichever `training_step` calls first."""
    if name is not None:
        return {name: pl_module.get_submodule(name)}
    lightning: Any = next(kind for kind in type(pl_module).__mro__ if kind.__name__ == "LightningModule")
    own = {"": pl_module} if type(pl_module).forward is not lightning.forward else {}
    children = {n: m for n, m in pl_module.named_children() if any(p.requires_grad for p in m.parameters())}
    if not own and not children:
        raise PlannerError(
            f"{type(pl_module).__name__} has no forward and no submodule with parameters to train: name what is to be "
            "planned with PlanCallback(module=...)."
        )
    return {**own, **children}


def _optimizer(trainer: Any) -> Any:
    """The trainer's optimizer."""
    if len(trainer.optimizers) > 1:
        warnings.warn(
            f"{len(trainer.optimizers)} optimizers take turns, and none is counted: make room for their state with "
            "PlanCallback(reserve_mb=...).",
            stacklevel=2,
        )
        return None
    return trainer.optimizers[0] if trainer.optimizers else None
