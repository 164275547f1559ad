"""Calls whose arguments hold more than tensors: what forward reads there decides which plan holds."""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from planner import InputMismatch, auto_checkpoint

X = torch.linspace(-1, 1, 32).view(4, 8)


@dataclass
class Batch:
    x: Any
    scale: Any = 1.0
    names: list[str] = field(default_factory=list)

    def scaled(self) -> Any:
        return self.x * self.scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Computed:
    """Answers from a dict that it holds."""

    def __init__(self, scale: float) -> None:
        self.held = {"scale": scale}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None


class Optional:
    def __init__(self, scale: float) -> None:
        self.x = X
        if scale != 1:
            self.scale = scale


class Reader(nn.Module):
    """Computes with what `read` takes from the arguments."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.read, self.first, self.second = read, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *given: Any) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(self.read(*given))))).sum()


CASES: dict[str, tuple[Any, Any]] = {
    "dataclass": (lambda s: (Batch(X, s),), lambda b: b.x * b.scale),
    "method": (lambda s: (Batch(X, s),), lambda b: b.scaled()),
    "beside a tensor in a dict": (lambda s: (Batch({"x": X, "scale": s}),), lambda b: b.x["x"] * b.x["scale"]),
    "object without tensors": (lambda s: (X, Batch(None, s)), lambda x, b: x * b.scale),
    "in an object": (lambda s: (Batch(X, Batch(None, s)),), lambda b: b.x * b.scale.scale),
    "in an object that has the tensor": (lambda s: (Batch(Batch(X, s)),), lambda b: b.x.x * b.x.scale),
    "deep in containers": (lambda s: (Batch(X, {"a": [Batch(None, s)]}),), lambda b: b.x * b.scale["a"][0].scale),
    "in a list of objects": (lambda s: ([Batch(X), Batch(None, s)],), lambda b: b[0].x * b[1].scale),
    "slots": (lambda s: (X, Slotted(s)), lambda x, b: x * b.scale),
    "computed": (lambda s: (X, Computed(s)), lambda x, b: x * b.scale),
    "missing": (lambda s: (Optional(s),), lambda b: b.x * (b.scale if hasattr(b, "scale") else 7.0)),
    "vars": (lambda s: (Batch(X, s),), lambda b: vars(b)["x"] * vars(b)["scale"]),
    "namespace": (lambda s: (SimpleNamespace(x=X, scale=s),), lambda b: b.x * b.scale),
    "UserDict": (lambda s: (UserDict(x=X, scale=s),), lambda b: b["x"] * b["scale"]),
    "partial": (lambda s: (X, partial(torch.mul, other=s)), lambda x, f: f(x)),
}  # fmt: skip


@pytest.mark.parametrize("regions", ["whole", "0"])
@pytest.mark.parametrize("case", CASES)
def test_what_forward_reads_of_an_argument_decides_which_plan_holds(case: str, regions: str) -> None:
    make, read = CASES[case]
    model: nn.Module = Reader(read) if regions == "whole" else _Around(Reader(read))
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto_checkpoint(model, make(1.0), regions=regions, check=False, progress=False).apply(model)
        for scale in (1.0, 2.0, 1.0, 3.0, 2.0):
            assert torch.equal(model(*make(scale)), twin(*make(scale))), scale
    plans = model.forward.state.cache
    assert len(plans) <= 3  # calls like earlier ones find their plans again


class _Around(nn.Sequential):
    def forward(self, *given: Any) -> torch.Tensor:
        return 2 * self[0](*given)


def test_one_object_given_again_with_another_setting() -> None:
    model, setting = Reader(lambda x, b: x * b.scale), Batch(None, 1.0)
    twin = copy.deepcopy(model)
    auto_checkpoint(model, (X, setting), progress=False).apply(model)
    setting.scale = 3.0
    with pytest.warns(UserWarning, match=r"with scale=3.0, the plan expects scale=1.0"):
        assert torch.equal(model(X, setting), twin(X, setting))


def test_an_error_names_the_attribute() -> None:
    model = Reader(lambda b: b.x * b.scale)
    module = auto_checkpoint(model, (Batch(X),), on_new_shape="error", progress=False).module
    with pytest.raises(InputMismatch, match=r"given\[0\] \(Batch\) with scale=2.0, the plan expects scale=1.0"):
        module(Batch(X, 2.0))


def test_what_forward_does_not_read_costs_no_plan() -> None:
    model = Reader(lambda b: b.x * b.scale)
    module = auto_checkpoint(model, (Batch(X, names=["a"]),), on_new_shape="error", progress=False).module
    for name in "bcd":
        module(Batch(X, names=[name]))


scale = 1  # a global that is called like an attribute which forward reads


def test_a_global_called_like_an_attribute_costs_no_plan() -> None:
    global scale
    model = Reader(lambda b: b.x * b.scale)
    module = auto_checkpoint(model, (Batch(X, 2.0),), on_new_shape="error", progress=False).module
    for scale in range(4):  # noqa: B007 - the global is what is changed
        module(Batch(X, 2.0))
