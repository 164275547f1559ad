"""Custom autograd functions whose backward runs modules of the model: adjoints of ODEs, reversible nets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from passes.errors import Unsupported
from planner import PlannerError, auto_checkpoint
from tests.zoo.compare import differences, run_step

from .steps import assert_same_gradients, twins


class Again(torch.autograd.Function):
    """Keeps its input alone and runs the module again in its backward, as `torch.utils.checkpoint` does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module, accumulates: bool, *_: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.accumulates = module, accumulates
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
        if ctx.accumulates:
            y.backward(gradient)
            return x.grad, None, None, *(None for _ in ctx.module.parameters())
        found = torch.autograd.grad(y, [x, *ctx.module.parameters()], gradient)
        return found[0], None, None, *found[1:]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale).tanh().sin()


class Recomputing(nn.Module):
    def __init__(self, accumulates: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, 16), Scaled(), nn.Linear(16, 16)
        self.accumulates = accumulates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Again.apply(self.first(x).tanh(), self.inner, self.accumulates, *self.inner.parameters())
        return self.last(h).tanh().pow(2).mean()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recomputing() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((block(x * (i + 1)) for i, block in enumerate(self.blocks)), torch.zeros(()))


@pytest.mark.every(2)
@pytest.mark.parametrize("regions", ["whole", "blocks.*"])
def test_a_backward_that_runs_the_models_modules_is_planned(regions: str) -> None:
    model, plain = twins(Stack())
    plan = auto_checkpoint(model, torch.randn(64, 16), "95%", regions=regions, check=False, progress=False)
    trained = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for i in range(4):
        x = torch.randn(64, 16)
        if i == 2:  # read in the backward, too
            model.blocks[1].inner.scale = plain.blocks[1].inner.scale = 3.0
        losses = [m(x) for m in (plan.module, plain)]
        for loss, optimizer in zip(losses, trained, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert torch.equal(*losses)
        assert_same_gradients(model, plain)
        for optimizer in trained:
            optimizer.step()


def test_gradients_accumulated_within_a_backward_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"backward\(\) within the backward of a custom .* at inner\.layer\.weight"):
        auto_checkpoint(Recomputing(accumulates=True), torch.randn(64, 16), regions="whole", progress=False)


def test_what_a_backward_sets_otherwise_than_forward_is_refused() -> None:
    class Tells(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.graded = torch.is_grad_enabled()  # not in the function's forward, but in its backward
            return super().forward(x)

    model = Recomputing()
    model.inner = Tells()
    with pytest.raises(Unsupported, match=r"state that changes in the backward at self\.inner\.graded"):
        auto_checkpoint(model, torch.randn(4, 16), budget_mb=None, regions="whole")


def test_hooks_of_parameters_that_a_backward_differentiates_by_are_refused() -> None:
    model = Recomputing()
    model.first.weight.register_hook(lambda g: 2 * g)  # of another parameter
    plan = auto_checkpoint(model, torch.randn(4, 16), budget_mb=None, regions="whole")
    plain = copy.deepcopy(model)
    plain.first.weight.register_hook(lambda g: 2 * g)
    for each in (plan.module, plain):
        each(torch.ones(4, 16)).backward()
    assert_same_gradients(model, plain)
    model.inner.layer.weight.register_hook(lambda g: 2 * g)  # in eager it doubles the gradient twice
    with pytest.warns(UserWarning, match=r"hook of a parameter by .* at inner\.layer\.weight.* run in eager"):
        plan.module(torch.ones(4, 16))


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * torch.rand_like(gradient)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noisy, self.plain = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, NoisyGradient.apply(self.noisy.weight)).tanh() + self.plain(x).tanh()


@pytest.mark.parametrize("regions", ["whole", "0"])
def test_a_backward_that_draws_random_numbers_is_for_all_gradients(regions: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Noisy(), nn.Linear(8, 4)), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, regions=regions)
    for whole in (True, False):
        found = []
        for module, owner in ((plain, plain), (plan.module, model)):
            parameters = [p for p in owner.parameters() if p.requires_grad]
            torch.manual_seed(1)
            loss = module(x).sum()
            if whole:
                loss.backward()
            else:
                torch.autograd.grad(loss, parameters)
            found.append([*(p.grad for p in parameters), torch.get_rng_state()])
        assert all(map(torch.equal, *found))
    with pytest.raises(PlannerError, match=r"draws random numbers, and torch.autograd.grad"):
        torch.autograd.grad(plan.module(x).sum(), model[0].plain.weight)


class Partly(Noisy):
    """Has a parameter that gets no gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gate = how, nn.Parameter(torch.rand(8), requires_grad=how != "frozen")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        return {"unused": h, "frozen": h * self.gate, "detached": h * self.gate.detach()}[self.how]


@pytest.mark.every(1)
@pytest.mark.parametrize("how", ["unused", "frozen", "detached"])
@pytest.mark.parametrize("regions", ["whole", "0"])
def test_a_backward_that_draws_needs_no_gradient_of_what_gets_none(regions: str, how: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Partly(how), nn.Linear(8, 4)), torch.randn(4, 8)
    plan = auto_checkpoint(model, x, progress=False, regions=regions)
    assert differences(run_step(model, model, x), run_step(plan.module, model, x)) == []
    trained = [p for p in model.parameters() if p is not model[0].gate]
    found = []
    for module in (model, plan.module):
        torch.manual_seed(1)
        found.append([*torch.autograd.grad(module(x).sum(), trained), torch.get_rng_state()])
    assert all(map(torch.equal, *found))
    with pytest.raises(PlannerError, match=r"draws random numbers, and torch.autograd.grad"):
        torch.autograd.grad(plan.module(x).sum(), model[0].plain.weight)
