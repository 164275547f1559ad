"""Buffers in whose place forward puts another tensor (`self.center = ...`): a plan puts it there, too."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from passes.errors import OnlyInEager
from planner import Plan
from tests.planner.steps import plan
from tests.planner.train_exported import peak_of

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Center(nn.Module):
    """As DINO's loss; `end` may say what else becomes of the new tensor, or of the old one."""

    def __init__(self, end: Callable[..., Any] | None = None, width: int = 8) -> None:
        super().__init__()
        self.body, self.end = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width)), end
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("other", torch.ones(width))
        self.kept = torch.ones(width)

    def forward(self, x: torch.Tensor) -> Any:
        before = self.center
        found = self.body(x + self.other * self.kept)
        self.center = before * 0.9 + found.detach().mean(0) * 0.1
        loss = (found - self.center).square().mean()
        return loss if self.end is None else self.end(self, loss, before)


def _in_an_attribute(self: Any, loss: torch.Tensor, before: torch.Tensor) -> Any:
    self.kept = self.center
    return loss


def _in_two_buffers(self: Any, loss: torch.Tensor, before: torch.Tensor) -> Any:
    self.other = self.center
    return loss


def _returned(self: Any, loss: torch.Tensor, before: torch.Tensor) -> Any:
    return loss, self.center


def _both_returned(self: Any, loss: torch.Tensor, before: torch.Tensor) -> Any:
    return loss, self.center, before


def _needed(self: Any, loss: torch.Tensor, before: torch.Tensor) -> Any:
    """The old values are needed by the backward."""
    return loss * (1 + (self.body[0].weight.sum(0) * before).sum())


ENDS = [None, _in_an_attribute, _in_two_buffers, _returned, _both_returned, _needed]


@pytest.mark.filterwarnings("ignore:planning anew")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("check", [False, True])
def test_steps_are_those_of_the_plain_model(end: Any, check: bool) -> None:
    model = Center(end)
    plain = copy.deepcopy(model)
    chosen = plan(model, X, recompute=["*"], check=check)
    held: list[list[torch.Tensor]] = []
    for step in range(4):
        found = []
        for own, run in ((plain, plain), (model, chosen.module)):
            loss, *others = run(X) if end in (_returned, _both_returned) else (run(X),)
            loss.backward()
            gradients = [p.grad.clone() for p in own.parameters()]
            own.zero_grad()
            if others:
                assert others[0] is own.center
                others[0].clamp_(-0.1, 0.1)  # which is the buffer
            found.append([loss.detach(), *others, *gradients, *own.buffers(), own.kept])
        assert all(map(torch.equal, *found)), step
        of_all = [(own.center.detach(), own.state_dict()["center"], own.center.numpy()) for own in (plain, model)]
        held += [[torch.as_tensor(a), torch.as_tensor(b)] for a, b in zip(*of_all, strict=True)]
        assert all(torch.equal(*each) for each in held), step


class Around(nn.Module):
    """Code between regions that holds the old tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), Center()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, kept = self.inner.center.detach(), self.inner.state_dict()["center"]
        loss = self.inner(self.first(x))
        return loss * (1 + (self.inner.center - before).abs().sum() + (self.inner.center - kept).sum())


@pytest.mark.parametrize("check", [False, True])
def test_by_regions(check: bool) -> None:
    model = Around()
    plain = copy.deepcopy(model)
    chosen = plan(model, X, regions=["inner"], recompute=["*"], check=check)
    assert [run.path for run in chosen.runs] == ["inner"]
    for _ in range(3):
        found = [run(X) for run in (plain, chosen.module)]
        assert torch.equal(*found) and torch.equal(model.inner.center, plain.inner.center)


def test_what_is_predicted_is_what_is_measured() -> None:
    model = Center(width=4096)
    batch = torch.randn(4, 4096)
    chosen = plan(model, batch)

    def step() -> None:
        chosen.module(batch).backward()
        model.zero_grad()

    step()
    assert chosen.static_bytes + peak_of(step) <= chosen.peak_bytes


@pytest.mark.parametrize("end", [None, _in_two_buffers, _both_returned])
def test_an_export_puts_it_there_too(end: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Center(end)
    plain = copy.deepcopy(model)
    name = f"replaced_{getattr(end, '__name__', 'alone')}"
    plan(model, X, recompute=["*"], regions="whole").export(tmp_path / name)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = importlib.import_module(name).load()
    held = []
    for step in range(3):
        if step and end is _in_two_buffers:  # they are one tensor from here on, which the step was not planned for
            with pytest.raises(Exception, match="is now the same tensor as"):
                loaded(X)
            return
        found = [run(X) for run in (plain, loaded)]
        for each in found:
            (each[0] if end is _both_returned else each).backward()
        assert torch.equal(loaded.center, plain.center)
        held.append((loaded.center, plain.center.clone()))
        assert all(torch.equal(*each) for each in held)
        assert end is not _both_returned or found[1][1] is loaded.center


class Shared(nn.Module):
    def __init__(self, of: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.of = nn.Linear(8, 8), of
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.body(x + self.last)
        self.last = self.of(self, x)
        return found


@pytest.mark.parametrize(
    "of", [lambda self, x: self.body.bias.data, lambda self, x: self.body.weight[0].detach(), lambda self, x: x[0]]
)
def test_memory_of_what_the_step_is_given_is_left_to_eager(of: Any) -> None:
    with pytest.raises(OnlyInEager, match="buffer replaced in forward at last"):
        plan(Shared(of), X, regions="whole")


def test_the_plans_module_is_as_before_where_a_step_fails() -> None:
    model = Center()
    chosen: Plan = plan(model, X, recompute=["*"])
    before = model.center
    with pytest.raises(Exception, match=r"shape|size|mat1"):
        chosen.module(torch.randn(16, 9))
    assert model.center is before


class Twice(nn.Module):
    """A module under two names, whose forward replaces its buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        inner = Center(lambda self, loss, before: loss.unsqueeze(0).expand(8) * self.center)
        self.first = self.second = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x + self.first(x))


