"""A model and its batches go with the last name that leads to them: nothing waits for the cycle collector."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from planner import BudgetError, CaptureError, InputMismatch, PlannerError
from tests.planner.steps import batch, plan, squares

Use = Callable[[nn.Module, torch.Tensor], Any]


def blocks(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)), *more)


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.mean().item()


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such batch")


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def runs(regions: Any) -> Use:
    def use(model: nn.Module, x: torch.Tensor) -> None:
        made = plan(model, x, regions=regions, check=False)
        for _ in range(2):
            squares(made.module(x)).backward()

    return use


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("use", [runs("whole"), runs(["*"])], ids=["whole", "regions"])
def test_a_plan_that_ran_is_freed(use: Use) -> None:
    model, x = blocks(), batch()
    gone = weakref.ref(model)
    use(model, x)
    del model
    assert gone() is None


def called_with(rows: int, share: str | None = None, **options: Any) -> Use:
    return lambda model, x: plan(model, x, share, **options).module(x.repeat(rows, 1))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], nn.Module], Use, type[PlannerError]]] = {
    "budget": (blocks, lambda m, x: plan(m, x, 1e-4, regions="whole"), BudgetError),
    "budget of regions": (blocks, lambda m, x: plan(m, x, 1e-4, regions=["*"]), BudgetError),
    "budget under hints": (blocks, lambda m, x: plan(m, x, 1e-4, regions="whole", save=["0.0"]), BudgetError),
    "budget of the update": (blocks, lambda m, x: plan(m, x, 1e-4, optimizer=torch.optim.AdamW), BudgetError),
    "budget of a later call": (blocks, called_with(20, "95%", regions="whole"), BudgetError),
    "another batch": (blocks, called_with(2, on_new_shape="error"), InputMismatch),
    "the whole": (lambda: blocks(Asks()), lambda m, x: plan(m, x, regions="whole"), CaptureError),
    "the whole and its regions": (lambda: nn.Sequential(nn.Linear(8, 8), Asks()), plan, CaptureError),
    "forward": (lambda: blocks(Fails()), plan, CaptureError),
    "forward between regions": (lambda: blocks(Fails()), lambda m, x: plan(m, x, regions=["0"]), CaptureError),
}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.every(1)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_freed(case: str) -> None:
    make, use, kind = REFUSED[case]
    model = make()
    gone, refused = weakref.ref(model), False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            use(model, batch())
        except kind:
            refused = True
    del model
    assert refused
    assert gone() is None
