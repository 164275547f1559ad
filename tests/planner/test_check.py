"""`check`: what it finds, what it costs, and that it leaves everything as it was."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.run import kernels
from passes.trace.arguments import bind_sample
from planner import CheckError, Plan, PlannerError, auto_checkpoint, pipeline
from planner.check import Checked, check_step
from planner.check import run as check_run
from planner.pipeline import Planned
from tests.planner import residue
from tests.planner.plants import PLANTS, REPLAYS, Everything, everything, kernel
from tests.planner.steps import Wrap, batch, conv_net, linear, mlp, plan, tight

Built = tuple[nn.Module, Any, Planned]


def checked(model: nn.Module, planned: Planned, sample: Any) -> Checked:
    return check_step(model, planned, bind_sample(model, sample), None, True)


# What it finds --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built() -> Built:
    model, sample = everything()
    made = tight(model, sample, 0.3, check=False)
    assert made.recomputed
    return model, sample, made.planned


@pytest.fixture(scope="module")
def replaying() -> Built:
    torch.manual_seed(0)
    model, sample = mlp(), batch(16, 32)
    made = plan(model, sample, check=False, recompute=["aten.native_dropout"])
    assert any("native_dropout" in name for name in made.recomputed)
    return model, sample, made.planned


def test_a_right_plan_passes(built: Built, replaying: Built) -> None:
    for model, sample, planned in (built, replaying):
        assert checked(model, planned, sample).steps == 2


@pytest.mark.parametrize("name", PLANTS)
def test_planted_divergence(name: str, built: Built) -> None:
    model, sample, planned = built
    with pytest.raises(CheckError) as caught:
        checked(model, PLANTS[name](planned, model, sample), sample)
    assert caught.value.differs
    assert caught.value.cause


@pytest.mark.parametrize("name", REPLAYS)
def test_planted_replay(name: str, replaying: Built) -> None:
    model, sample, planned = replaying
    with pytest.raises(CheckError):
        checked(model, REPLAYS[name](planned, model, sample), sample)


KERNELS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[nn.Module, Any]]]] = {}


def test_there_are_enough() -> None:
    assert len(PLANTS) + len(REPLAYS) >= 40
