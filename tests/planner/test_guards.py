"""What changes after planning: what forward reads is planned anew, what it does not read changes nothing.

Each case builds a model, plans it, changes something, and takes a step on the planned module and a plain one: a copy
of the changed model, or the changed model itself. Outputs and gradients are bitwise equal, whatever was changed.
"""

from __future__ import annotations

import argparse
import collections
import configparser
import copy
import cProfile
import ctypes
import enum
import functools
import gc
import importlib
import math
import multiprocessing
import operator
import os
import queue
import sys
import threading
import types
import warnings
import weakref
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from passes._torch import TorchDispatchMode
from passes.run.step import ChangedInPlace
from passes.trace.lookups import computes_names
from planner import Plan, PlannerError, Unsupported
from tests.planner.steps import assert_same_state, linear, plan

SCALE = 2.0
TABLE = {"scale": 2.0, "shift": {"by": 1.0}}
SETTINGS = types.SimpleNamespace(scale=2.0)
COUNTED = {"steps": 0}


def helper(x: torch.Tensor, factor: float = 1.5) -> torch.Tensor:
    return x * factor


class Defaults:
    """A class that is read through its name."""

    scale = 2.0
    unread = 1


@dataclass
class Inner:
    power: float = 2.0
    unread: int = 0


@dataclass
class Config:
    scale: float = 2.0
    sizes: tuple[int, ...] = (1, 2)
    names: list[str] = field(default_factory=lambda: ["tanh"])
    inner: Inner = field(default_factory=Inner)
    unread: int = 0


class Sharp(Inner):
    """Another type, which answers otherwise."""

    @property  # type: ignore[override]
    def power(self) -> float:
        return 3.0

    @power.setter
    def power(self, value: float) -> None: ...


class Pair(NamedTuple):
    a: float
    b: float


class Style(enum.Enum):
    """Members with an attribute of their own."""

    PLAIN = 1

    def __init__(self, value: int) -> None:
        self.strength = 2.0


class Styled(type):
    """A metaclass that computes."""

    _power = 2.0

    @property
    def power(cls) -> float:
        return cls._power


class Weak(metaclass=Styled):
    """A class whose attribute is its metaclass's."""


class Outer:
    """A class in a class."""

    class Inner:
        scale = 2.0


class Derived(Defaults):
    """A class that is come to in other ways than by its name."""


class Number(float):
    """A number with a class of its own."""


class Local(threading.local):
    """Another value in each thread, and one of the class's."""

    scale = 2.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Dynamic:
    """Answers for names that it does not have."""

    def __init__(self) -> None:
        self._data = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_data"][name]
        except KeyError as error:
            raise AttributeError(name) from error


class Mapped:
    """Redirects names, as the configs of transformers do."""

    def __init__(self) -> None:
        self.n_scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("n_scale" if name == "scale" else name)


class Registry:
    """Looks names up in a table of the class."""

    table: ClassVar = {"scale": 2.0}

    def __getitem__(self, name: str) -> float:
        return self.table[name]


REGISTRY = Registry()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Configured(torch.autograd.Function):
    """Reads an object in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, config: Any) -> torch.Tensor:
        ctx.config = config
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.config.scale, None


FACTOR: ContextVar[float] = ContextVar("factor", default=1.0)


class Base(nn.Module):
    factor = 1.0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Net(Base):
    """Reads of every kind: `body` says what forward does between its two layers."""

    def __init__(self, body: Callable[..., torch.Tensor] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.body = body
        for name, value in attributes.items():
            setattr(self, name, value)
        if "shown" in attributes:
            self.shown = types.MappingProxyType(self.table)
        if "weak" in attributes:
            self.weak = weakref.ref(self.cfg)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.middle(self.first(x))
        h = self.body(self, h) if self.body is not None else h
        return self.last(h) * self.factor


def net(**attributes: Any) -> Callable[[Callable[..., Any]], Callable[[], nn.Module]]:
    """A maker of models whose body is the decorated function; values that are functions are called."""
    return lambda body: lambda: Net(body, **{k: v() if callable(v) else v for k, v in attributes.items()})


def x_of() -> torch.Tensor:
    return torch.randn(4, 8)


def reader(attribute: str, value: Any, read: Callable[[Any], Any] = lambda v: v) -> Callable[[], nn.Module]:
    """A model whose forward multiplies by what it reads from an attribute."""
    return lambda: Net(lambda self, h: h * read(getattr(self, attribute)), **{attribute: copy.deepcopy(value)})


def setting(path: str, value: Any) -> Callable[[Any], None]:
    """Set an attribute or item: `a.b` or `a[key]`, from the model."""

    def change(model: Any) -> None:
        *way, last = path.split(".")
        setattr(functools.reduce(getattr, way, model), last, value)

    return change


def swap(owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, value)


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        if tie:
            self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Stack(nn.Module):
    """Blocks in a list, by name, and a module that is there or not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Linear(8, 8)})
        self.extra: nn.Module | None = None
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        for name, module in self.named.items():
            x = module(x) * len(name)
        if self.extra is not None:
            x = self.extra(x)
        for scale in self.scales:
            x = x * scale
        return x if self.mask is None else x * self.mask


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv1d(2, 4, 3, padding=1), nn.AvgPool1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(x.view(4, 2, 4))).pow(2)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.LayerNorm(8), nn.Linear(8, 8))


def closure() -> nn.Module:
    factor = [2.0]
    scale = 1.0

    def body(self: Any, h: torch.Tensor) -> torch.Tensor:
        return h * factor[0] * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    model = Net(body)
    model.__dict__["change_scale"], model.__dict__["factor_list"] = change, factor
    return model


def class_of_closures() -> nn.Module:
    factor = [2.0]

    class Scaled:
        @staticmethod
        def apply(h: torch.Tensor) -> torch.Tensor:
            return h * factor[0]

    return Net(lambda self, h: self.scaled.apply(h), scaled=Scaled, factor_list=factor)


def class_of_defaults() -> nn.Module:
    default = [2.0]

    class Scaled:
        @staticmethod
        def apply(h: torch.Tensor, factor: list[float] = default) -> torch.Tensor:
            return h * factor[0]

    return Net(lambda self, h: self.scaled.apply(h), scaled=Scaled, factor_list=default)


def partial_method() -> nn.Module:
    factor = [2.0]

    class Scaled(Net):
        def times(self, by: list[float], h: torch.Tensor) -> torch.Tensor:
            return h * by[0]

        scaled = functools.partialmethod(times, factor)

    return Scaled(lambda self, h: self.scaled(h), factor_list=factor)


def function_of_closures() -> nn.Module:
    factor = [2.0]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            return h * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * factor[0]

    return Net(lambda self, h: self.scaled.apply(h), scaled=Scaled, factor_list=factor)


def attribute_by_name(name: str) -> Callable[[], nn.Module]:
    return lambda: Net(lambda self, h: h * getattr(self, "sc" + "ale"), scale=2.0, **{"other_" + name: 1})


def whole_dict() -> nn.Module:
    return Net(lambda self, h: h * vars(self)["scale"] * self.__dict__.get("more", 1.0), scale=2.0)


class Counted(nn.Linear):
    """A subclass whose forward can be patched on the class."""


def patched(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.weight, self.bias) * 3


def tied_to(model: Any) -> None:
    model.b.weight = model.a.weight


def untied(model: Any) -> None:
    model.b.weight = nn.Parameter(model.a.weight.detach().clone())


def with_class(model: Any) -> None:
    class Sharper(Net):
        def middle(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x)

    model.__class__ = Sharper


def reinit(model: Any) -> None:
    model.named["bb"] = nn.Linear(8, 8)


def adopt_forward(model: Any) -> None:
    inner = model.first.forward
    model.first.forward = lambda x: inner(x) * 2


