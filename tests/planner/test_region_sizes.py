"""Regions that cannot be had within the budget: larger ones take their place."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from planner import BudgetError, Plan, auto_checkpoint
from planner.regions.larger import holders
from planner.session import Session, open_session
from solvers.bounds import floor_bytes
from tests.planner.test_regions import assert_equal_and_exact, loss_inside

BLOCKS = "stages.?.*"


class Residual(nn.Module):
    """Returns as much as it computes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.conv(torch.relu(self.norm(x))))


class Staged(nn.Module):
    """`stages` are called, the list that holds them is not. Code after them keeps four tensors for its backward."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*(Residual(8) for _ in range(3))) for _ in range(2))
        self.head, self.branches = nn.Linear(8, 4), branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        for _ in range(4):
            x = x.sin()
        if self.branches and bool(x.mean() > math.inf):
            x = -x
        return self.head(x.mean((2, 3))).square().sum()


QUICK: dict[str, Any] = {"progress": False, "solver": "greedy", "time_limit": 2.0}


def session_of(model: nn.Module, x: torch.Tensor, regions: str) -> Session:
    return open_session(model, x, regions=regions, check=False, **QUICK)


def staged(branches: bool = False) -> tuple[nn.Module, torch.Tensor, int, int]:
    """The model, its sample, and the least that its blocks and its stages need."""
    torch.manual_seed(0)
    model, x = Staged(branches), torch.randn(4, 8, 8, 8)
    blocks, stages = (session_of(model, x, pattern).minimum().minimum_bytes for pattern in (BLOCKS, "stages.?"))
    assert stages < floor_bytes(session_of(model, x, BLOCKS).problem)
    return model, x, blocks, stages


def planned(model: nn.Module, x: torch.Tensor, budget: int) -> Plan:
    return auto_checkpoint(model, x, budget / 2**20, regions=BLOCKS, **QUICK)


def test_blocks_make_room_for_what_holds_them() -> None:
    model, x, blocks, stages = staged()
    asked = {f"stages.{i}.{k}" for i in range(2) for k in range(3)}
    assert {run.path for run in planned(model, x, blocks).runs} == asked
    plan = planned(model, x, (blocks + stages) // 2)
    assert {run.path for run in plan.runs} == {"stages.0", "stages.1"}
    assert any("stages.0, stages.1 planned instead" in note for note in plan.notes)
    assert_equal_and_exact(plan, copy.deepcopy(model), loss_inside(x))


def test_the_whole_model_is_the_largest_region() -> None:
    model, x, _, _ = staged()
    plan = planned(model, x, floor_bytes(session_of(model, x, "stages.?").problem) - 1)
    assert not plan.runs
    assert any("the whole model planned instead" in note for note in plan.notes)
    assert_equal_and_exact(plan, copy.deepcopy(model), loss_inside(x))


def test_what_cannot_be_a_region_is_none() -> None:
    """The whole model asks for a value, so that stages are as large as regions get."""
    model, x, _, stages = staged(branches=True)
    assert {run.path for run in planned(model, x, stages).runs} == {"stages.0", "stages.1"}
    with pytest.raises(BudgetError, match="larger ones do not fit either") as caught:
        planned(model, x, floor_bytes(session_of(model, x, "stages.?").problem) - 1)
    assert (caught.value.minimum_bytes or 0) >= stages


def test_a_refusal_captures_nothing_where_nothing_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, blocks, _ = staged()
    session = session_of(model, x, BLOCKS)
    monkeypatch.setattr("planner.pipeline.prepare_step", pytest.fail)
    with pytest.raises(BudgetError, match="larger ones do not fit either") as caught:
        session.plan(blocks // 4)
    assert caught.value.minimum_bytes == blocks


def test_another_batch_is_planned_by_the_same_regions(tmp_path: Any) -> None:
    model, x, blocks, stages = staged()
    plan = planned(model, x, (blocks + stages) // 2)
    plain, half = copy.deepcopy(model), x[:2].clone()
    for batch in (half, x):
        model.zero_grad()
        plain.zero_grad()
        loss, wanted = plan.module(batch), plain(batch)
        assert torch.equal(loss, wanted)
        loss.backward()
        wanted.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", copy.deepcopy(model), x)
    assert [run.path for run in loaded.runs] == [run.path for run in plan.runs]
    assert loaded.peak_bytes == plan.peak_bytes


def test_what_holds_them() -> None:
    model = nn.Module()
    model.stem, model.body = nn.Linear(1, 1), nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(1, 1))]))
    found = [sorted(paths) for paths in holders(model, ["stem", "body.0.0.0"])]
    assert found == [["body.0.0", "stem"], ["body", "stem"], [""]]
