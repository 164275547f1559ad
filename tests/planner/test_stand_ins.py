"""Names that forward reads and that are rebound to what runs a plan: to forward, that is the model."""

from __future__ import annotations

import copy
import importlib
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from passes.trace.expected import stood_for
from planner import Plan
from tests.planner.steps import assert_same_gradients, plan, squares
from tests.planner.test_loop import counted_replans
from tests.test_layers import MODULES

HELD: dict[str, Any] = {}
model: Any = None  # as a script names it: `model = plan.module`


class Stack(nn.Module):
    """Forward says `model`, which is an attribute, so that the global of that name counts as read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squares(self.model(x))


def scaled(h: torch.Tensor) -> torch.Tensor:
    return h if model is None else h * model.factor


class Helped(Stack):
    """A helper reads the global."""

    factor = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(scaled(x))


class Listed(Stack):
    """Forward reads it from containers."""

    factor = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * HELD["one"].factor * HELD["all"][0].factor)


def penalised(loss: torch.Tensor) -> torch.Tensor:
    return loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


@contextmanager
def known_as(value: Any) -> Iterator[None]:
    """Let every name lead to `value` in the block."""
    global model
    before, model = model, value
    HELD.update(one=value, all=[value])
    try:
        yield
    finally:
        model = before
        HELD.update(one=before, all=[before])


def plain_step(own: nn.Module, x: torch.Tensor, loss_fn: Callable[..., Any] | None) -> nn.Module:
    plain = copy.deepcopy(own)
    plain.zero_grad()
    with known_as(plain):
        (loss_fn or torch.Tensor.sum)(plain(x)).backward()
    return plain


def same_step(made: Plan, own: nn.Module, x: torch.Tensor, loss_fn: Callable[..., Any] | None = None) -> None:
    own.zero_grad()
    made.module(x).backward()
    assert_same_gradients(own, plain_step(own, x, loss_fn))


@pytest.mark.parametrize("regions", ["whole", ["model"]])
@pytest.mark.parametrize(("kind", "loss_fn"), [(Stack, None), (Helped, None), (Listed, None), (Stack, penalised)])
def test_a_name_rebound_to_the_planned_module_is_the_model(kind: type[Stack], loss_fn: Any, regions: Any) -> None:
    own, x = kind(), torch.randn(4, 8)
    with known_as(own):
        made = plan(own, x, loss_fn=loss_fn, regions=regions)
    replans = counted_replans(made)
    with known_as(made.module):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                same_step(made, own, x, loss_fn)
        assert not replans
        with pytest.warns(UserWarning, match="planning anew"):
            same_step(made, own, x[:3], loss_fn)
        for rows in (3, 4, 3):
            same_step(made, own, x[:rows], loss_fn)
    assert len(replans) == 1


def test_what_is_read_through_the_planned_module_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    own, x = Helped(), torch.randn(4, 8)
    with known_as(own):
        made = plan(own, x, regions="whole")
    replans = counted_replans(made)
    with known_as(made.module):
        same_step(made, own, x)
        monkeypatch.setattr(Helped, "factor", 3.0)
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same_step(made, own, x)
        assert len(replans) == 1
        own.factor = 0.5
        with pytest.warns(UserWarning, match="factor"):
            same_step(made, own, x)
    assert len(replans) == 2


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("regions", ["whole", ["model"]])
def test_a_submodule_that_runs_a_plan_of_its_own_is_the_submodule(regions: Any, applied: bool) -> None:
    own, x = Stack(), torch.randn(4, 8)
    made, inner = plan(own, x, regions=regions), plan(own.model, x, regions="whole")
    if applied:
        inner.apply()
    else:
        own.model = inner.module
    plain = Stack()
    plain.load_state_dict(own.state_dict())
    for _ in range(2):
        own.zero_grad()
        made.module(x).backward()
        assert_same_gradients(own, plain_step(plain, x, None))
    with pytest.warns(UserWarning, match="module that runs a plan.* run in eager"):
        made.module(x[:3])


def classes_that_run_a_plan() -> list[type]:
    named = (name for name, path in MODULES.items() if "runs_plan = True" in path.read_text("utf-8"))
    modules = map(importlib.import_module, named)
    found = {c for m in modules for c in vars(m).values() if isinstance(c, type) and vars(c).get("runs_plan")}
    return sorted(found, key=lambda c: c.__name__)


def test_all_that_runs_a_plan_tells_what_it_stands_for() -> None:
    kinds = classes_that_run_a_plan()
    names = ["HollowForward", "PlannedForward", "PlannedModule", "RegionForward", "_LookedAt"]
    assert [kind.__name__ for kind in kinds] == names
    for kind in kinds:
        assert isinstance(getattr(kind, "stands_for", None), types.FunctionType), kind
    own = Stack()
    made = plan(own, torch.randn(4, 8))
    assert stood_for(made.module) is own and stood_for(own) is own
    made.apply()
    assert repr(stood_for(own.forward)) == "nothing"
    made.remove()
    before = own.forward = own.forward
    made.apply()
    assert stood_for(own.forward) is before
