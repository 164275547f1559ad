"""Calls whose arguments hold more than tensors: what forward reads there decides; what it changes is changed."""

from __future__ import annotations

import copy
import inspect
import itertools
import time
import warnings
from collections import OrderedDict, UserDict, deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from passes.trace.binding import bind_call, binder
from passes.trace.structure import flatten
from planner import InputMismatch, PlannerError, Unsupported, auto_checkpoint
from planner.dropin.apply import blank_sample
from planner.dropin.plan_key import Look, call_key
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


@pytest.mark.every(3)
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


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("key", ["loss", "hidden"])
def test_a_forward_may_leave_all_that_it_computes_in_an_argument(key: str, returned: bool) -> None:
    class Leaving(Reader):
        def forward(self, batch: Any) -> Any:
            batch["hidden"] = torch.tanh(self.second(torch.tanh(self.first(batch["x"]))))
            batch["loss"] = batch["hidden"].pow(2).sum()
            return batch if returned else None

    torch.manual_seed(0)
    model = Leaving(None)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, ({"x": X},), recompute=["*"], check=True)
    assert "4 gradients" in str(plan.checked)
    for scale in (1.0, 2.0):
        ours, theirs = {"x": X * scale}, {"x": X * scale}
        assert (plan.module(ours) is ours) == returned
        plain(theirs)
        assert list(ours) == list(theirs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backward that starts elsewhere
            ours[key].sum().backward()
        theirs[key].sum().backward()
        assert torch.equal(ours[key], theirs[key])
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


# What is one thing in several places ----------------------------------------------------------------------------------


class Doing(nn.Module):
    """Runs `do` on what it computes of its first argument and on the others; by its result, or a loss of its own."""

    def __init__(self, do: Any) -> None:
        super().__init__()
        self.do, self.first, self.second = do, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *given: Any) -> Any:
        h = torch.tanh(self.first(x))
        result = self.do(h, *given)
        loss = self.second(result if isinstance(result, torch.Tensor) else h).sum()
        return {"loss": loss, "result": result}


class AroundDoing(nn.Module):
    def __init__(self, do: Any) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), Doing(do)

    def forward(self, x: torch.Tensor, *given: Any) -> Any:
        return self.inner(torch.tanh(self.before(x)), *given)


