"""What messages say: what changed by its name and shape, what stopped a call before what was so all along."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from passes.printable import shown
from planner import BudgetError
from tests.planner.steps import assert_same_gradients, batch, plan, squares
from tests.planner.test_quantized import Adapted, Int8


@dataclass
class Holder:
    held: Any


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.full((2, 3), 7.25), "Tensor (2, 3) float32"),
        ([torch.full((2,), 7.25), None], "[Tensor (2,) float32, None]"),
        ({"a": (nn.Parameter(torch.full((2,), 7.25)),)}, "{'a': (Parameter (2,) float32,)}"),
        (Holder([torch.full((2,), 7.25)]), "Holder(held=[Tensor (2,) float32])"),
        (numpy.full((2, 3), 7.25), "ndarray (2, 3) float64"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, ...]"),
        ([object(), nn.Linear(2, 2), len, Holder], "[an object, a Linear, len, Holder]"),
    ],
)
def test_values_are_shown_without_what_tensors_hold(value: Any, text: str) -> None:
    assert shown(value) == text
    assert repr(torch.full((1,), 7.25)) == "tensor([7.2500])"


def test_no_value_is_shown_at_length() -> None:
    assert len(shown("x" * 1000)) <= 80 and len(shown(Holder("x" * 1000))) == 80
    with pytest.raises(BudgetError, match=r"budget_mb=Tensor \(1,\) float32 is not a number of MiB"):
        plan(nn.Linear(8, 8), batch(), torch.full((1,), 7.25))  # type: ignore[arg-type]


def act(h: torch.Tensor) -> torch.Tensor:
    return h.sin()


@dataclass
class Kept:
    """What a model keeps from one call to the next."""

    heads: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(1)])


class Net(nn.Module):
    """A model that keeps a tensor in a list, calls a global function, and looks at its own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept, self.scales = Kept(), [torch.full((1,), 7.25)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = act(self.second(self.first(x))) * self.scales[0]
        return h * len(vars(self)) if "extra" not in vars(self) else h


def other_act(h: torch.Tensor) -> torch.Tensor:
    return h.cos()


def told(model: nn.Module, change: Callable[[Any], Any]) -> str:
    """What is said as a model that was changed after planning is called; its step equals the plain one."""
    plain, x = copy.deepcopy(model), batch()
    plan(model, x).apply(model)
    for each in (model, plain):
        change(each)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        squares(model(x)).backward()
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)
    return "\n".join(str(warning.message) for warning in said)


def redefined(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    other_act.__qualname__ = "act"
    return lambda _: monkeypatch.setitem(globals(), "act", other_act)


def test_a_changed_list_of_tensors_is_told_by_shapes() -> None:
    said = told(Net(), lambda model: model.scales.__setitem__(0, torch.full((4, 8), 7.25)))
    assert "scales=[Tensor (4, 8) float32], the plan expects scales=[Tensor (1,) float32]." in said


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: setattr(model, "extra", 1), "got the model (Net) with extra set, the plan expects"),
        (lambda model: delattr(model, "kept"), "got the model (Net) without kept, the plan expects"),
    ],
)
def test_attributes_that_came_or_went_are_named(change: Callable[[Any], Any], text: str) -> None:
    assert text in told(Net(), change)


def test_another_definition_of_one_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(Net(), redefined(monkeypatch))
    assert "with act=act (another definition, object or content of that name), the plan expects the one before." in said
    renamed = types.new_class("Net", (Net,))
    said = told(Net(), lambda model: setattr(model, "__class__", renamed))
    assert "got a Net (another definition, object or content of that name), the plan expects the one before." in said


def test_a_weight_of_another_class_is_named() -> None:
    def quantize(model: Any) -> None:
        base = model[1].base
        base.weight = nn.Parameter(Int8.of(base.weight.detach()), requires_grad=False)

    model = nn.Sequential(*(Adapted(8) for _ in range(2)))
    for layer in model:
        layer.base.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    assert "argument '1.base.weight': got an Int8, the plan expects a plain tensor." in told(model, quantize)


class Asks(nn.Module):
    """A model that is planned by regions, as it asks for a value, with batch norms that want several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 1e9:
            raise RuntimeError
        for block in self.blocks:
            x = x + block(x)
        return x


def test_what_stopped_a_call_by_regions_is_said_first() -> None:
    model = Asks()
    plan(model, batch()).apply(model)
    with pytest.warns(UserWarning, match="step not used") as said, pytest.raises(ValueError, match="per channel"):
        model(batch(1))
    text = str(said[-1].message)
    stopped, reason = text.index("ValueError: Expected more than 1 value"), text.index("cannot trace the model")
    assert text.startswith("planned step not used") and stopped < reason
    assert "cannot be planned as a whole" in text[:reason] and "test_texts.py" in text[:reason]


def test_places_that_forward_sets_are_told_at_once() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.given = types.SimpleNamespace(x=x)
            return x / x.abs().amax()

    model = nn.Sequential(nn.Linear(8, 8), *(Scale() for _ in range(9)))
    with pytest.warns(UserWarning, match="forward sets") as said:
        plan(model, batch())
    (text,) = (str(each.message) for each in said)
    assert text.startswith("forward sets self.1.given, self.2.given, self.3.given, self.4.given and 5 more; ")


@pytest.mark.parametrize("regions", ["whole", "*"])
def test_anomaly_mode_names_the_parameter(regions: str) -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))), batch()
    ours, nan = plan(model, x, regions=regions).module, x.clone().fill_(torch.nan)
    with warnings.catch_warnings(record=True) as said, torch.autograd.detect_anomaly():
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="PlannedGradientsBackward' returned nan"):
            (ours(nan) * torch.ones(4, 8)).sum().backward()
        (ours(x) * torch.ones(4, 8)).sum().backward()
    texts = [str(each.message) for each in said if "planned step computed NaN" in str(each.message)]
    assert len(texts) == 1 and "in the gradient of 2.0." in texts[0]
