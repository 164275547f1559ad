"""Calls whose arguments hold more than tensors: what forward reads there decides; what it changes is changed."""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from planner import InputMismatch, PlannerError, Unsupported, auto_checkpoint
from tests.planner.steps import assert_same_gradients
from tests.planner.test_regions import assert_equal_and_exact, planned_at

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


# What forward changes -------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    seen: int = 0
    keys: Any = None


class Cache:
    """Grows a layer for each block that writes to it, as a cache of keys and values does."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.last = "nobody"

    def update(self, keys: torch.Tensor, index: int) -> torch.Tensor:
        while len(self.layers) <= index:
            self.layers.append(Layer())
        layer = self.layers[index]
        layer.keys = keys if layer.keys is None else torch.cat([layer.keys, keys])
        layer.seen += len(keys)
        self.last = f"block {index}"
        return layer.keys


class CachedBlock(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.keys, self.mix = index, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        keys = cache.update(torch.tanh(self.keys(x)), self.index)
        return torch.tanh(self.mix(torch.softmax(x @ keys.t(), -1) @ keys))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachedBlock(i) for i in range(3))

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> Any:
        cache = Cache() if cache is None else cache
        for block in self.blocks:
            x = block(x, cache)
        return {"loss": x.sum(), "cache": cache}


def assert_same_cache(got: Cache, wanted: Cache) -> None:
    assert got.last == wanted.last
    assert [layer.seen for layer in got.layers] == [layer.seen for layer in wanted.layers]
    for one, other in zip(got.layers, wanted.layers, strict=True):
        assert torch.equal(one.keys, other.keys)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_blocks_that_are_handed_a_cache_are_planned(share: float) -> None:
    model, x = Cached(), torch.randn(16, 8)
    plain, plan = copy.deepcopy(model), planned_at(model, x, share, regions="blocks.*")
    assert {run.path for run in plan.runs} == {"blocks.0", "blocks.1", "blocks.2"}
    caches = []

    def step(module: nn.Module) -> torch.Tensor:
        output = module(x)  # held through the backward, with the cache in it
        output["loss"].backward()
        caches.append(output["cache"])
        return output["loss"].detach()

    assert_equal_and_exact(plan, plain, step)
    assert_same_cache(*caches)


def _trained(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("regions", ["whole", "blocks.*"])
def test_a_cache_that_the_caller_holds_grows_as_in_the_plain_step(regions: str) -> None:
    model, x = Cached(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the third call has a longer cache than planned for
        auto_checkpoint(model, (x, Cache()), regions=regions, progress=False).apply(model)
        for caches in ([Cache(), Cache()], [Cache(), Cache()]):
            for _ in range(2):
                losses = [m(x, cache)["loss"] for m, cache in zip((model, plain), caches, strict=True)]
                assert torch.equal(*losses)
                assert_same_cache(*caches)
                for cache in caches:
                    for layer in cache.layers:
                        layer.keys = layer.keys.detach()
                for loss in losses:
                    loss.backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("regions", ["whole", "blocks.*"])
def test_a_replay_is_given_what_forward_was_given(regions: str) -> None:
    model, x = Cached(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("ignore")  # a backward under autocast is not planned for before it is seen
        auto_checkpoint(model, (x, Cache()), regions=regions, check=False, progress=False).apply(model)
        for _ in range(3):
            for each in (model, plain):
                each(x, Cache())["loss"].backward()
            assert_same_gradients(model, plain)


class Collecting(nn.Module):
    """Hands what it computes on in containers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor, found: list[Any], by_name: dict[str, Any]) -> torch.Tensor:
        h = self.inner(x)
        found.append(h.square().mean())
        by_name["hidden"] = {"h": h, "rows": len(h)}
        by_name.pop("old", None)
        return torch.tanh(h).sum()


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Collecting() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[Any] = []
        by_name: dict[str, Any] = {"old": 1}
        losses = [part(x, found, by_name) for part in self.parts]
        assert "old" not in by_name
        assert by_name["hidden"]["rows"] == len(x)
        return torch.stack(losses).sum() + torch.stack(found).sum() + by_name["hidden"]["h"].mean()


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_gradients_go_through_what_a_region_puts_into_its_arguments(share: float) -> None:
    model, x = Router(), torch.randn(16, 8)
    plain, plan = copy.deepcopy(model), planned_at(model, x, share, regions="parts.*")
    assert {run.path for run in plan.runs} == {"parts.0", "parts.1", "parts.2"}
    assert_equal_and_exact(plan, plain, lambda m: _trained(m(x)))


@pytest.mark.parametrize("backward", ["returned", "put", "both"])
def test_a_backward_may_start_from_what_was_put_into_an_argument(backward: str) -> None:
    model, x = Collecting(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a backward that was not planned for is replayed once
        auto_checkpoint(model, (x, [], {}), progress=False).apply(model)
        for _ in range(3):
            for each in (model, plain):
                found: list[Any] = []
                returned = each(x, found, {})
                {"returned": returned, "put": found[0], "both": returned + found[0]}[backward].backward()
            assert_same_gradients(model, plain)


def test_an_export_does_not_change_arguments_and_says_so(tmp_path: Path) -> None:
    plan = auto_checkpoint(Collecting(), (X, [], {}), progress=False)
    with pytest.raises(PlannerError, match="forward changes its argument found"):
        plan.export(tmp_path / "exported")


def test_what_cannot_be_made_anew_is_refused_by_its_place() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, found: dict[str, Any]) -> torch.Tensor:
            h = self.inner(x)
            found["later"] = partial(torch.add, h)
            return h.sum()

    with pytest.raises(Unsupported, match=r"argument changed in forward \(partial\) at found"):
        auto_checkpoint(Leaves(), (X, {}), progress=False)
