"""A plan by regions that computes nothing again, and holds as much as the plain step, leaves the model as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from passes.trace.arguments import parameters_of
from planner import DoubleBackward, Plan, auto_checkpoint
from planner.dropin.regions import RegionForward
from tests.planner.steps import SmallGPT, assert_same_gradients, assert_same_state
from tests.zoo.compare import measured_peak_bytes


class ConvNet(nn.Module):
    """Blocks of which a plan without recompute holds what eager holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self._block(a, b) for a, b in ((3, 8), (8, 8), (8, 16))))
        self.head = nn.Linear(16, 4)

    @staticmethod
    def _block(a: int, b: int) -> nn.Module:
        first = nn.Conv2d(a, 2 * b, 3, padding=1, bias=False), nn.BatchNorm2d(2 * b), nn.ReLU()
        return nn.Sequential(*first, nn.Conv2d(2 * b, b, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3))).square().mean()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What a convolution's backward takes for a moment depends on it; a plan runs some in two parts, and holds less."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The regions that run as planned, in order."""
    made: list[str] = []
    call = RegionForward.__call__

    def noted(self: RegionForward, *args: Any, **kwargs: Any) -> Any:
        made.append(self.path)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(RegionForward, "__call__", noted)
    return made


def planned(**options: Any) -> tuple[ConvNet, Plan, torch.Tensor]:
    torch.manual_seed(0)
    model, x = ConvNet(), torch.randn(4, 3, 16, 16)
    return model, auto_checkpoint(model, x, progress=False, check=False, regions="blocks.*", **options), x


def test_a_plan_that_changes_nothing_runs_the_model(calls: list[str]) -> None:
    model, plan, x = planned()
    plain = copy.deepcopy(model)
    assert plan.plain and not plan.recomputed and "as they are" in str(plan)
    plain(x).backward()
    plan.module(x).backward()
    assert not calls
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)
    model.zero_grad()
    assert measured_peak_bytes(plan.module, model, x, plan.static_bytes) == plan.peak_bytes
    torch.autograd.grad(plan.module(x), list(model.parameters()), create_graph=True)  # as in eager


def test_below_the_plain_peak_regions_run_their_plans(calls: list[str]) -> None:
    model, plan, x = planned(budget_mb="80%")
    assert not plan.plain and plan.recomputed and "as they are" not in str(plan)
    loss = plan.module(x)
    assert calls == ["blocks.0", "blocks.1", "blocks.2"]
    with pytest.raises(DoubleBackward):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_a_plan_without_recompute_that_holds_less_is_run(calls: list[str]) -> None:
    torch.manual_seed(0)
    model, x = SmallGPT(layers=2), torch.randint(0, 64, (2, 16))
    plan = auto_checkpoint(model, x, progress=False, check=False, regions="blocks.*")
    assert not plan.plain and not plan.recomputed
    plan.module(x)
    assert calls


def test_it_is_planned_anew_as_any_other(calls: list[str]) -> None:
    model, plan, x = planned()
    model.blocks[0][2].inplace = True  # type: ignore[index,union-attr,assignment]
    with pytest.warns(UserWarning, match="planning anew: argument 'region blocks.0"):
        plan.module(x).backward()
    with pytest.warns(UserWarning, match="planning anew: argument 'x'"):
        plan.module(x[:2]).backward()
    assert not calls


def test_a_file_of_it_is_loaded_as_one(tmp_path: Path, calls: list[str]) -> None:
    model, plan, x = planned()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", model, x, progress=False)
    assert loaded.plain
    loaded.module(x).backward()
    assert not calls


def test_parameters_in_their_order() -> None:
    model = nn.Sequential(SmallGPT(layers=2), ConvNet(), nn.ModuleList([nn.Linear(2, 2)] * 2))
    model.register_parameter("own", nn.Parameter(torch.zeros(1)))
    model.register_module("nothing", None)
    model[1].head.weight = model[2][0].weight  # type: ignore[index,union-attr,assignment]
    assert list(map(id, parameters_of(model))) == list(map(id, model.parameters()))


class Partly(SmallGPT):
    """Tells of some of its parameters alone."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.blocks.parameters(recurse)


def test_a_model_that_tells_of_some_parameters_alone_is_planned_once(recwarn: pytest.WarningsRecorder) -> None:
    model, x = Partly(layers=2), torch.randint(0, 64, (2, 16))
    plan = auto_checkpoint(model, x, progress=False, check=False, regions="blocks.*")
    recwarn.clear()
    for _ in range(2):
        plan.module(x)
    assert not recwarn