@pytest.mark.parametrize("check", [False, True])
def test_of_a_module_under_two_names(check: bool) -> None:
    model = Twice()
    plain = copy.deepcopy(model)
    chosen = plan(model, X, recompute=["*"], check=check)
    for _ in range(3):
        assert torch.equal(chosen.module(X), plain(X)) and torch.equal(model.first.center, plain.first.center)


def test_what_the_loop_keeps_in_the_module_plans_nothing_anew(recwarn: pytest.WarningsRecorder) -> None:
    model = Center()
    model.history, model.steps = [], 0
    chosen = plan(model, X, recompute=["*"], check=False)
    for _ in range(3):
        model.history.append(chosen.module(X).item())
        model.steps += 1
    assert not [warning for warning in recwarn if "planning anew" in str(warning.message)]


class Routed(nn.Module):
    """Leaves a loss in an attribute, beside a buffer that it replaces: a mixture of experts that balances its load."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.aux = nn.Linear(8, 3), None
        self.register_buffer("load", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).softmax(-1)
        self.load = 0.9 * self.load + 0.1 * chosen.detach().mean(0)
        self.aux = chosen.square().sum()
        return chosen.log().mean()


@pytest.mark.filterwarnings("ignore:backward started from")
@pytest.mark.parametrize("check", [False, True])
def test_beside_a_loss_in_an_attribute(check: bool) -> None:
    model = Routed()
    plain = copy.deepcopy(model)
    chosen = plan(model, X, check=check)
    for _ in range(3):
        for own, run in ((plain, plain), (model, chosen.module)):
            own.zero_grad()
            (run(X) + own.aux).backward()
        assert torch.equal(model.router.weight.grad, plain.router.weight.grad) and torch.equal(model.load, plain.load)


# Beside what else a forward leaves ------------------------------------------------------------------------------------


class Registers(nn.Module):
    """Makes a buffer at its first call, and a larger one where that is too small."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer, self.persistent = nn.Linear(8, 8), persistent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table") or len(self.table) < len(x):
            table = torch.linspace(0, 1, len(x)).unsqueeze(1)
            self.register_buffer("table", table, persistent=self.persistent)
        return self.layer(x) * self.table[: len(x)]


@pytest.mark.filterwarnings("ignore:planning anew", "ignore:planned step not used")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_is_registered_in_forward(persistent: bool) -> None:
    model = Registers(persistent)
    plain = copy.deepcopy(model)
    chosen = plan(model, X[:4], recompute=["*"])
    assert not hasattr(model, "table")
    for rows in (4, 3, 6, 5, 4):
        for own, run in ((plain, plain), (model, chosen.module)):
            own.zero_grad()
            run(X[:rows]).square().mean().backward()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad), rows
        assert torch.equal(model.table, plain.table) and model.state_dict().keys() == plain.state_dict().keys()


class Feeds(nn.Module):
    """Leaves a tensor in its argument, one in an attribute, and state for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.aux, self.hidden = nn.Linear(8, 8), None, torch.zeros(8)

    def forward(self, x: torch.Tensor, found: dict[str, torch.Tensor]) -> torch.Tensor:
        y = self.layer(x) + self.hidden
        self.hidden, self.aux, self.new = y.detach().mean(0), y.square().sum(), y.detach().std()
        found["y"] = y * 3
        return y.tanh().mean()


@pytest.mark.filterwarnings("ignore:backward started from")
@pytest.mark.parametrize("check", [False, True])
def test_a_loss_of_the_output_an_argument_and_an_attribute(check: bool) -> None:
    model = Feeds()
    plain = copy.deepcopy(model)
    chosen = plan(model, (X, {}), recompute=["*"], check=check)
    for _ in range(3):
        for own, run in ((plain, plain), (model, chosen.module)):
            own.zero_grad()
            found: dict[str, torch.Tensor] = {}
            (run(X, found) + found["y"].square().sum() + own.aux).backward()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)


def test_an_export_of_a_module_under_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Twice()
    plain = copy.deepcopy(model)
    plan(model, X, recompute=["*"], regions="whole").export(tmp_path / "under_two_names")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = importlib.import_module("under_two_names").load()
    for _ in range(3):
        assert torch.equal(loaded(X), plain(X)) and torch.equal(loaded.second.center, plain.second.center)
