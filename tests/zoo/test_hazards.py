"""Every hazard keeps every promise at 80, 60 and 40 % of its memory, or at the minimum that is stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo import compare
from tests.zoo.hazards import HAZARDS
from tests.zoo.layers import LAYERS

ENTRIES = {**HAZARDS, **LAYERS}
LONG = ("siamese_of_three", "siamese_in_blocks", "gru_bidirectional")


def build(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, sample = ENTRIES[name]()
    return model.train(), sample


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in ENTRIES])
def test_same_numbers_and_memory(name: str) -> None:
    check(name, (80, 60, 40) if name in HAZARDS else (60,))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_every_share(name: str) -> None:
    check(name, (80, 60, 40))


def check(name: str, shares: tuple[int, ...]) -> None:
    plain, sample = build(name)
    model, _ = build(name)
    for plan in compare.plans_at(model, sample, shares):
        plain.load_state_dict(model.state_dict())
        assert plan.budget_bytes is not None
        assert plan.peak_bytes <= plan.budget_bytes
        for seed in (1, 2):
            expected = compare.run_step(plain, plain, sample, seed)
            assert compare.differences(expected, compare.run_step(plan.module, model, sample, seed)) == []
        measured = compare.measured_peak_bytes(plan.module, model, sample, plan.static_bytes)
        assert measured <= plan.peak_bytes + compare.loss_bytes(plan.module, sample)