Change = tuple[Callable[[], nn.Module], Callable[[Any], Any]]
CHANGES: dict[str, Change] = {
    # plain attributes and containers
    "float": (reader("scale", 2.0), setting("scale", 3.0)),
    "an int that becomes a bool": (reader("scale", 1, lambda v: 2.0 if v is True else 3.0), setting("scale", True)),
    "0.0 that becomes -0.0": (reader("scale", 0.0, lambda v: math.copysign(2, v)), setting("scale", -0.0)),
    "NaN that becomes a number": (reader("s", math.nan, lambda v: 1.0 if v != v else v), setting("s", 3.0)),
    "None": (reader("scale", None, lambda v: 2.0 if v is None else v), setting("scale", 3.0)),
    "string": (reader("mode", "a", lambda v: 2.0 if v == "a" else 3.0), setting("mode", "b")),
    "tuple": (reader("t", (1.0, 2.0), lambda v: v[1]), setting("t", (1.0, 3.0))),
    "list in place": (reader("t", [1.0, 2.0], lambda v: v[1]), lambda m: m.t.__setitem__(1, 3.0)),
    "list grown": (reader("t", [1.0, 2.0], sum), lambda m: m.t.append(3.0)),
    "list emptied": (reader("t", [1.0, 2.0], lambda v: 1.0 + sum(v)), lambda m: m.t.clear()),
    "empty list filled": (reader("t", [], lambda v: 1.0 + sum(v)), lambda m: m.t.append(3.0)),
    "nested list": (reader("t", [[1.0], [2.0]], lambda v: v[1][0]), lambda m: m.t[1].__setitem__(0, 3.0)),
    "list in a tuple": (reader("t", ([1.0], 2.0), lambda v: v[0][0]), lambda m: m.t[0].__setitem__(0, 3.0)),
    "dict value": (reader("t", {"a": 2.0}, lambda v: v["a"]), lambda m: m.t.__setitem__("a", 3.0)),
    "dict key": (reader("t", {"a": 2.0}, lambda v: v.get("b", 1.0)), lambda m: m.t.__setitem__("b", 3.0)),
    "dict of lists": (reader("t", {"a": [2.0]}, lambda v: v["a"][0]), lambda m: m.t["a"].__setitem__(0, 3.0)),
    "ordered dict's order": (
        reader("t", collections.OrderedDict(a=2.0, b=3.0), lambda v: next(iter(v.values()))),
        lambda m: m.t.move_to_end("a"),
    ),
    "set": (reader("t", {"a"}, lambda v: 3.0 if "b" in v else 2.0), lambda m: m.t.add("b")),
    "deque": (reader("t", collections.deque([2.0]), lambda v: v[0]), lambda m: m.t.appendleft(3.0)),
    "named tuple": (reader("t", Pair(1.0, 2.0), lambda v: v.b), setting("t", Pair(1.0, 3.0))),
    "array in place": (reader("t", numpy.ones(2), lambda v: float(v[0])), lambda m: m.t.__setitem__(0, 3.0)),
    "a record of an array": (
        reader("t", numpy.ones(1, dtype=[("a", "f4")])[0], lambda v: float(v["a"])), lambda m: m.t.__setitem__("a", 3.0)
    ),
    "a list in an array": (
        reader("t", numpy.array([[2.0], None], dtype=object), lambda v: v[0][0]), lambda m: m.t[0].__setitem__(0, 3.0)
    ),
    "the mask of an array": (
        reader("t", numpy.ma.masked_array([1.0, 2.0], [0, 0]), lambda v: float(v.sum())),
        lambda m: m.t.mask.__setitem__(0, True),
    ),
    "an array of C's": (reader("t", (ctypes.c_double * 1)(2.0), lambda v: v[0]), lambda m: m.t.__setitem__(0, 3.0)),
    "the numbers in a tensor": (reader("t", torch.ones(2), lambda v: v.tolist()[0]), lambda m: m.t.fill_(3.0)),
    "the numbers in a tensor that is computed with, too": (
        lambda: Net(lambda self, h: h * self.t.sum() * self.t.tolist()[0], t=torch.ones(2)), lambda m: m.t.fill_(3.0)
    ),
    "the array of a tensor": (reader("t", torch.ones(2), lambda v: float(v.numpy()[0])), lambda m: m.t.fill_(3.0)),
    "the shape of a tensor": (reader("t", torch.ones(2), len), lambda m: setattr(m.t, "data", torch.ones(3))),
    "whether a tensor is trained": (
        reader("t", torch.ones(2), lambda v: 2.0 if v.requires_grad else 3.0), lambda m: m.t.requires_grad_()
    ),
    "a number of another class": (reader("t", Number(2.0)), setting("t", Number(3.0))),
    "array scalar": (reader("t", numpy.float32(2.0), float), setting("t", numpy.float32(3.0))),
    "a long list": (reader("t", [2.0] * 5000, lambda v: v[4321]), lambda m: m.t.__setitem__(4321, 3.0)),
    "bytearray": (reader("t", bytearray(b"\2"), lambda v: v[0]), lambda m: m.t.__setitem__(0, 3)),
    "array of Python's": (reader("t", array("d", [2.0]), lambda v: v[0]), lambda m: m.t.__setitem__(0, 3.0)),
    "chain of dicts": (
        reader("t", collections.ChainMap({}, {"a": 2.0}), lambda v: v["a"]), lambda m: m.t.maps[1].update(a=3.0)
    ),
    "a view of a dict": (
        lambda: Net(lambda self, h: h * self.shown["a"], table={"a": 2.0}, shown=None),
        lambda m: m.table.update(a=3.0),
    ),
    "a weak reference's object": (
        lambda: Net(lambda self, h: h * self.weak().scale, cfg=Config(), weak=None), setting("cfg.scale", 3.0)
    ),
    "a context variable": (reader("t", 1.0, lambda v: v * FACTOR.get()), lambda m: FACTOR.set(FACTOR.get() + 1)),
    "what a hook of a tensor reads": (
        lambda: Net(lambda self, h: (h.register_hook(lambda g: g * self.scale), h.sin())[1], scale=2.0),
        setting("scale", 3.0),
    ),
    "what a custom backward reads": (
        lambda: Net(lambda self, h: Configured.apply(h, self.cfg), cfg=Config()), setting("cfg.scale", 3.0)
    ),
    "dtype": (
        lambda: Net(lambda self, h: h.to(self.kind).float(), kind=torch.float32), setting("kind", torch.bfloat16)
    ),
    "plain tensor": (reader("t", torch.ones(8)), setting("t", torch.full((8,), 3.0))),
    "plain tensor in place": (reader("t", torch.ones(8)), lambda m: m.t.fill_(3.0)),
    "tensor in a list": (reader("t", [torch.ones(8)], lambda v: v[0]), lambda m: m.t.__setitem__(0, torch.zeros(8))),
    "number of a plain tensor": (reader("t", torch.ones(2), lambda v: v.shape[0]), setting("t", torch.ones(3))),
    "an attribute that was not there": (
        lambda: Net(lambda self, h: h * 2 if hasattr(self, "flag") else h), setting("flag", 1)
    ),
    "an attribute by a computed name": (attribute_by_name("x"), setting("scale", 3.0)),
    "an attribute through __dict__": (whole_dict, setting("scale", 3.0)),
    "an attribute through __dict__ that was not there": (whole_dict, setting("more", 3.0)),
    # functions
    "an activation": (lambda: Net(lambda self, h: self.act(h), act=F.relu), setting("act", F.gelu)),
    "body replaced": (reader("scale", 2.0), setting("body", lambda self, h: h * 5)),
    "a partial": (
        lambda: Net(lambda self, h: self.act(h), act=functools.partial(F.leaky_relu, negative_slope=0.1)),
        setting("act", functools.partial(F.leaky_relu, negative_slope=0.5)),
    ),
    "the closure of a function of a class": (class_of_closures, lambda m: m.factor_list.__setitem__(0, 3.0)),
    "the default of a function of a class": (class_of_defaults, lambda m: m.factor_list.__setitem__(0, 3.0)),
    "an argument of a partialmethod": (partial_method, lambda m: m.factor_list.__setitem__(0, 3.0)),
    "the closure of a torch.autograd.Function": (function_of_closures, lambda m: m.factor_list.__setitem__(0, 3.0)),
    "a closure's list": (closure, lambda m: m.factor_list.__setitem__(0, 3.0)),
    "a closure's variable": (closure, lambda m: m.change_scale(3.0)),
    "the instance's forward": (lambda: Net(), lambda m: setattr(m, "middle", torch.sigmoid)),
    "a submodule's forward": (lambda: Net(), adopt_forward),
    "functions in a list": (
        lambda: Net(lambda self, h: self.acts[0](h), acts=[torch.tanh]), lambda m: m.acts.__setitem__(0, torch.relu)
    ),
    "the model's own forward": (
        lambda: Net(), lambda m: setattr(m, "forward", types.MethodType(lambda self, x: self.first(x) * 5, m))
    ),
    "another class": (lambda: Net(), with_class),
    # objects
    "a config's field": (reader("cfg", Config(), lambda c: c.scale), setting("cfg.scale", 3.0)),
    "a config's tuple": (reader("cfg", Config(), lambda c: c.sizes[1]), setting("cfg.sizes", (1, 3))),
    "a config's list": (
        reader("cfg", Config(), lambda c: 2.0 if "tanh" in c.names else 3.0), lambda m: m.cfg.names.clear()
    ),
    "a config in a config": (reader("cfg", Config(), lambda c: c.inner.power), setting("cfg.inner.power", 3.0)),
    "a config replaced": (reader("cfg", Config(), lambda c: c.scale), setting("cfg", Config(scale=3.0))),
    "a config of another type": (reader("cfg", Inner(), lambda c: c.power), setting("cfg", Sharp())),
    "a namespace": (reader("cfg", types.SimpleNamespace(a=2.0), lambda c: c.a), setting("cfg.a", 3.0)),
    "arguments": (reader("cfg", argparse.Namespace(a=2.0), lambda c: c.a), setting("cfg.a", 3.0)),
    "a user dict": (
        reader("cfg", collections.UserDict(a=2.0), lambda c: c["a"]), lambda m: m.cfg.__setitem__("a", 3.0)
    ),
    "slots": (reader("cfg", Slotted(), lambda c: c.scale), setting("cfg.scale", 3.0)),
    "__getattr__": (reader("cfg", Dynamic(), lambda c: c.scale), lambda m: m.cfg._data.__setitem__("scale", 3.0)),
    "__getattribute__": (reader("cfg", Mapped(), lambda c: c.scale), setting("cfg.n_scale", 3.0)),
    "a config in a list": (
        reader("cfgs", [Config()], lambda c: c[0].scale), lambda m: setting("scale", 3.0)(m.cfgs[0])
    ),
    "a distribution": (
        reader("prior", torch.distributions.Normal(0.0, 2.0), lambda p: p.scale),
        setting("prior.scale", torch.tensor(3.0)),
    ),
    # modules' own settings
    "a stride": (Conv, setting("conv.stride", (2,))),
    "padding": (Conv, setting("conv.padding", (0,))),
    "dilation": (Conv, setting("conv.dilation", (2,))),
    "padding mode": (Conv, setting("conv.padding_mode", "circular")),
    "a pool's window": (Conv, setting("pool.kernel_size", (3,))),
    "momentum": (layers, lambda m: setattr(m[1], "momentum", 0.5)),
    "eps": (layers, lambda m: setattr(m[3], "eps", 0.1)),
    "dropout": (layers, lambda m: setattr(m[2], "p", 1.0)),
    "one module in eval": (layers, lambda m: m[1].eval()),
    "statistics not tracked": (layers, lambda m: setattr(m[1], "track_running_stats", False)),
    "buffers that become None": (layers, lambda m: [setattr(m[1], n, None) for n in ("running_mean", "running_var")]),
    # structure
    "untied": (Tied, untied),
    "tied": (lambda: Tied(False), tied_to),
    "a bias taken away": (Tied, lambda m: setattr(m.a, "bias", None)),
    "a bias added": (
        lambda: nn.Sequential(nn.Linear(8, 8, bias=False)), lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(8)))
    ),
    "a layer replaced by one with a bias": (
        lambda: nn.Sequential(nn.Linear(8, 8, bias=False)), lambda m: m.__setitem__(0, nn.Linear(8, 8))
    ),
    "a wider layer": (lambda: nn.Sequential(nn.Linear(8, 8)), lambda m: m.__setitem__(0, nn.Linear(8, 12))),
    "an equal layer": (Tied, lambda m: setattr(m, "a", nn.Linear(8, 8))),
    "LoRA": (Stack, lambda m: m.blocks.__setitem__(0, LoRA(m.blocks[0]))),
    "LoRA, its base frozen": (
        Stack, lambda m: (m.requires_grad_(False), m.blocks.__setitem__(0, LoRA(m.blocks[0])))
    ),
    "a block appended": (Stack, lambda m: m.blocks.append(nn.Linear(8, 8))),
    "a block removed": (Stack, lambda m: m.blocks.__delitem__(0)),
    "blocks in another order": (Stack, lambda m: setattr(m, "blocks", nn.ModuleList(reversed(m.blocks)))),
    "a module added by name": (Stack, reinit),
    "a module that was None": (Stack, setting("extra", nn.Linear(8, 8))),
    "a parameter appended": (Stack, lambda m: m.scales.append(nn.Parameter(torch.full((8,), 2.0)))),
    "a buffer that was None": (Stack, lambda m: setattr(m, "mask", torch.arange(8.0))),
    "a parametrization": (Tied, lambda m: parametrizations.weight_norm(m.a)),
    "an old weight_norm": (Tied, lambda m: nn.utils.spectral_norm(m.a)),
    "an activation module": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), lambda m: m.__setitem__(1, nn.Tanh())
    ),
    "a layer shared": (Stack, lambda m: m.blocks.__setitem__(1, m.blocks[0])),
    "one parameter frozen": (Tied, lambda m: m.a.weight.requires_grad_(False)),
    "all but the last frozen": (Stack, lambda m: m.blocks.requires_grad_(False)),
    "a buffer that becomes a parameter": (
        lambda: Buffered(), lambda m: (m.__delattr__("scale"), setattr(m, "scale", nn.Parameter(torch.full((8,), 3.0))))
    ),
    "a parameter that becomes a tensor": (
        lambda: Net(lambda self, h: h * self.w, w=nn.Parameter(torch.ones(8))),
        lambda m: (m.__delattr__("w"), setattr(m, "w", torch.full((8,), 3.0))),
    ),
    "a weight's attribute": (lambda: Marked(), lambda m: setattr(m.layer.weight, "gain", 3.0)),
    "a buffer's attribute": (lambda: Marked(), lambda m: setattr(m.scale, "gain", 3.0)),
    "a tensor of a class of one's own": (
        lambda: Net(lambda self, h: h * self.w.as_subclass(torch.Tensor), w=special(2.0)),
        lambda m: setattr(m, "w", special(3.0)),
    ),
    "a parameter resized through .data": (
        lambda: nn.Sequential(nn.Linear(8, 8, bias=False)), lambda m: setattr(m[0].weight, "data", torch.randn(5, 8))
    ),
}  # fmt: skip


