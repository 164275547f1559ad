"""What autograd would call with no gradient, and eager does not: hooks, and custom functions before the model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from planner import Plan, PlannerError, auto_checkpoint
from tests.planner.steps import assert_same_gradients


class Scaled(torch.autograd.Function):
    """Called with no gradient it would make one of zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = Scaled.apply(x, self.weight)
        return scaled


class TwoHeads(nn.Module):
    """Its last output alone needs the second input."""

    def __init__(self, scalar: bool) -> None:
        super().__init__()
        self.first, self.second, self.scalar = nn.Linear(8, 8), nn.Linear(8, 8), scalar

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, other = self.first(x).tanh(), self.second(y).tanh()
        return hidden.square().mean(), hidden, other.mean() if self.scalar else other


class WithEncoder(nn.Module):
    """By regions: a custom function lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.heads = Encoder(), TwoHeads(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.heads(x * 2, self.encoder(x))[0]
        return loss


def planned(scalar: bool) -> tuple[Plan, nn.Module, nn.Module]:
    """The first output is where the backward is expected to start from; both, where both are scalars."""
    torch.manual_seed(0)
    model = TwoHeads(scalar)
    plain = copy.deepcopy(model)
    sample = tuple(torch.randn(4, 8).requires_grad_() for _ in range(2))
    return auto_checkpoint(model, sample, progress=False, check=False), model, plain


def backward(module: nn.Module, encoder: nn.Module) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 8).requires_grad_()
    module(x * 1, encoder(x))[0].backward()


def test_a_custom_function_before_the_model_is_not_called_with_no_gradient() -> None:
    plan, model, plain = planned(False)
    encoders = Encoder(), Encoder()
    for module, encoder in zip((plan.module, plain), encoders, strict=True):
        backward(module, encoder)
    assert_same_gradients(model, plain)
    assert [encoder.weight.grad for encoder in encoders] == [None, None]  # it was zeros


def test_a_custom_function_between_regions_is_not_called_with_no_gradient() -> None:
    torch.manual_seed(0)
    model, x = WithEncoder(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, check=False, regions="heads")
    for module in (plan.module, plain):
        module(x).backward()
    assert [run.path for run in plan.runs] == ["heads"]
    assert_same_gradients(model, plain)


def test_a_hook_is_not_called_with_no_gradient() -> None:
    plan, model, plain = planned(False)
    for module, owner in ((plan.module, model), (plain, plain)):
        handle = owner.get_parameter("second.weight").register_hook(lambda gradient: gradient * 2)
        backward(module, nn.Identity())
        handle.remove()
    assert_same_gradients(model, plain)


@pytest.mark.filterwarnings("ignore:planning anew")
def test_a_plan_that_a_backward_passes_without_gradients_can_still_have_its_own() -> None:
    plan, model, plain = planned(False)
    before = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    plain_before, first = copy.deepcopy(before), auto_checkpoint(before, torch.randn(4, 8), progress=False, check=False)
    for module, encoder in ((plan.module, first.module), (plain, plain_before)):
        torch.manual_seed(1)
        x = torch.randn(4, 8).requires_grad_()
        encoded = encoder(x.detach())
        module(x * 1, encoded)[0].backward()
        encoded.square().sum().backward()
    assert_same_gradients(model, plain)
    assert_same_gradients(before, plain_before)


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_a_replay_that_would_call_one_is_refused_and_the_next_call_is_planned_for_it(hook: bool) -> None:
    plan, model, plain = planned(True)
    encoders = (nn.Identity(), nn.Identity()) if hook else (Encoder(), Encoder())
    if hook:
        for owner in (model, plain):
            owner.get_parameter("second.weight").register_hook(lambda gradient: gradient * 2)
    with pytest.raises(PlannerError, match="has a hook, or comes from a custom autograd function"):
        backward(plan.module, encoders[0])
    for module, encoder in zip((plan.module, plain), encoders, strict=True):
        backward(module, encoder)
    assert_same_gradients(model, plain)
    assert_same_gradients(*encoders)


def test_a_hook_after_accumulation_is_not_called_where_there_is_no_gradient() -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]), torch.randn(3, 6)
    model.forward = lambda x: (model[0](x).sin().mean(), model[1](x).sin().mean())  # type: ignore[method-assign]
    called: list[Any] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(called.append)
    planned = auto_checkpoint(model, x, None, progress=False).module
    for i in (0, 1, 0):
        called.clear()
        planned(x)[i].backward()
        assert len(called) == 2 and set(called) == set(model[i].parameters())


@pytest.mark.parametrize("after", [False, True], ids=["hook", "post_accumulate"])
@pytest.mark.parametrize("draws", [False, True])
def test_hooks_of_parameters_that_draw_random_numbers_are_told(draws: bool, after: bool) -> None:
    """They are called in another order than in eager, so that each draws what another one draws there."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
    model, x = nn.Sequential(*layers), torch.randn(32, 16)
    plan = auto_checkpoint(model, x, progress=False)

    def noise(gradient: torch.Tensor) -> torch.Tensor:
        return gradient + (torch.randn_like(gradient) if draws else 1)

    def accumulated(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = noise(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(accumulated) if after else parameter.register_hook(noise)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            plan.module(x).square().mean().backward()
    assert ["random numbers are drawn" in str(each.message) for each in said] == [True] * draws
