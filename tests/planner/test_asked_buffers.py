"""What a model's Python asks about its own small buffers (a flag, a count, strides) is answered, and guarded."""

from __future__ import annotations

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner import CaptureError, Plan, auto_checkpoint
from tests.zoo.compare import same_bits

BATCHES = 6


class Asking(nn.Module):
    """A net with buffers, about which `forward` of each class below asks something."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("strides", torch.tensor([2.0, 4.0]))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.finish(self.linear(self.norm(self.linear(x)).relu()).relu())

    def finish(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Numbers(Asking):
    def finish(self, h: torch.Tensor) -> torch.Tensor:
        for stride in self.strides:
            h = h * float(stride)
        return h


class Listed(Asking):
    def finish(self, h: torch.Tensor) -> torch.Tensor:
        return h * sum(self.strides.tolist())


class FillValues(Asking):
    def finish(self, h: torch.Tensor) -> torch.Tensor:
        return torch.cat([h * h.new_full((4,), s) for s in self.strides])  # type: ignore[call-overload]


class StartsFromData(Asking):
    """As quantizers and ActNorm do: the first batch decides what the buffer is."""

    def finish(self, h: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.strides.copy_(h.detach().std().expand(2))
            self.ready.fill_(True)
        return h * self.strides[0]


class Counts(Asking):
    def finish(self, h: torch.Tensor) -> torch.Tensor:
        h = h * 2 if self.count >= 2 else h * 3
        self.count += 1
        return h


class CountsFirst(Asking):
    def finish(self, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return h * 2 if self.count > 3 else h


class ChangesAView(Asking):
    def finish(self, h: torch.Tensor) -> torch.Tensor:
        self.strides[0].add_(1)
        return h * 2 if self.strides.sum() > 8 else h


class AsksStatistics(Asking):
    def finish(self, h: torch.Tensor) -> torch.Tensor:
        return h * 2 if self.norm.running_mean.sum() > 0 else h  # type: ignore[union-attr]


class OtherNumber(Asking):
    def finish(self, h: torch.Tensor) -> torch.Tensor:
        h = h * (1 + self.count.item())
        self.count += 1
        return h


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", [Numbers, Listed, FillValues, StartsFromData, Counts])
@pytest.mark.parametrize("loss", [torch.Tensor.sum, lambda y: y.pow(2).mean()], ids=["replayed", "as planned"])
def test_a_question_about_a_buffer_is_answered_and_its_change_followed(kind: type[Asking], loss: Any) -> None:
    """Each of these was refused as a whole."""
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    plan = auto_checkpoint(model, torch.randn(3, 4), regions="whole", progress=False)
    assert plan.checked
    for batch in range(BATCHES):
        x = torch.randn(3, 4)
        for each, module in ((plain, plain), (model, plan.module)):
            if batch == BATCHES - 2:
                each.strides.mul_(2)  # type: ignore[operator, union-attr]
            each.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss(module(x)).backward()
        assert all(same_bits(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
        assert all(same_bits(p, q) for p, q in zip(plain.buffers(), model.buffers(), strict=True))


@pytest.mark.parametrize("kind", [CountsFirst, ChangesAView, AsksStatistics, OtherNumber])
def test_what_forward_changes_before_it_asks_or_asks_as_a_number_is_refused(kind: type[Asking]) -> None:
    with pytest.raises(CaptureError, match=r"test_asked_buffers\.py:\d+"):
        auto_checkpoint(kind(), torch.randn(3, 4), regions="whole", progress=False)


def test_a_step_with_the_same_answers_is_not_planned_anew() -> None:
    plan = auto_checkpoint(Numbers(), torch.randn(3, 4), regions="whole", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            plan.module(torch.randn(3, 4)).pow(2).mean().backward()


def test_an_answer_that_changes_before_the_backward_is_not_replayed() -> None:
    model = Numbers()
    plan = auto_checkpoint(model, torch.randn(3, 4), regions="whole", progress=False)
    output = plan.module(torch.randn(3, 4))
    model.strides.mul_(2)  # type: ignore[operator, union-attr]
    with pytest.raises(RuntimeError, match="strides was changed in place"):
        output.sum().backward()  # in other strides than planned for


def test_regions_that_differ_in_what_they_ask_are_two() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Numbers(), Numbers(), Numbers())
    plain[1].strides.mul_(3)  # type: ignore[operator, union-attr]
    model = copy.deepcopy(plain)
    x = torch.randn(3, 4)
    plan = auto_checkpoint(model, x, regions="*", progress=False)
    for module in (plain, plan.module):
        module(x).pow(2).mean().backward()
    assert all(same_bits(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_saved_plan_and_an_exported_one_ask_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Numbers(), torch.randn(3, 4)
    plan = auto_checkpoint(model, x, regions="whole", progress=False)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", model, x).peak_bytes == plan.peak_bytes
    plan.export(tmp_path / "asks_buffers")
    monkeypatch.syspath_prepend(str(tmp_path))
    exported = importlib.import_module("asks_buffers").load()
    assert same_bits(exported(x), copy.deepcopy(model)(x))
    dict(exported.named_buffers())["strides"].mul_(2)
    with pytest.raises(RuntimeError, match="answer the model's questions"):
        exported(x)