class Marked(nn.Module):
    """Reads what was set on its weight and its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.layer.weight.gain, self.scale.gain = 2.0, 2.0
        self.layer.weight.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale * self.layer.weight.gain * self.scale.gain


class Special(torch.Tensor):
    """A tensor that wraps no other."""


def special(value: float) -> torch.Tensor:
    return torch.full((8,), value).as_subclass(Special)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def count(chosen: Plan) -> int:
    return len(chosen.module._plan_state.cache)


def outcome(call: Callable[[], torch.Tensor], model: nn.Module) -> list[Any]:
    """The output and every gradient of one seeded step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    output = call()
    output.float().pow(2).sum().backward()
    gradients = [(n, None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()]
    return [output.detach().clone(), *gradients]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert torch.equal(found[0], expected[0]) or (found[0].isnan() & expected[0].isnan()).any()
    for (name, a), (other, b) in zip(found[1:], expected[1:], strict=True):
        assert name == other and (a is None) == (b is None), name
        assert a is None or torch.equal(a, b) or a.isnan().any(), name


def compare(chosen: Plan, model: nn.Module, *inputs: torch.Tensor, loss_fn: Any = None) -> None:
    """A step of the planned module against the model's own forward, from equal buffers."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = outcome(lambda: chosen.module(*inputs), model)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    extra = inputs[1:]
    assert_same(found, outcome(lambda: loss_fn(model(inputs[0]), *extra) if loss_fn else model(*inputs), model))
    assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())


def planned(build: Callable[[], nn.Module]) -> tuple[Plan, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = build(), x_of()
    return plan(model, x), model, x


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_never_stale(name: str) -> None:
    build, change = CHANGES[name]
    chosen, model, x = planned(build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "planning anew" would be one
        compare(chosen, model, x)
    change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(chosen, model, x)
    before = count(chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(chosen, model, x)
    assert count(chosen) == before


@pytest.mark.parametrize("name", ["float", "list in place", "a config's field", "untied", "LoRA", "a stride"])
def test_a_change_after_apply_and_in_a_copy(name: str) -> None:
    build, change = CHANGES[name]
    chosen, model, x = planned(build)
    chosen.apply(model)
    copied = copy.deepcopy(model)
    for each in (copied, model):
        plain = copy.deepcopy(each)
        change(each)
        change(plain)
        del plain.forward
        plain.load_state_dict(each.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(outcome(lambda m=each: m(x), each), outcome(lambda m=plain: m(x), plain))


def test_a_setting_through_the_planned_module() -> None:
    chosen, model, x = planned(CHANGES["float"][0])
    chosen.module.scale = 3.0
    assert model.scale == chosen.module.scale == 3.0
    with pytest.warns(UserWarning, match="planning anew"):
        compare(chosen, model, x)
    del chosen.module.scale
    assert not hasattr(model, "scale")


def test_a_warning_names_what_changed() -> None:
    chosen, model, x = planned(CHANGES["a config in a config"][0])
    model.cfg.inner.power = 3.0
    with pytest.warns(UserWarning, match=r"cfg\.inner \(Inner\) with power=3\.0, the plan expects power=2\.0"):
        chosen.module(x)
    chosen, model, x = planned(Tied)
    untied(model)
    with pytest.warns(UserWarning, match=r"argument 'b\.weight': got one of its own.*the same tensor as a\.weight"):
        chosen.module(x)


# Globals, classes, functions ------------------------------------------------------------------------------------------


def shifted(self: Any, h: torch.Tensor) -> torch.Tensor:
    h = Scaled.apply(h) * REGISTRY["scale"] * float(os.environ.get("PLANNER_TEST", "1"))
    return helper(h) * SCALE * TABLE["scale"] * SETTINGS.scale * Defaults.scale + TABLE["shift"]["by"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda patch, here: patch.setattr(here, "SCALE", 5.0),
        lambda patch, here: patch.setitem(TABLE, "scale", 5.0),
        lambda patch, here: patch.setitem(TABLE["shift"], "by", 5.0),
        lambda patch, here: patch.setattr(SETTINGS, "scale", 5.0),
        lambda patch, here: patch.setattr(Defaults, "scale", 5.0),
        lambda patch, here: patch.setattr(here, "helper", lambda x: x * 7),
        lambda patch, here: patch.setattr(helper, "__defaults__", (7.0,)),
        lambda patch, here: patch.setattr(helper, "__code__", (lambda x, factor=1.5: x * 9).__code__),
        lambda patch, here: patch.setattr(Net, "factor", 5.0, raising=False),
        lambda patch, here: patch.setattr(Base, "factor", 5.0),
        lambda patch, here: patch.setattr(Net, "middle", lambda self, x: x.sigmoid()),
        lambda patch, here: patch.setattr(Base, "middle", lambda self, x: x.sigmoid()),
        lambda patch, here: patch.setattr(Net, "forward", lambda self, x: self.last(x)),
        lambda patch, here: patch.setattr(nn.Linear, "forward", patched),
        lambda patch, here: patch.setattr(F, "gelu", F.silu),
        lambda patch, here: patch.setitem(Registry.table, "scale", 5.0),
        lambda patch, here: patch.setattr(Scaled, "backward", staticmethod(lambda ctx, gradient: gradient * 9)),
        lambda patch, here: patch.setenv("PLANNER_TEST", "5"),
    ],
    ids=["float", "dict", "nested", "namespace", "class", "function", "defaults", "code", "class attribute",
         "base's attribute", "method", "base's method", "forward", "torch's forward", "torch's function", "a registry",
         "a backward", "the environment"],
)  # fmt: skip
def test_what_lies_outside_the_model_changes(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, model, x = planned(lambda: Net(lambda self, h: F.gelu(shifted(self, h))))
    compare(chosen, model, x)
    change(monkeypatch, sys.modules[__name__])
    with pytest.warns(UserWarning, match="planning anew"):
        compare(chosen, model, x)


FLAG, LINE, LOCALS, OWN_LOCALS = threading.Event(), queue.Queue[int](), threading.local(), Local()
SHARED, SHARED_LIST, NUMBER = multiprocessing.Value("d", 2.0), multiprocessing.Array("d", [2.0]), ctypes.c_double(2.0)
HELD: dict[str, Any] = {"class": Derived, "module": sys.modules[__name__], "style": Style.PLAIN}
LOCALS.scale = 2.0
BYTES = memoryview(bytearray(b"\2"))
LOCALS.config = Config()
OPTIMIZER: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
SCHEDULER: Any = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
PARSER = configparser.ConfigParser()
PARSER.read_string("[a]\nscale=2")
PART: Any = functools.partial(helper, factor=2.0)
PART.gain = 2.0
CONTEXT: ContextVar[Config] = ContextVar("CONTEXT")
CONTEXT.set(Config())
MARKED: Any = torch.ones(1)
MARKED.scale = 2.0


@functools.cache
def configured() -> Config:
    return Config()


@functools.lru_cache
def tabled(name: str) -> dict[str, float]:
    return {"scale": 2.0}


SETTINGS_IN_C: dict[str, float] = {}
OF_PYTHON: Any = (dict, list, tuple, str, float, frozenset, collections.OrderedDict)
SCALED: list[Any] = [type("Scaled", (kind,), {"scale": 2.0})() for kind in OF_PYTHON]
WEAKLY: Any = weakref.WeakKeyDictionary({Derived: 2.0})
GRID: Any = numpy.arange(4.0).reshape(2, 2)
SPAN: Any = [range(0, 3, 2)]
ZERO: Any = [torch.zeros(1)]
FOUND: Any = SETTINGS_IN_C.get


def assert_noticed(read: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What forward reads is planned anew once it has changed, and the steps are the plain model's."""
    chosen, model, x = planned(lambda: Net(lambda self, h: h * read()))
    compare(chosen, model, x)
    change(monkeypatch)
    with pytest.warns(UserWarning, match="planning anew"):
        compare(chosen, model, x)


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda: HELD["class"].scale, lambda patch: patch.setattr(Defaults, "scale", 5.0)),
        (lambda: type(Derived()).scale, lambda patch: patch.setattr(Defaults, "scale", 5.0)),
        (lambda: Outer.Inner.scale, lambda patch: patch.setattr(Outer.Inner, "scale", 5.0)),
        (lambda: getattr(Derived, "scale"), lambda patch: patch.setattr(Defaults, "scale", 5.0)),  # noqa: B009
        (lambda: vars(Defaults)["scale"], lambda patch: patch.setattr(Defaults, "scale", 5.0)),
        (lambda: Weak.power, lambda patch: patch.setattr(Styled, "_power", 5.0)),
        (lambda: Style.PLAIN.strength, lambda patch: patch.setattr(Style.PLAIN, "strength", 5.0)),
        (lambda: HELD["style"].strength, lambda patch: patch.setattr(Style.PLAIN, "strength", 5.0)),
        (lambda: globals()["SCALE"], lambda patch: patch.setattr(sys.modules[__name__], "SCALE", 5.0)),
        (lambda: vars(sys.modules[__name__])["SCALE"], lambda patch: patch.setitem(globals(), "SCALE", 5.0)),
        (lambda: importlib.import_module("tests.planner.test_guards").SCALE,
         lambda patch: patch.setitem(globals(), "SCALE", 5.0)),
        (lambda: HELD["module"].SCALE, lambda patch: patch.setitem(globals(), "SCALE", 5.0)),
        (lambda: operator.attrgetter("scale")(Defaults), lambda patch: patch.setattr(Defaults, "scale", 5.0)),
        (lambda: LOCALS.scale, lambda patch: patch.setattr(LOCALS, "scale", 5.0)),
        (lambda: OWN_LOCALS.scale, lambda patch: patch.setattr(OWN_LOCALS, "scale", 5.0)),
        (lambda: SHARED.value, lambda patch: patch.setattr(SHARED, "value", 5.0)),
        (lambda: SHARED_LIST[0], lambda patch: operator.setitem(SHARED_LIST, 0, 5.0)),
        (lambda: NUMBER.value, lambda patch: patch.setattr(NUMBER, "value", 5.0)),
        (lambda: BYTES[0], lambda patch: operator.setitem(BYTES, 0, 5)),
        (lambda: 2.0 + FLAG.is_set(), lambda patch: FLAG.set()),
        (lambda: 2.0 + LINE.qsize(), lambda patch: LINE.put(1)),
        (lambda: WEAKLY[Derived], lambda patch: patch.setitem(WEAKLY, Derived, 5.0)),
        (lambda: getattr(LOCALS, "later", 2.0), lambda patch: patch.setattr(LOCALS, "later", 5.0, raising=False)),
        (lambda: LOCALS.config.scale, lambda patch: patch.setattr(LOCALS.config, "scale", 5.0)),
        (lambda: OPTIMIZER.param_groups[0]["lr"], lambda patch: patch.setitem(OPTIMIZER.param_groups[0], "lr", 5.0)),
        (lambda: SCHEDULER.get_last_lr()[0], lambda patch: patch.setattr(SCHEDULER, "_last_lr", [5.0])),
        (lambda: PARSER.getfloat("a", "scale"), lambda patch: PARSER.set("a", "scale", "5")),
        (lambda: PART.gain, lambda patch: patch.setattr(PART, "gain", 5.0)),
        (lambda: CONTEXT.get().scale, lambda patch: patch.setattr(CONTEXT.get(), "scale", 5.0)),
        (lambda: CONTEXT.get().scale, lambda patch: CONTEXT.set(Config(scale=5.0))),
        (lambda: configured().scale, lambda patch: patch.setattr(configured(), "scale", 5.0)),
        (lambda: tabled("a")["scale"], lambda patch: patch.setitem(tabled("a"), "scale", 5.0)),
        (lambda: MARKED.scale, lambda patch: patch.setattr(MARKED, "scale", 5.0)),
        (lambda: FOUND("scale", 2.0), lambda patch: patch.setitem(SETTINGS_IN_C, "scale", 5.0)),
        *((functools.partial(getattr, owner, "scale"), lambda patch, owner=owner: patch.setattr(owner, "scale", 5.0))
          for owner in SCALED),
        (lambda: float(GRID.ravel("K")[1]), lambda patch: patch.setitem(globals(), "GRID", numpy.asfortranarray(GRID))),
        (lambda: 2.0 + GRID.flags.writeable, lambda patch: GRID.setflags(write=False)),
        (lambda: SPAN[0].stop + 0.0, lambda patch: operator.setitem(SPAN, 0, range(0, 4, 2))),
        (lambda: 2.0 + ZERO[0].signbit(), lambda patch: operator.setitem(ZERO, 0, -torch.zeros(1))),
    ],
    ids=["a class in a dict", "an object's class", "a class in a class", "getattr", "vars", "a metaclass's property",
         "a member of an enumeration", "a member in a dict", "globals", "a module's vars", "an imported module",
         "a module in a dict", "attrgetter", "a thread's own", "a thread's own of a class", "a shared value",
         "a shared array", "a number of C's", "memory", "an event", "a queue", "a weak dict",
         "set later in a thread", "an object of a thread's own", "a learning rate", "a scheduler", "a parser",
         "a partial's attribute",
         "an object in a context", "another object in a context", "a remembered object", "a remembered dict",
         "a tensor's attribute", "a method in C", *(f"{type(owner).__base__.__name__}'s attribute" for owner in SCALED),
         "an array's order", "an array's flag", "a range", "the sign of zero"],
)  # fmt: skip
def test_what_is_not_come_to_by_name_changes(read: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_noticed(read, change, monkeypatch)


ASKED = {"name": "scale"}


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda: getattr(Defaults, ASKED["name"]), lambda patch: patch.setattr(Defaults, "scale", 5.0)),
        (lambda: getattr(Defaults, f"sc{'scale'[2:]}", None), lambda patch: patch.setattr(Defaults, "scale", 5.0)),
        (lambda: vars(Defaults)[ASKED["name"]], lambda patch: patch.setattr(Defaults, "scale", 5.0)),
        (lambda: operator.attrgetter(ASKED["name"])(Defaults), lambda patch: patch.setattr(Defaults, "scale", 5.0)),
        (lambda: globals()[ASKED["name"].upper()], lambda patch: patch.setitem(globals(), "SCALE", 5.0)),
        (lambda: getattr(sys.modules[__name__], ASKED["name"].upper()),
         lambda patch: patch.setitem(globals(), "SCALE", 5.0)),
    ],
    ids=["getattr", "a default", "vars", "attrgetter", "globals", "a module"],
)  # fmt: skip
def test_a_name_that_forward_computes(read: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_noticed(read, change, monkeypatch)


def _says_all(held: Any, key: str) -> Any:
    inner = getattr(held.part(key, 1), "first", key)
    known = "fifth" in globals() and globals()["fifth"]
    return getattr(getattr(inner, "second"), "third", f"{key}"), hasattr(held, "fourth"), known  # noqa: B009


@pytest.mark.parametrize(
    "computes",
    [
        lambda held, key: getattr(held, key),
        lambda held, key: getattr(held, key.name, None),
        lambda held, key: getattr(held, "a" + key),
        lambda held, key: getattr(held, f"a{key}"),
        lambda held, key: getattr(held, "".join(key), 3),
        lambda held, key: getattr(held, key).a,
        lambda held, key: getattr(held, "a" if key else "b"),
        lambda held, key: list(map(getattr, [held], [key])),
        lambda held, key: operator.attrgetter(key)(held),
        lambda held, key: vars(held)[key],
    ],
)
def test_which_code_computes_names(computes: types.FunctionType) -> None:
    assert computes_names(computes.__code__)
    assert not computes_names(_says_all.__code__)


@pytest.mark.parametrize(
    ("enter", "leave"),
    [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), lambda: torch.backends.cuda.enable_flash_sdp(True)),
        (lambda: torch._C._set_mkldnn_enabled(False), lambda: torch._C._set_mkldnn_enabled(True)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (lambda: torch.set_autocast_dtype("cpu", torch.half), lambda: torch.set_autocast_dtype("cpu", torch.bfloat16)),
    ],
    ids=["default dtype", "attention kernel", "oneDNN", "deterministic", "autocast dtype"],
)
def test_torchs_settings_change(enter: Any, leave: Any) -> None:
    def body(self: Any, h: torch.Tensor) -> torch.Tensor:
        q = (h * torch.tensor(1.1)).to(h.dtype).view(1, 2, 4, 4)
        return F.scaled_dot_product_attention(q, q, q).reshape(4, 8) * torch.ones(8).mean().to(h.dtype)

    chosen, model, x = planned(lambda: Net(body))
    try:
        enter()
        with pytest.warns(UserWarning, match="planning anew"):
            compare(chosen, model, x)
    finally:
        leave()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(chosen, model, x)


