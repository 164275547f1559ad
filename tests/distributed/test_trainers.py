"""Trainers on two ranks: the callback plans with all of them, and training is that without it, bit for bit."""

from __future__ import annotations

import importlib
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from planner import Plan
from planner.integrations import plan_on_first_batch

from . import cases, models
from .harness import run_ranks

Trained = tuple[list[Any], list[torch.Tensor], "Plan | None"]


def rows(count: int) -> list[torch.Tensor]:
    return [models.tokens(i, 1)[0] for i in range(count)]


def batches(count: int) -> Any:
    data: Any = rows(count)
    return torch.utils.data.DataLoader(data, batch_size=4)


class Returning(models.Language):
    """A model that returns what transformers' Trainer looks for."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": super().forward(tokens, labels)}


def transformers(planned: bool) -> Trained:
    from transformers import Trainer, TrainingArguments

    from planner.integrations.transformers import PlanCallback

    torch.manual_seed(0)
    model, planning = Returning(), PlanCallback("85%", **cases.QUICK)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=4, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        data: Any = [{"tokens": row, "labels": row} for row in rows(64)]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[planning] if planned else [])
        trainer.train()
        history: list[dict[str, Any]] = trainer.state.log_history
        losses = [(line.get("loss"), line.get("grad_norm")) for line in history]
    return losses, cases.whole(model), planning.plan


def accelerate(planned: bool) -> Trained:
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = models.language()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(70))  # the last batch is smaller
    options = {"optimizer": optimizer, "gradients": "accumulated", **cases.QUICK}
    waiting = plan_on_first_batch(model, "85%", **options) if planned else None
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, cases.whole(model), waiting.plan if waiting else None


def lightning(planned: bool) -> Trained:
    import pytorch_lightning as pl

    from planner.integrations.lightning import PlanCallback

    environments: Any = importlib.import_module("lightning_fabric.plugins.environments")
    base: Any = pl.LightningModule

    class Trained(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = models.language(), []

        def training_step(self, batch: torch.Tensor, i: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    torch.manual_seed(0)
    model, planning = Trained(), PlanCallback("85%", **cases.QUICK)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[planning] if planned else [],
        plugins=[environments.TorchElasticEnvironment()],
    )  # fmt: skip
    trainer.fit(model, batches(48))
    return model.losses, cases.whole(model), planning.plan


TRAINERS: dict[str, Callable[[bool], Trained]] = {
    "transformers": transformers, "accelerate": accelerate, "pytorch_lightning": lightning,
}  # fmt: skip


def both(rank: int, name: str, port: int) -> tuple[bool, float, str, int]:
    """Whether both trainings are equal; what the plan recomputes, its schedule, and its bytes for buckets."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0,
            "MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": 1}  # fmt: skip
    os.environ.update({key: str(value) for key, value in told.items()}, ACCELERATE_USE_CPU="true")
    want, got = TRAINERS[name](False), TRAINERS[name](True)
    plan = got[2]
    assert plan is not None
    options = plan.prepared.options
    return cases.equal(got, want), plan.overhead, repr(plan.schedule), options.reserve_bytes + options.wrapper_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_ranks_plan_together_in_a_trainer(name: str) -> None:
    pytest.importorskip(name)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first, second = run_ranks(both, name, port, seconds=300.0)
    assert first[0] and second[0]
    assert first[1] > 0 and first[2] == second[2]
    assert first[3] >= sum(p.nbytes for p in models.language().parameters())  # the buckets
