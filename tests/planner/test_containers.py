"""What a call gives and returns in containers: attributes that they hold besides, their types, and whose they are."""

from __future__ import annotations

import collections
import copy
import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from passes._torch import pytree
from planner import PlannerError, auto_checkpoint
from tests.planner.steps import plan

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


class _Pair(collections.namedtuple("_Pair", "x y")):
    """A named tuple with attributes."""


@dataclass
class _Batch:
    x: torch.Tensor
    scale: Any = 1.0


class _Node:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class _Slotted:
    __slots__ = ("mean", "rows", "scale", "x")

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


pytree.register_pytree_node(_Slotted, lambda node: ([node.x], None), lambda leaves, _: _Slotted(*leaves))
pytree.register_dataclass(_Batch, field_names=["x"], drop_field_names=["scale"])  # type: ignore[attr-defined]
pytree.register_pytree_node(_Node, lambda node: ([node.x], None), lambda leaves, _: _Node(*leaves))

MAKE: dict[str, Callable[[torch.Tensor], Any]] = {
    "OrderedDict": lambda x: collections.OrderedDict(x=x),
    "ModelOutput": lambda x: BaseModelOutput(last_hidden_state=x),
    "named tuple": lambda x: _Pair(x, 1),
    "dataclass": _Batch,
    "node": _Node,
    "node with slots": _Slotted,
}


def made(kind: str, x: torch.Tensor, scale: Any) -> Any:
    value = MAKE[kind](x)
    value.scale = scale
    return value


def x_of(value: Any) -> torch.Tensor:
    return next(iter(value.values())) if isinstance(value, dict) else value.x


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def forward(self, given: Any) -> torch.Tensor:
        return self.body(x_of(given)) * given.scale


class Makes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head, self.kind = layers(), layers(), kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        return made(self.kind, self.head(hidden), hidden.square().mean())


class Between(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.makes, self.after = Makes(kind), layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.makes(x)
        return self.after(x_of(found)).square().mean() + found.scale


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def assert_equal(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> None:
    assert all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", MAKE)
def test_an_attribute_of_an_argument(kind: str) -> None:
    model = Reads()
    plain = copy.deepcopy(model)
    chosen = plan(model, (made(kind, X, 5.0),), recompute=["*"])
    for scale in (5.0, 7.0):
        assert torch.equal(chosen.module(made(kind, X, scale)), plain(made(kind, X, scale)))


@pytest.mark.parametrize("kind", MAKE)
def test_an_attribute_of_what_is_returned(kind: str) -> None:
    model = Makes(kind)
    plain = copy.deepcopy(model)
    chosen = plan(model, X, recompute=["*"])
    for own, run in ((plain, plain), (model, chosen.module)):
        found = run(X)
        assert type(found) is type(MAKE[kind](X))
        (x_of(found).square().mean() + found.scale).backward()
        assert own.body[0].weight.grad is not None
    assert_equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("kind", MAKE)
def test_an_attribute_of_what_a_region_returns(kind: str) -> None:
    model = Between(kind)
    plain = copy.deepcopy(model)
    chosen = plan(model, X, regions=["makes", "after"], recompute=["*"], check=False)
    for run in (plain, chosen.module):
        run(X).backward()
    assert_equal(gradients(model), gradients(plain))


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def forward(self, given: Any) -> torch.Tensor:
        found = self.body(x_of(given))
        given.mean, given.rows = found.detach().mean(), len(found)
        return found


@pytest.mark.parametrize("kind", MAKE)
def test_an_attribute_that_forward_sets_on_an_argument(kind: str) -> None:
    model = Writes()
    plain = copy.deepcopy(model)
    chosen = plan(model, (made(kind, X, 1.0),), recompute=["*"])
    for _ in range(2):
        given = [made(kind, X, 1.0) for _ in range(2)]
        plain(given[0])
        chosen.module(given[1])
        names = [[n for n in (*dir(each), "mean", "rows") if hasattr(each, n)] for each in given]
        assert names[0] == names[1]
        assert torch.equal(given[0].mean, given[1].mean) and given[0].rows == given[1].rows


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def forward(self, x: torch.Tensor, size: Any) -> Any:
        assert type(size) is torch.Size
        return self.body(x) * size.numel(), [x.shape]


def test_sizes_stay_sizes() -> None:
    model = Sizes()
    chosen = plan(model, (X, X.shape), recompute=["*"])
    for run in (model, chosen.module):
        value, (shape,) = run(X, X.shape)
        assert type(shape) is torch.Size and shape == (16, 8)
    assert torch.equal(value, model(X, X.shape)[0])


# What is the model's own ----------------------------------------------------------------------------------------------


class Held:
    def __init__(self) -> None:
        self.scale, self.table = 1.0, torch.ones(8)


OWN: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], None]]] = {
    "dict": (lambda: {"scale": 1.0}, lambda own: own["scale"], lambda own: own.update(scale=2 * own["scale"])),
    "list": (lambda: [1.0], lambda own: own[0], lambda own: own.__setitem__(0, 2 * own[0])),
    "tensors": (
        lambda: [torch.ones(8)], lambda own: own[0], lambda own: own.__setitem__(0, 2 * own[0])
    ),
    "object": (Held, lambda own: own.scale * own.table, lambda own: setattr(own, "scale", 2 * own.scale)),
}  # fmt: skip