THREADS = torch.get_num_threads()


def asking(self: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * (2 if torch.get_float32_matmul_precision() == "highest" else 3)
    return h * (2 if torch.backends.cudnn.benchmark else 3) * torch.get_num_threads()


@pytest.mark.parametrize(
    "use",
    [
        lambda other: torch.set_float32_matmul_precision("medium" if other else "highest"),
        lambda other: torch._C._set_cudnn_benchmark(other),  # what torch's own tests keep from being set by attribute
        lambda other: torch.set_num_threads(THREADS + other),
    ],
    ids=["precision", "benchmark", "threads"],
)
def test_a_setting_of_torchs_that_forward_asks_for(use: Callable[[bool], Any]) -> None:
    chosen, model, x = planned(lambda: Net(asking))
    try:
        compare(chosen, model, x)
        use(True)
        with pytest.warns(UserWarning, match="planning anew"):
            compare(chosen, model, x)
    finally:
        use(False)


class Called:
    """Its `__call__` is looked up by Python."""

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h.sin()


def test_a_special_method_that_is_replaced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, model, x = planned(lambda: Net(lambda self, h: self.call(h), call=Called()))
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Called, "__call__", lambda self, h: h * 9)
        compare(chosen, model, x)
    compare(chosen, model, x)


@functools.lru_cache
def remembered(name: str) -> float:
    return COUNTED["steps"] + float(len(name))


