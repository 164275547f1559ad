"""Every hazard keeps every promise at 80, 60 and 40 % of its memory, or at the minimum that is stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from passes.structure import flatten
from planner import Plan
from tests.zoo import compare
from tests.zoo.hazards import HAZARDS


def build(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, sample = HAZARDS[name]()
    return model.train(), sample


def total_loss(output: Any) -> torch.Tensor:
    """A loss through every differentiable output."""
    tensors, _ = flatten(output)
    return sum(t.float().pow(2).mean() for t in tensors if t.requires_grad)  # type: ignore[return-value]


@pytest.mark.parametrize("name", HAZARDS)
def test_same_numbers_and_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "scalar_loss", total_loss)
    plain, sample = build(name)
    for share in (80, 60, 40):
        model, _ = build(name)
        plain.load_state_dict(model.state_dict())
        plan = compare.plan_at(model, sample, share)
        assert plan.budget_bytes is not None
        assert plan.peak_bytes <= plan.budget_bytes
        for seed in (1, 2):
            expected = compare.run_step(plain, plain, sample, seed)
            assert compare.differences(expected, compare.run_step(plan.module, model, sample, seed)) == []
        loss_bytes = _loss_bytes(plan, sample)
        measured = compare.measured_peak_bytes(plan.module, model, sample, plan.static_bytes)
        assert measured <= plan.peak_bytes + loss_bytes


def _loss_bytes(plan: Plan, sample: Any) -> int:
    """What the loss outside the model allocates, which is not the plan's to count: at most six times the outputs."""
    args, kwargs = compare.split_sample(sample)
    outputs, _ = flatten(plan.module(*args, **kwargs))
    return sum(6 * 8 * t.numel() for t in outputs) + 1024
