"""What is trained and is not the model's: planning and checks leave its optimizers, hooks and graphs alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner import auto_checkpoint

WIDTH = 16
WAYS: list[dict[str, Any]] = [{"check": False}, {"check": True}, {"regions": ["*"], "check": False}]


class _Loss:
    """A head of its own, trained by an optimizer in a hook, and a hook that counts."""

    def __init__(self) -> None:
        self.head = nn.Linear(WIDTH, 1)
        self.optimizer = torch.optim.Adam(self.head.parameters())
        self.heard = 0
        self.head.bias.register_hook(self.hear)
        self.head.weight.register_post_accumulate_grad_hook(self.train)

    def hear(self, gradient: torch.Tensor) -> torch.Tensor:
        self.heard += 1
        return gradient / self.heard

    def train(self, parameter: torch.Tensor) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self, out: torch.Tensor) -> torch.Tensor:
        return self.head(out).pow(2).mean()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
    return nn.Sequential(*parts)


def _batch(i: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))


@pytest.mark.every(1)
@pytest.mark.parametrize("options", WAYS)
def test_a_losss_own_parameters_are_trained_as_often(options: dict[str, Any]) -> None:
    found = []
    for planned in (False, True):
        model = _model()
        loss = _Loss()
        step: Callable[..., Any] = lambda x, m=model, f=loss: f(m(x))  # noqa: E731
        if planned:
            step = auto_checkpoint(model, _batch(0), 8, loss_fn=loss, progress=False, **options).module
        for i in range(3):
            step(_batch(i)).backward()
        state = loss.optimizer.state[loss.head.weight]["step"]
        found.append([*loss.head.parameters(), *(p.grad for p in model.parameters()), state, torch.tensor(loss.heard)])
    assert all(map(torch.equal, *found))


@pytest.mark.every(1)
@pytest.mark.parametrize("options", WAYS)
def test_graphs_from_before_the_step_are_not_freed(options: dict[str, Any]) -> None:
    """A bias that a hypernetwork makes: the loop's backward goes through it."""
    found = []
    for planned in (False, True):
        model = _model()
        hyper = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        calls: list[None] = []
        del model[0][0].bias
        call: Callable[..., Any] = model
        for i in range(3):
            model[0][0].bias = bias = hyper(torch.ones(4) * i)
            bias.register_hook(lambda g, calls=calls: calls.append(None))
            if planned and not i:
                call = auto_checkpoint(model, _batch(0), 8, progress=False, **options).module
            call(_batch(i)).pow(2).mean().backward()
        parameters = (*model.parameters(), *hyper.parameters())
        found.append([*(p.grad for p in parameters if p.grad is not None), torch.tensor(len(calls))])
    assert all(map(torch.equal, *found))


class _Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.extra = _model(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out if self.extra is None else out * self.extra


def test_a_later_call_that_is_refused_runs_in_eager() -> None:
    model = _Extra()
    plan = auto_checkpoint(model, _batch(0), 8, regions="whole", progress=False)
    plan.module(_batch(0)).pow(2).mean().backward()
    model.zero_grad()
    model.extra = torch.full((WIDTH,), 0.5, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan.module(_batch(1)).pow(2).mean().backward()
    assert any("run in eager, not under the budget" in str(w.message) for w in said)
    found = [p.grad for p in model.parameters()], model.extra.grad
    model.zero_grad()
    model.extra.grad = None
    model(_batch(1)).pow(2).mean().backward()
    assert all(map(torch.equal, found[0], (p.grad for p in model.parameters())))
    assert torch.equal(found[1], model.extra.grad)


@pytest.mark.parametrize("regions", ["whole", ["*"]])
def test_parameters_can_be_swapped(regions: Any) -> None:
    """Torch refuses that for what has weak references."""
    model = _model()
    plan = auto_checkpoint(model, _batch(0), 8, regions=regions, progress=False)
    plan.module(_batch(0)).pow(2).mean().backward()
    model.zero_grad()
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        torch.__future__.set_swap_module_params_on_conversion(True)
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    with pytest.warns(UserWarning, match="planning anew"):
        plan.module(_batch(1).double()).pow(2).mean().backward()