def test_what_a_cached_function_remembers() -> None:
    chosen, model, x = planned(lambda: Net(lambda self, h: h * remembered("a")))
    compare(chosen, model, x)
    COUNTED["steps"] += 3
    remembered.cache_clear()
    try:
        with pytest.warns(UserWarning, match="planning anew"):
            compare(chosen, model, x)
    finally:
        COUNTED["steps"] -= 3
        remembered.cache_clear()


# Loss functions -------------------------------------------------------------------------------------------------------


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.power = nn.Dropout(0.5), [2.0]

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.drop(output - F.one_hot(target, 8)).abs().pow(self.power[0]).mean()


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.rand(8), label_smoothing=0.1)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (weighted, setting("label_smoothing", 0.3)),
        (weighted, setting("weight", torch.ones(8))),
        (weighted, setting("weight", None)),
        (weighted, lambda loss: loss.weight.mul_(2)),
        (weighted, setting("reduction", "sum")),
        (weighted, setting("ignore_index", 1)),
        (Criterion, lambda loss: loss.eval()),
        (Criterion, lambda loss: setattr(loss.drop, "p", 0.1)),
        (Criterion, lambda loss: loss.power.__setitem__(0, 3.0)),
        (Criterion, setting("forward", lambda output, target: F.cross_entropy(output, target))),
    ],
)
def test_a_changed_loss(make: Any, change: Any) -> None:
    torch.manual_seed(0)
    model, loss, x, y = nn.Linear(8, 8), make(), x_of(), torch.arange(4)
    chosen = plan(model, (x, y), loss_fn=loss)
    compare(chosen, model, x, y, loss_fn=loss)
    change(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(chosen, model, x, y, loss_fn=loss)


def test_a_loss_behind_a_closure() -> None:
    torch.manual_seed(0)
    model, inner, x, y = nn.Linear(8, 8), nn.CrossEntropyLoss(), x_of(), torch.arange(4)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return inner(output, target)

    chosen = plan(model, (x, y), loss_fn=loss)
    inner.label_smoothing = 0.3
    with pytest.warns(UserWarning, match=r"inner in the closure of .* with label_smoothing=0\.3"):
        compare(chosen, model, x, y, loss_fn=loss)


# Harmless -------------------------------------------------------------------------------------------------------------


class Noted:
    """Compares by running user code, and is not a bool."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


def everything() -> nn.Module:
    model = Net(
        lambda self, h: h * self.cfg.scale * self.table["a"] * self.odd * helper(h),
        cfg=Config(), table={"a": 2.0}, odd=1.0, noted=Noted(), mixed=[torch.ones(2), Noted(), math.nan],
        big=list(range(100_000)),
    )  # fmt: skip
    model.spare = nn.Linear(8, 8)
    return model


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "global_step": setting("global_step", 7),
    "a counter of another type": setting("steps_done", numpy.int64(3)),
    "a flag of a library": setting("_is_hf_initialized", True),
    "a flag on a submodule": setting("first._is_fsdp_managed_module", True),
    "a list of losses": setting("losses", [1.0, 2.0]),
    "a tensor kept": setting("last_loss", torch.ones(())),
    "a config's field that is not read": setting("cfg.unread", 5),
    "a field of the inner config": setting("cfg.inner.unread", 5),
    "a new field of the config": setting("cfg.run_name", "a"),
    "the class's unread attribute": lambda m: setattr(Defaults, "unread", Defaults.unread + 1),
    "a global that is not read": lambda m: COUNTED.__setitem__("steps", COUNTED["steps"] + 1),
    "the same value again": lambda m: (setattr(m, "odd", float("1.0")), setattr(m, "table", {"a": 2.0})),
    "an equal config": setting("cfg", Config()),
    "a method that is not called": setting("export", lambda: None),
    "an object that compares oddly": lambda m: (setattr(m, "noted", Noted()), m.mixed.append(Noted())),
    "a huge list that is not read": lambda m: m.big.append(1),
    "an equal layer": lambda m: setattr(m, "spare", nn.Linear(8, 8)),
    "the layer put back": lambda m: setattr(m, "first", m.first),
    "weights updated": lambda m: [p.data.add_(0.1) for p in m.parameters()],
    "weights replaced": lambda m: setattr(m.first, "weight", nn.Parameter(torch.randn(8, 8))),
    "weights loaded": lambda m: m.load_state_dict(everything().state_dict()),
    "eval and train": lambda m: (m.eval(), m.train()),
    "a hook on a parameter": lambda m: m.first.weight.register_hook(lambda g: None),
    "a module that forward does not use": setting("metric", nn.Linear(3, 3)),
    "names": lambda m: setattr(m, "name", "net"),
    "zero_grad": lambda m: m.zero_grad(set_to_none=False),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_not_read_changes_nothing(name: str) -> None:
    chosen, model, x = planned(everything)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(chosen, model, x)
        HARMLESS[name](model)
        compare(chosen, model, x)
    assert count(chosen) == 1


def scaling(factor: float) -> tuple[Callable[..., torch.Tensor], Callable[[float], None]]:
    """A forward hook, and what changes its factor later."""

    def change(to: float) -> None:
        nonlocal factor
        factor = to

    return lambda module, args, output: output * factor, change


def test_a_hook_made_anew_by_the_same_code_needs_no_plan_of_its_own() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(linear(), nn.ReLU(), linear()), x_of()
    chosen = plan(model, x)
    for factor, plans in ((2.0, 2), (2.0, 2), (3.0, 3), (2.0, 3), (3.0, 3)):
        hook, change = scaling(factor)
        handle = model[0].register_forward_hook(hook)
        compare(chosen, model, x)
        assert count(chosen) == plans
        handle.remove()
    handle = model[0].register_forward_hook(hook)
    compare(chosen, model, x)
    change(0.5)
    compare(chosen, model, x)
    assert count(chosen) == 4


def test_an_attribute_of_a_weight_that_is_not_read_changes_nothing() -> None:
    chosen, model, x = planned(Marked)
    model.layer.weight.steps = 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(chosen, model, x)


class Marking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.weight.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.steps += 1
        return self.layer(x)


def test_an_attribute_that_forward_sets_on_a_weight_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"attribute of a tensor \(steps\) at layer\.weight"):
        planned(Marking)


def test_what_cannot_be_planned_anew_trains_on() -> None:
    """As Lightning's averaging of weights does, which lets batch norms count for a while."""
    torch.manual_seed(0)
    model, x = nn.Sequential(linear(), nn.BatchNorm1d(8), nn.ReLU(), linear()), x_of()
    chosen = plan(model, x)
    compare(chosen, model, x)
    model[1].momentum = None
    with pytest.warns(UserWarning, match=r"cannot trace the model at .*Such calls run in eager, not under the budget"):
        compare(chosen, model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(chosen, model, x)
        model[1].momentum = 0.1
        compare(chosen, model, x)
    assert count(chosen) == 1


class Registering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.register_hook(lambda gradient: gradient * 2)
        return torch.tanh(self.layer(x))


def test_a_hook_that_forward_registers_on_a_weight_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"hook that forward registers on a tensor that it is given at layer\.weight"):
        planned(Registering)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -gradient * ctx.module.strength * factor_of_the_backward(), None


def factor_of_the_backward() -> float:
    return IN_BACKWARD["factor"]


IN_BACKWARD = {"factor": 1.0}


class Reversing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.strength, self.seen, self.how = linear(), linear(), 1.0, 1.0, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)) * self.seen
        if self.how == "function":
            h = Reverse.apply(h, self)
        elif self.how == "hook":
            h.register_hook(lambda gradient: gradient * self.strength * IN_BACKWARD["factor"])
        else:
            gate = h.detach().sigmoid()
            h.register_hook(lambda gradient: gradient * gate * self.strength * IN_BACKWARD["factor"])
        return self.last(h)