def told(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """A value with all that it holds; what was met before is told by its number, as the same thing again."""
    if isinstance(value, (int, float, str, type(None))):
        return value
    if id(value) in seen:
        return "again", seen[id(value)][0]
    seen[id(value)] = len(seen), value
    if isinstance(value, torch.Tensor):
        return value.requires_grad, value.tolist()
    if isinstance(value, dict):
        return type(value), [(k, told(v, seen)) for k, v in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [told(v, seen) for v in value]
    if isinstance(value, set):
        return sorted(value)
    held = vars(value) if hasattr(value, "__dict__") else {name: getattr(value, name) for name in value.__slots__}
    return type(value), [(name, told(each, seen)) for name, each in held.items()]


class Held:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def _twice(value: Any) -> tuple[Any, Any]:
    return value, value


def _new_ring(h: torch.Tensor, b: Any) -> None:
    b.ring = Held(h=h)
    b.ring.next, b.rings = b.ring, [b.ring]


def _returned_too(h: torch.Tensor, b: Any) -> Any:
    b.new = Held(h=h)
    b.items.append(h)
    return {"new": b.new, "items": b.items, "b": b}


def _replaced(h: torch.Tensor, b: Any) -> None:
    b.items[0].scale = h
    b.items = []


def _slots(h: torch.Tensor, b: Any) -> None:
    b.scale = Slotted(b.scale + 1)
    b.scale.scale = h


def _swapped(h: torch.Tensor, b: Any) -> None:
    b.items, b.names = b.names, b.items


SHARED: dict[str, tuple[Any, Any]] = {
    "a list twice": (lambda: _twice([]), lambda h, a, b: (a.append(h), b[-1])[1]),
    "an object twice": (lambda: _twice(Held(x=X)), lambda h, a, b: (setattr(a, "h", h), b.h)[1]),
    "in two items": (lambda: ([Held(m=m) for m in _twice(Held(x=X))],), lambda h, a: h + a[0].m.x * a[1].m.x),
    "a new object that holds itself": (lambda: (Held(),), _new_ring),
    "returned, too": (lambda: (Held(items=[], x=X),), _returned_too),
    "an argument returned": (lambda: (Held(items=[]),), lambda h, b: (h, b)),
    "changed, then replaced": (lambda: (Held(items=[Slotted(1)]),), _replaced),
    "slots": (lambda: (Slotted(1),), _slots),
    "swapped": (lambda: (Held(items={1, 2}, names=deque([3])),), _swapped),
    "a deque": (lambda: (deque([X], maxlen=2),), lambda h, d: d.append(h)),
    "a set": (lambda: ({1},), lambda h, s: s.add(2)),
    "another order": (lambda: ({"a": X, "b": 2},), lambda h, d: d.update(a=d.pop("a"))),
    "moved to the end": (lambda: (OrderedDict(a=X, b=2),), lambda h, d: d.move_to_end("a")),
    "a long list": (lambda: ([0] * 10_000,), lambda h, a: a.append(h)),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", [Doing, AroundDoing])
@pytest.mark.parametrize("case", SHARED)
def test_things_are_the_same_ones_and_others_as_in_the_plain_step(case: str, kind: Any) -> None:
    make, do = SHARED[case]
    model = kind(do)
    plain = copy.deepcopy(model)
    sample = (X, *make())
    before = told(sample, {})
    options: Any = {"regions": "whole" if kind is Doing else "inner", "on_new_shape": "error"}
    auto_checkpoint(model, sample, progress=False, **options).apply(model)
    assert told(sample, {}) == before
    for _ in range(2):
        found = []
        for each in (plain, model):
            given = (X, *make())
            output = each(*given)
            found.append(told((output, given), {}))
            output["loss"].backward()
        assert found[0] == found[1]
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("kind", [Held, Slotted])
def test_an_attribute_is_set_where_the_sample_had_the_same_value(kind: Any) -> None:
    model = Doing(lambda h, b: setattr(b, "scale", "mine"))
    module = auto_checkpoint(model, (X, kind(scale="mine")), on_new_shape="error", progress=False).module
    given = kind(scale="another")
    module(X, given)
    assert given.scale == "mine"


def test_one_list_in_two_places_is_not_two_lists() -> None:
    model = Doing(lambda h, a, b: h)
    module = auto_checkpoint(model, (X, *_twice({"a": X})), on_new_shape="error", progress=False).module
    with pytest.raises(InputMismatch, match=r"the plan expects what holds \[0\]\['a'\], \[1\]"):
        module(X, {"a": X}, {"a": X})


def test_objects_that_all_hold_each_other_are_looked_through_once() -> None:
    nodes = [Held() for _ in range(200)]
    for node in nodes:
        node.others = nodes
    began = time.perf_counter()
    assert flatten(nodes)[0] == []
    assert time.perf_counter() - began < 2


def _with_scale(scale: float) -> torch.Tensor:
    x = X.clone()
    x.scale = scale  # type: ignore[attr-defined]
    return x


def _tagged(h: torch.Tensor, b: Any) -> None:
    b.h = h * 2
    b.h.tag = 7


ATTRIBUTES: dict[str, tuple[Any, Any, str]] = {
    "read": (lambda: _with_scale(2.0), lambda h, x: h * getattr(x, "scale", 7.0), "scale"),
    "set on an input": (X.clone, lambda h, x: setattr(x, "tag", 7), "tag"),
    "set on what is returned": (Held, lambda h, b: (setattr(h, "tag", 7), h)[1], "tag"),
    "set on what is put": (Held, _tagged, "tag"),
}


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_attributes_of_tensors_are_refused_by_name(case: str) -> None:
    make, do, name = ATTRIBUTES[case]
    with pytest.raises(Unsupported, match=rf"attribute of a tensor \({name}\)"):
        auto_checkpoint(Doing(do), (X, make()), regions="whole", progress=False)


def test_an_attribute_of_a_tensor_that_the_sample_did_not_have_is_refused_where_forward_looks_for_it() -> None:
    module = auto_checkpoint(Doing(ATTRIBUTES["read"][1]), (X, X.clone()), progress=False).module
    with pytest.warns(UserWarning, match=r"attribute of a tensor \(scale\) at given\[0\].* run in eager"):
        module(X, _with_scale(2.0))
    unread = auto_checkpoint(Doing(lambda h, x: h * x), (X, _with_scale(2.0)), on_new_shape="error", progress=False)
    unread.module(X, _with_scale(3.0))


class ReadsPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, packed: Any) -> torch.Tensor:
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0])
        found: torch.Tensor = self.head(padded).pow(2).sum()
        return found


