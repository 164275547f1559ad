"""Models of other people's libraries keep the promises too: equal bits, predicted memory, under a tight budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo import compare
from tests.zoo.library import LIBRARY

QUICK = ("qwen2_masked", "whisper", "diffusion_u_net", "monai_u_net")


def build(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, sample = LIBRARY[name]()
    return model.train(), sample


def check(name: str, share: int) -> None:
    plain, sample = build(name)
    model, _ = build(name)
    model.load_state_dict(plain.state_dict())
    plan = compare.plan_at(model, sample, share)
    expected = compare.run_step(plain, plain, sample)
    assert compare.differences(expected, compare.run_step(plan.module, model, sample)) == []
    measured = compare.measured_peak_bytes(plan.module, model, sample, plan.static_bytes)
    assert measured <= plan.peak_bytes + 64 * 1024  # a loss outside the model is not the plan's
    assert measured >= 0.97 * plan.peak_bytes


@pytest.mark.parametrize("name", QUICK)
def test_quick_library_models(name: str) -> None:
    check(name, 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY)
def test_every_library_model(name: str) -> None:
    for share in (80, 60, 40):
        check(name, share)