@pytest.mark.parametrize("regions", ["whole", ["0"]])
@pytest.mark.parametrize("how", ["function", "hook", "gating hook"])
@pytest.mark.parametrize(
    "change", [lambda m: setattr(m, "strength", 3.0), lambda _: operator.setitem(IN_BACKWARD, "factor", 3.0)],
    ids=["attribute", "dict"],
)
def test_what_the_backward_reads_may_not_change_before_it(
    regions: Any, how: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Reversing(how), linear()), x_of()
    monkeypatch.setitem(IN_BACKWARD, "factor", 1.0)
    chosen = plan(model, x, regions=regions)
    output = chosen.module(x)
    model[0].seen = 2.0  # which the forward alone reads
    output.pow(2).sum().backward()
    model[0].seen = 1.0
    compare(chosen, model, x)
    output = chosen.module(x)
    change(model[0])
    with pytest.raises(ChangedInPlace, match="what the backward reads was changed between forward and backward"):
        output.pow(2).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(chosen, model, x)  # before the forward it may


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.storage_offset(), lambda x: x.untyped_storage().nbytes(), lambda x: x.grad is None,
        lambda x: x._base is None, lambda x: x.is_conj(),
    ],
    ids=["offset", "storage", "grad", "base", "conj"],
)
def test_what_a_plan_cannot_know_of_a_tensor_is_refused(ask: Any) -> None:
    with pytest.raises(Unsupported, match="how a tensor lies in memory|what autograd knows of a tensor"):
        plan(Asks(ask), x_of())