def test_a_named_tuple_that_looks_at_what_it_is_made_of() -> None:
    model = ReadsPacked()
    plain, (long, short) = copy.deepcopy(model), ((5, 3), (4, 4))
    packed = [nn.utils.rnn.pack_sequence([torch.randn(n, 8) for n in lengths]) for lengths in (long, short)]
    plan = auto_checkpoint(model, packed[0], progress=False, time_limit=1)
    for argument in packed:
        plan.module(argument).backward()
        plain(argument).backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("make", [lambda: iter([2.0, 3.0]), lambda: (a for a in (2.0, 3.0))])
def test_an_iterator_is_refused_and_not_advanced(make: Any) -> None:
    given = make()
    with pytest.raises(Unsupported, match="iterator at the arguments"):
        auto_checkpoint(Doing(lambda h, i: h * next(i)), (X, given), progress=False, regions="whole")
    assert list(given) == [2.0, 3.0]


def test_a_change_within_a_checkpoint_is_refused_by_its_place() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def step(self, x: torch.Tensor, found: list[Any]) -> torch.Tensor:
            found.append(torch.tanh(self.inner(x)))
            return torch.tanh(torch.stack(found).sum(0))

        def forward(self, x: torch.Tensor, found: list[Any]) -> torch.Tensor:
            return checkpoint(self.step, x, found, use_reentrant=False).sum()

    with pytest.raises(Unsupported, match=r"the argument found changed within torch.utils.checkpoint at .*test_arg"):
        auto_checkpoint(Cell(), (X, []), progress=False)


def _with_attribute() -> torch.Tensor:
    given = torch.randn(4, 8)
    given.scale = 2  # type: ignore[attr-defined]
    return given


def _made_for_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(4, 8)


CALLS: dict[str, tuple[Any, Any]] = {
    "alike": ({"x": torch.randn(4, 8), "n": 0.0}, nullcontext),
    "another shape": ({"x": torch.randn(4, 9), "n": 0.0}, nullcontext),
    "other strides": ({"x": torch.randn(8, 4).t(), "n": 0.0}, nullcontext),
    "a view": ({"x": torch.randn(4, 9)[:, 1:], "n": 0.0}, nullcontext),
    "another dtype": ({"x": torch.randn(4, 8).double(), "n": 0.0}, nullcontext),
    "another device": ({"x": torch.randn(4, 8, device="meta"), "n": 0.0}, nullcontext),
    "a gradient": ({"x": torch.randn(4, 8, requires_grad=True), "n": 0.0}, nullcontext),
    "a parameter": ({"x": nn.Parameter(torch.randn(4, 8)), "n": 0.0}, nullcontext),
    "an attribute": ({"x": _with_attribute(), "n": 0.0}, nullcontext),
    "for inference": ({"x": _made_for_inference(), "n": 0.0}, nullcontext),
    "a negative zero": ({"x": torch.randn(4, 8), "n": -0.0}, nullcontext),
    "a whole number": ({"x": torch.randn(4, 8), "n": 0}, nullcontext),
    "False": ({"x": torch.randn(4, 8), "n": False}, nullcontext),
    "another name": ({"y": torch.randn(4, 8), "n": 0.0}, nullcontext),
    "another order": ({"n": 0.0, "x": torch.randn(4, 8)}, nullcontext),
    "one tensor twice": ({"x": X, "n": X}, nullcontext),
    "a list": ({"x": [torch.randn(4, 8)], "n": 0.0}, nullcontext),
    "autocast": ({"x": torch.randn(4, 8), "n": 0.0}, lambda: torch.autocast("cpu", torch.bfloat16)),
    "a default device": ({"x": torch.randn(4, 8), "n": 0.0}, lambda: torch.device("meta")),
    "another attention": ({"x": torch.randn(4, 8), "n": 0.0}, lambda: sdpa_kernel(SDPBackend.MATH)),
}