class Owns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.own, self.log = layers(), OWN[kind][0](), list[int]()
        self.read = OWN[kind][1]

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x) * self.read(self.own), self.own, {"log": self.log}


@pytest.mark.filterwarnings("ignore:planning anew")
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("regions", ["whole", ["0", "1"]])
def test_what_is_the_models_own_is_returned_itself(kind: str, regions: Any) -> None:
    model = Owns(kind)
    whole: Any = model if regions == "whole" else _Pipe(model)
    plain = copy.deepcopy(whole)
    chosen = plan(whole, X, regions=regions, recompute=["*"], check=False)
    for step in range(3):
        found, expected = chosen.module(X), plain(X)
        assert torch.equal(found[0], expected[0]), step
        assert found[1] is model.own and found[2]["log"] is model.log
        for each in (found, expected):
            OWN[kind][2](each[1])
            each[2]["log"].append(step)
    model.own = OWN[kind][0]()  # another one
    assert chosen.module(X)[1] is model.own


class _Pipe(nn.Module):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.add_module("0", owner)
        self.add_module("1", layers())

    def forward(self, x: torch.Tensor) -> Any:
        found, *others = self.get_submodule("0")(x)
        return self.get_submodule("1")(found), *others


def test_a_copy_of_the_model_returns_its_own() -> None:
    model = Owns("dict")
    chosen = plan(model, X, recompute=["*"], check=False)
    other = copy.deepcopy(model)
    chosen.apply(other)
    assert other(X)[1] is other.own is not model.own


def test_of_what_is_in_two_places_the_one_that_forward_reads_counts() -> None:
    class Twice(Owns):
        def __init__(self) -> None:
            super().__init__("dict")
            self.body.also = self.own

    model = Twice()
    chosen = plan(model, X, recompute=["*"], check=False)
    model.body.also = {"scale": 3.0}
    assert chosen.module(X)[1] is model.own


TABLE = {"scale": 1.0}


def _in_an_object(self: Any, y: torch.Tensor) -> Any:
    return types.SimpleNamespace(y=y, own=self.own)


def _of_a_global(self: Any, y: torch.Tensor) -> Any:
    return types.SimpleNamespace(y=y, own=TABLE)


def _an_array(self: Any, y: torch.Tensor) -> Any:
    return types.SimpleNamespace(y=y, own=self.array)


class Wraps(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.body, self.own, self.array, self.wrap = layers(), {"scale": 1.0}, numpy.ones(1), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self, self.body(x) * self.own["scale"] * TABLE["scale"] * float(self.array[0]))


@pytest.mark.filterwarnings("ignore:planning anew")
@pytest.mark.parametrize("wrap", [_in_an_object, _of_a_global, _an_array])
def test_within_what_forward_makes(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = plan(Wraps(wrap), X, recompute=["*"], check=False)
    model = copy.deepcopy(chosen.module._plan_state.model)
    chosen.apply(model)
    for step in range(3):
        found = model(X)
        own = model.array if wrap is _an_array else TABLE if wrap is _of_a_global else model.own
        assert found.own is own
        expected = model.body(X) * model.own["scale"] * TABLE["scale"] * float(model.array[0])
        assert torch.equal(found.y, expected), step
        if wrap is _an_array:
            own[0] = step + 2
        else:
            monkeypatch.setitem(own, "scale", step + 2.0)


class _Given:
    scale = 1.0


def test_an_argument_within_what_forward_makes() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = layers()

        def forward(self, x: torch.Tensor, given: Any) -> Any:
            return types.SimpleNamespace(y=self.body(x), given=given)

    chosen = plan(Passes(), (X, _Given()), recompute=["*"])
    other = _Given()
    assert chosen.module(X, other).given is other


# Exports --------------------------------------------------------------------------------------------------------------


def test_an_export_has_a_copy_of_what_is_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = auto_checkpoint(Owns("dict"), X, recompute=["*"], progress=False, regions="whole")
    chosen.export(tmp_path / "exported_owner")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = importlib.import_module("exported_owner").load()
    assert loaded(X)[1:] == ({"scale": 1.0}, {"log": []})
    with pytest.raises(PlannerError, match=r"forward returns self\.own, with tensors that are not registered"):
        plan(Owns("tensors"), X, regions="whole", check=False).export(tmp_path / "tensors")


def test_an_export_refuses_attributes_of_containers(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="what forward returns holds a BaseModelOutput with the attribute 'scale'"):
        plan(Makes("ModelOutput"), X, regions="whole").export(tmp_path / "folder")