class Asks(nn.Module):
    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.layer, self.ask = linear(), ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * 2 if self.ask(x) else self.layer(x)


def test_a_parameter_as_an_argument_is_one_while_tracing() -> None:
    model, x = Asks(lambda x: isinstance(x, nn.Parameter)), x_of()
    chosen = plan(model, x)
    compare(chosen, model, x)
    with pytest.warns(UserWarning, match="a parameter"):
        compare(chosen, model, nn.Parameter(x.clone(), requires_grad=False))


def test_nothing_is_planned_anew_under_a_mode_that_looks_at_ops() -> None:
    chosen, model, x = planned(lambda: Net(lambda self, h: F.gelu(h) * self.factor, factor=2.0))
    model.factor = 3.0
    with FlopCounterMode(display=False), pytest.warns(UserWarning, match="not used within a TorchDispatchMode"):
        compare(chosen, model, x)
    with pytest.warns(UserWarning, match="planning anew"):
        compare(chosen, model, x)


def test_the_name_of_a_tensors_class_is_its_type() -> None:
    with pytest.raises(Unsupported, match="type"):
        plan(Asks(lambda x: type(x).__name__ == "Tensor"), x_of())


class Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.gelu else result


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_that_looks_at_ops_is_told_of() -> None:
    chosen, _, x = planned(lambda: Net(lambda self, h: F.gelu(h)))
    with Counting() as counting, pytest.warns(UserWarning, match=r"a TorchDispatchMode \(Counting\) is active"):
        chosen.module(x)
    assert counting.ops
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        with Counting():
            chosen.module(x)


def test_a_mode_that_changes_functions_has_steps_run_plain() -> None:
    chosen, model, x = planned(lambda: Net(lambda self, h: F.gelu(h)))
    with Twice(), pytest.warns(UserWarning, match=r"a TorchFunctionMode \(Twice\) is active: the model's own forward"):
        compare(chosen, model, x)
    with Twice(), pytest.raises(Unsupported, match="TorchFunctionMode"):
        planned(lambda: Net(lambda self, h: F.gelu(h)))


# While tracing --------------------------------------------------------------------------------------------------------


class Levelled(nn.Module):
    """Sets an attribute of its own and of a plain object, reads them, and leaves other values there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cfg, self.level = nn.Linear(8, 8), Config(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level, self.cfg.step = 2.0, 3.0
        x = self.layer(x) * self.level * self.cfg.step
        self.level, self.cfg.step = 4.0, 5.0
        return x * self.level


@pytest.mark.filterwarnings("ignore:forward sets")
def test_what_forward_sets_before_it_reads_it_is_its_own() -> None:
    chosen, model, x = planned(Levelled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for level in (None, 4.0, 7.0):
            model.level = model.cfg.step = level
            compare(chosen, model, x)
    assert count(chosen) == 1


class Lent(nn.Module):
    """Calls a layer with parameters and buffers of others, as `functional_call` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lent = {"weight": self.first.weight, "bias": self.shift}
        return torch.func.functional_call(self.second, lent, (self.first(x).sin(),))