@pytest.mark.parametrize("known", CALLS)
def test_what_is_told_at_once_of_a_call_is_what_its_key_tells(known: str) -> None:
    arguments, context = CALLS[known]
    with context():
        tensors, template = flatten(arguments)
        look, key = Look.of(tensors, template), call_key(tensors, template)
    for name, (others, around) in CALLS.items():
        with around():
            given = flatten(others)
            same = look is not None and look.is_of(*given)
            assert not same or call_key(*given) == key, name
            assert same or name != known or known in ("an attribute", "a list")


class Waves(nn.Module):
    """Complex numbers in, and out where `spectrum`."""

    def __init__(self, spectrum: bool) -> None:
        super().__init__()
        self.linear, self.spectrum = nn.Linear(8, 8), spectrum

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        y = self.linear(z.real + z.imag)
        return torch.view_as_complex(y.view(-1, 4, 2)) if self.spectrum else y.relu().sum()


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.linear((z * z).real).relu().sum()


def test_parts_of_a_tensor_that_is_yet_to_be_conjugated_are_refused_by_name() -> None:
    z, model = torch.randn(4, 8, dtype=torch.complex64), Waves(spectrum=False)
    plan = auto_checkpoint(model, z, progress=False)
    with pytest.warns(UserWarning, match=r"at z: .*resolve_conj"):
        plan.module(z.conj())
    plan.module(z.conj().resolve_conj()).backward()
    with pytest.raises(Unsupported, match="real or imaginary part of a tensor that is yet to be conjugated at z"):
        auto_checkpoint(model, z.conj(), progress=False)


def test_a_plan_for_what_is_yet_to_be_conjugated_is_for_that() -> None:
    model, z = Wave(), torch.randn(4, 8, dtype=torch.complex64).conj()
    plan = auto_checkpoint(model, z, progress=False)
    blank = blank_sample(plan.module._plan_state)["z"]
    assert blank.is_conj() and blank.stride() == z.stride()
    plan.module(z).backward()
    with pytest.warns(UserWarning, match=r"got \(4, 8\) complex64 on cpu, .* on cpu, yet to be conjugated"):
        plan.module(z.resolve_conj()).backward()


def test_a_gradient_that_is_yet_to_be_conjugated_is_the_plain_one() -> None:
    torch.manual_seed(0)
    model, z = Waves(spectrum=True), torch.randn(4, 8, dtype=torch.complex64)
    plain, plan = copy.deepcopy(model), auto_checkpoint(model, z, progress=False)
    for module in (plain, plan.module):
        (module(z).conj() * (2 + 1j)).conj().real.sum().backward()
    assert_same_gradients(plain, model)


def _bound(bind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        found = bind(args, kwargs)
    except TypeError as error:
        return str(error)
    return list(found.items()), found.by_name


@pytest.mark.parametrize(
    "forward", [
        lambda: 0, lambda x: 0, lambda x, y=1: 0, lambda x, *, y: 0, lambda x, *, y=2: 0, lambda x, **rest: 0,
        lambda x, y=1, **rest: 0, lambda *x, y=1: 0, lambda x, /, y=1, **rest: 0, lambda x=0, *, y, **rest: 0,
    ]
)  # fmt: skip
def test_calls_are_bound_as_by_their_signature(forward: Any) -> None:
    signature = inspect.signature(forward)
    bind, by_signature = binder(signature), partial(bind_call, signature)
    for count, names in itertools.product(range(4), range(5)):
        for chosen in itertools.permutations(("x", "y", "z", "rest"), names):
            args, kwargs = tuple(range(count)), dict(zip(chosen, "abcd", strict=False))
            assert _bound(bind, args, kwargs) == _bound(by_signature, args, kwargs)
