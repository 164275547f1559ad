"""Gradients that a step shares with what lies outside of it: the plain bits, or a word."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner import Plan, auto_checkpoint

Call = Callable[[torch.Tensor], torch.Tensor]


class Language(nn.Module):
    """Reads its embedding once, or as its head, too, and a layer twice."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tied, self.embedding, self.layer = tied, nn.Embedding(50, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.layer(self.embedding(x)))
        if not self.tied:
            return hidden.logsumexp(-1).mean()
        return F.linear(F.gelu(self.layer(hidden)), self.embedding.weight).logsumexp(-1).mean()


def _penalty(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() / 10


def _with_penalty(call: Call, model: nn.Module, x: torch.Tensor) -> None:
    (call(x) + _penalty(model)).backward()


def _called_twice(call: Call, model: nn.Module, x: torch.Tensor) -> None:
    (call(x) + call(x.flip(0))).backward()


def _penalty_first(call: Call, model: nn.Module, x: torch.Tensor) -> None:
    penalty = _penalty(model)  # what is recorded first is added last
    (call(x) + penalty).backward()


def _one_after_the_other(call: Call, model: nn.Module, x: torch.Tensor) -> None:
    call(x).backward()
    call(x.flip(0)).backward()
    _penalty(model).backward()


def _alone(call: Call, model: nn.Module, x: torch.Tensor) -> None:
    call(x).backward()


def _planned(tied: bool) -> tuple[Plan, nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Language(tied), torch.randint(0, 50, (4, 9))
    plan = auto_checkpoint(model, x, progress=False, gradients="accumulated")
    return plan, model, copy.deepcopy(model), x


@pytest.mark.parametrize("step", [_with_penalty, _called_twice])
def test_a_sum_that_goes_on_outside_of_the_step_is_said(step: Callable[..., None]) -> None:
    plan, model, plain, x = _planned(tied=True)
    step(plain, plain, x)
    with pytest.warns(UserWarning, match="gradient of embedding.weight is a sum"):
        step(plan.module, model, x)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(("tied", "step"), [
    (False, _with_penalty), (False, _called_twice), (True, _penalty_first), (True, _one_after_the_other),
    (True, _alone),
])  # fmt: skip
def test_what_is_the_same_sum_has_the_same_bits_and_nothing_is_said(tied: bool, step: Callable[..., None]) -> None:
    plan, model, plain, x = _planned(tied)
    step(plain, plain, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(plan.module, model, x)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_hook_on_an_input_is_no_sum() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    model = nn.ModuleList([layer, layer])

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layers[1](self.layers[0](x)) + x).square().mean()

    plan = auto_checkpoint(Twice(), torch.randn(4, 16, requires_grad=True), progress=False)
    x = torch.eye(16, requires_grad=True).sin()[:4]
    x.register_hook(lambda gradient: gradient * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.module(x).backward()


def test_an_input_that_is_read_outside_too_is_said() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + F.gelu(self.layer(x))).square().mean()

    weight = torch.eye(16, requires_grad=True)
    plan = auto_checkpoint(Residual(), torch.randn(4, 16, requires_grad=True), progress=False)
    x = torch.randn(4, 16) @ weight
    with pytest.warns(UserWarning, match="a sum"):
        (plan.module(x) + x.square().sum()).backward()


class Penalised(nn.Module):
    """Returns what it reads twice itself: a view where its input has three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x.tanh().flatten(0, -2))
        hidden = hidden.view(x.shape) if x.dim() == 3 else hidden
        return hidden, hidden.mean() + (hidden.mean(-1) * 1.7).sum()


def _changed_in_place(call: Callable[..., Any], x: torch.Tensor, part: bool) -> None:
    hidden, penalty = call(x)
    (hidden[0] if part else hidden).mul_(0.5)
    (hidden.exp().mean() + penalty).backward()


@pytest.mark.parametrize("part", [True, False])
@pytest.mark.parametrize("shape", [(4, 9, 16), (36, 16)], ids=["view", "own memory"])
def test_a_result_that_is_read_and_changed_in_place_is_said_where_it_is_a_view(shape: Any, part: bool) -> None:
    torch.manual_seed(0)
    model, x = Penalised(), torch.randn(*shape)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, check=False)
    _changed_in_place(plain, x, part)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _changed_in_place(plan.module, x, part)
    gradients = [(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True)]
    if len(shape) == 3:
        assert any("changed in place" in str(w.message) for w in told)
        for pair in gradients:
            torch.testing.assert_close(*pair)
    else:
        assert not any("changed in place" in str(w.message) for w in told)
        assert all(torch.equal(*pair) for pair in gradients)


def _by_name(call: Call, model: nn.Module, x: torch.Tensor) -> None:
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(call(x) + _penalty(model), list(model.parameters())), strict=True
    ):
        parameter.grad = gradient


@pytest.mark.parametrize("step", [_with_penalty, _by_name])
def test_no_hook_stays(step: Callable[..., None]) -> None:
    """Someone may hold the nodes of parameters from step to step, as DDP does."""
    plan, model, _, x = _planned(tied=True)
    held = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    with pytest.warns(UserWarning, match="a sum"):
        step(plan.module, model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _penalty(model).backward()
    assert not any(p._backward_hooks for p in model.parameters())
    del held