def test_what_forward_lends_a_layer_is_its_own() -> None:
    chosen, model, x = planned(Lent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            compare(chosen, model, x)
            model.second.weight = nn.Parameter(torch.ones(8, 8))
    model.second.bias = None  # functional_call then sets an attribute
    with pytest.warns(UserWarning, match="planning anew"):
        compare(chosen, model, x)


def test_how_modules_are_made_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, model, x = planned(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    made = nn.Module.__init__
    # As Dynamo replaces it when it first compiles anything.
    monkeypatch.setattr(nn.Module, "__init__", lambda self, *args, **kwargs: made(self, *args, **kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(chosen, model, x)
    assert count(chosen) == 1


class Curious(nn.Module):
    """Asks what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cfg, self.slots = nn.Linear(8, 8), Config(), Slotted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self) is Curious and type(self.cfg) is Config and self.cfg.__class__ is Config
        assert isinstance(self.slots, Slotted) and not hasattr(self.slots, "__dict__")
        assert self.cfg == Config() and copy.deepcopy(self.cfg) == self.cfg
        return self.layer(x)


@pytest.mark.parametrize("failure", [None, ValueError, KeyboardInterrupt])
def test_the_trace_is_not_noticed_and_leaves_nothing(failure: type[BaseException] | None) -> None:
    import sys

    class Failing(Curious):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if failure is not None and isinstance(self.layer(x), torch._subclasses.functional_tensor.FunctionalTensor):
                raise failure
            return self.layer(x)

    calls: list[str] = []
    watcher = lambda frame, event, arg: calls.append(event)  # noqa: E731
    sys.setprofile(watcher)
    try:
        model: nn.Module = Curious() if failure is None else Failing()
        if failure is None:
            plan(model, x_of())
        else:
            with pytest.raises((PlannerError, failure)):
                plan(model, x_of())
        assert sys.getprofile() is watcher
    finally:
        sys.setprofile(None)
    assert all("__getattribute__" not in vars(kind) for kind in (nn.Module, Config, Slotted, Inner))


def test_a_profiler_goes_on() -> None:
    profiler = cProfile.Profile()
    with profiler:
        plan(nn.Linear(8, 8), x_of())
        helper(torch.ones(2))
    profiler.create_stats()
    assert any(name == "helper" for _, _, name in profiler.stats)  # type: ignore[attr-defined]


class Remembers(nn.Module):
    """Overwrites one buffer, then reads another, and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(linear(), nn.Tanh(), linear())
        self.register_buffer("memory", torch.ones(4, 8))
        self.register_buffer("other", torch.full((4, 8), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.mul_(0.9).add_(x.detach())
        return torch.tanh(self.layer(x)) * self.other + x


def memory_in_common(model: Any) -> torch.Tensor:
    model.other.data = model.memory.data
    return torch.ones(4, 8)


@pytest.mark.parametrize(
    ("change", "argument"),
    [(memory_in_common, "other"), (lambda m: m.memory, "x"), (lambda m: m.memory.detach(), "x")],
)
def test_memory_that_is_overwritten_and_read_elsewhere(change: Callable[[Any], torch.Tensor], argument: str) -> None:
    """A trace of tensors with memory of their own reads what was there before."""
    torch.manual_seed(0)
    model, x = Remembers(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    chosen = plan(model, x, check=False)
    chosen.module(x).sum().backward()
    plain(x).sum().backward()
    given = change(model), change(plain)
    with pytest.warns(UserWarning, match=f"{argument}': got what shares memory with memory, which forward overwrites"):
        found = chosen.module(given[0])
    assert torch.equal(found, plain(given[1]))
    assert torch.equal(chosen.module(x), plain(x))
    assert_same_state(model, plain)
    with pytest.raises(Unsupported, match=f"memory that memory and {argument} share.*clone"):
        plan(model, change(model), regions="whole")


class Vocabulary(nn.Module):
    """Reads a container of thousands of items."""

    def __init__(self, words: Any) -> None:
        super().__init__()
        self.layer, self.words = linear(), words

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * len(self.words)


LARGE: dict[str, Callable[[range], Any]] = {
    "list": list, "tuple": tuple, "frozenset": lambda r: frozenset(map(str, r)), "set": lambda r: set(map(str, r)),
    "dict": lambda r: {str(i): i for i in r}, "objects": lambda r: numpy.array([str(i) for i in r], dtype=object),
}  # fmt: skip


class Table(nn.Module):
    """Reads what lies in a container of thousands of containers and objects, or in many others."""

    def __init__(self, table: Any, path: tuple[Any, ...]) -> None:
        super().__init__()
        self.layer, self.table, self.path = linear(), table, path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.table
        for key in self.path:
            found = found[key]
        return torch.tanh(self.layer(x)) * (found.power if isinstance(found, Inner) else found)


def innermost(found: list[Any], depth: int) -> list[Any]:
    return functools.reduce(operator.getitem, [0] * depth, found)


def nested(depth: int) -> list[Any]:
    found: list[Any] = [2.0]
    found.append(found)  # it holds itself
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("make", "path", "change"),
    [
        (lambda: [[2.0] for _ in range(3000)], (7, 0), lambda t: operator.setitem(t[7], 0, 3.0)),
        (lambda: {f"w{i}": Inner() for i in range(3000)}, ("w7",), lambda t: setattr(t["w7"], "power", 3.0)),
        (lambda: nested(30), (0,) * 31, lambda t: operator.setitem(innermost(t, 30), 0, 3.0)),
    ],
    ids=["lists in a list", "objects in a dict", "deep"],
)
def test_what_lies_in_large_and_deep_containers(make: Any, path: tuple[Any, ...], change: Any) -> None:
    chosen, model, x = planned(lambda: Table(make(), path))
    compare(chosen, model, x)
    change(model.table)
    with pytest.warns(UserWarning, match="planning anew"):
        compare(chosen, model, x)


@pytest.mark.parametrize("kind", LARGE)
def test_what_a_large_container_holds_is_compared(kind: str) -> None:
    make, x = LARGE[kind], torch.randn(4, 8)
    model = Vocabulary(make(range(3000)))
    made = plan(model, x, on_new_shape="error")
    for _ in range(2):
        made.module(x).sum().backward()
    if kind != "frozenset":  # whose order is the memory's
        model.words = make(range(3000))
        made.module(x)
    model.words = make(range(1, 3001))
    with pytest.raises(PlannerError, match="words"):
        made.module(x)


class Asking(nn.Module):
    """Asks what is imported, as libraries do for optional ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if "torch" in sys.modules else x


def test_what_is_imported_later_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    made = plan(Asking(), x, on_new_shape="error")
    monkeypatch.setitem(sys.modules, "imported_later", types.ModuleType("imported_later"))
    made.module(x)


def test_a_replaced_layer_is_not_kept_alive() -> None:
    import gc
    import weakref

    chosen, model, x = planned(Tied)
    compare(chosen, model, x)
    old = weakref.ref(model.a)
    model.a = nn.Linear(8, 8, bias=False)
    with pytest.warns(UserWarning, match="planning anew"):
        chosen.module(x)
    gc.collect()
    assert old() is None


# transformers ---------------------------------------------------------------------------------------------------------


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("change", "stays"),
    [
        (setting("config.output_hidden_states", True), False),
        (setting("config.use_cache", False), False),
        pytest.param(lambda m: m.resize_token_embeddings(40), False, marks=pytest.mark.slow),
        pytest.param(lambda m: setattr(m.transformer.h[0].mlp, "act", nn.ReLU()), False, marks=pytest.mark.slow),
        (lambda m: setattr(m.transformer.h[0].attn, "scaling", 0.5), False),
        (lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.randn(32, 16))), False),
        (lambda m: (setattr(m, "global_step", 3), setattr(m.config, "run", 3), setattr(m, "_is_x", 1)), True),
    ],
    ids=["hidden states", "use_cache", "resized", "activation", "scaled", "untied", "harmless"],
)
def test_a_model_of_transformers(change: Any, stays: bool) -> None:
    torch.manual_seed(0)
    model = gpt2()
    tokens = torch.randint(0, 32, (2, 8))
    chosen = plan(model, {"input_ids": tokens, "labels": tokens})
    change(model)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (chosen.module, model):
            model.zero_grad()
            torch.manual_seed(1)
            out = call(input_ids=tokens, labels=tokens)
            out.loss.backward()
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            results.append((out.loss.detach(), out.keys(), gradients))
    (loss, keys, ours), (plain, expected, theirs) = results
    assert torch.equal(loss, plain) and list(keys) == list(expected)
    assert all(torch.equal(a, b) if a is not None else b is None for a, b in zip(ours, theirs, strict=True))
    assert (count(chosen) == 1) is stays


class Littering(nn.Module):
    """A forward in which the garbage collector runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        litter = [[] for _ in range(3000)]  # type: ignore[var-annotated]
        return self.linear(x).sin().sum() + len(litter)


def test_what_the_garbage_collector_calls_back_is_not_read_by_forward() -> None:
    def count(phase: str, _: Any) -> None:
        COUNTED["collections"] = COUNTED.get("collections", 0) + 1

    model, x = Littering(), torch.randn(3, 4)
    gc.callbacks.append(count)
    try:
        planned = plan(model, x)
        COUNTED["collections"] = COUNTED.get("collections", 0) + 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "planning anew" would be one
            planned.module(x).backward()
    finally:
        gc.callbacks.remove(count)
        COUNTED.pop("collections", None)


@pytest.mark.parametrize("regions", ["whole", ["0"]])
def test_weights_in_other_strides_are_planned_for(regions: Any) -> None:
    norms = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(norms, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    x = torch.randn(4, 3, 12, 12)
    planned = plan(model, x, regions=regions)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"0\.0\.weight.*in strides \(27, 1, 9, 3\)"):
        planned.module(x).square().sum().backward()
    plain(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


class Growing(nn.Module):
    """A long batch makes a longer table, or is counted, which later ones read."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.counts, self.longer = counts, 0
        self.weight = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts and len(x) > 4:
            self.longer += 1
            return (x * self.weight).exp().sum() * self.longer
        if len(x) > len(self.table):
            self.table = torch.arange(float(len(x)))
        return ((x * self.weight).exp() * self.table[: len(x)]).sum()


@pytest.mark.parametrize("counts", [False, True])
def test_what_a_long_batch_leaves_is_left_by_the_plain_forward(counts: bool) -> None:
    model = Growing(counts)
    plain, planned = copy.deepcopy(model), plan(model, torch.randn(3))
    for rows, leaves in ((6, True), (3, False), (6, counts), (8, True), (4, False)):
        x = torch.randn(rows)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = planned.module(x)
        assert any("not under the budget" in str(w.message) for w in caught) is leaves
        loss.backward()
        plain(x).backward()
        assert torch.equal(model.weight.grad, plain.weight.grad)  # type: ignore[arg-type]
        assert (model.longer, len(model.table)) == (plain.longer, len(plain.table))
