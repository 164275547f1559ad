"""Counters that forward keeps in objects of Python's own types: put back after planning, never taken as constant."""

from __future__ import annotations

import ctypes
import functools
import io
import queue
import threading
import types
import typing
import warnings
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from planner import PlannerError, auto_checkpoint

STEPS, SWITCHES = 7, 5
VARIABLE: ContextVar[int] = ContextVar("calls", default=0)


class Named(typing.NamedTuple):
    count: list[int]


class Stamped(io.StringIO):
    """Has attributes besides."""

    count = 0


class Held:
    """One object of each type, that a counter may be kept in."""

    def __init__(self) -> None:
        VARIABLE.set(0)
        self.named, self.records = Named([0]), numpy.array([[0], None], dtype=object)
        self.numbers, self.view = array("d", [0.0]), memoryview(bytearray(1))
        self.cached = functools.cache(lambda: [0])
        self.object = functools.lru_cache(maxsize=2)(lambda: types.SimpleNamespace(count=0))
        self.ordered = OrderedDict((i, i) for i in range(9))
        self.plain = dict(self.ordered)
        self.shown = types.MappingProxyType({"count": [0]})
        self.referred = weakref.ref(self.ordered)
        self.c, self.text = ctypes.c_int(0), io.StringIO(newline="\r\n")
        self.stamped = Stamped()


def in_a_namedtuple(held: Any) -> int:
    held.named.count[0] += 1
    return held.named.count[0]


def in_an_array_of_objects(held: Any) -> int:
    held.records[0][0] += 1
    return held.records[0][0]


def in_an_array(held: Any) -> float:
    held.numbers[0] += 1
    return held.numbers[0]


def in_a_view(held: Any) -> int:
    held.view[0] += 1
    return held.view[0]


def in_a_cached_list(held: Any) -> int:
    held.cached()[0] += 1
    return held.cached()[0]


def in_a_cached_object(held: Any) -> int:
    held.object().count += 1
    return held.object().count


def in_an_order(held: Any) -> int:
    held.ordered.move_to_end(next(iter(held.ordered)))
    return next(iter(held.ordered))


def in_the_order_of_a_dict(held: Any) -> int:
    first = next(iter(held.plain))
    held.plain[first] = held.plain.pop(first)
    return next(iter(held.plain))


def behind_a_proxy(held: Any) -> int:
    held.shown["count"][0] += 1
    return held.shown["count"][0]


def behind_a_reference(held: Any) -> int:
    held.referred()[len(held.ordered)] = 0
    return len(held.ordered) - 9


def in_a_context_variable(_: Any) -> int:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def in_a_number_of_c(held: Any) -> int:
    held.c.value += 1
    return held.c.value


def in_a_stream(held: Any) -> int:
    held.text.write("\n")
    return len(held.text.getvalue()) // 2


def on_a_stream(held: Any) -> int:
    held.stamped.count += 1
    return held.stamped.count


COUNTERS = [
    in_a_namedtuple, in_an_array_of_objects, in_an_array, in_a_view, in_a_cached_list, in_a_cached_object, in_an_order,
    in_the_order_of_a_dict, behind_a_proxy, behind_a_reference, in_a_context_variable, in_a_number_of_c, in_a_stream,
    on_a_stream,
]  # fmt: skip


class Scheduled(nn.Module):
    """Computes something else from a call on."""

    def __init__(self, counted: Callable[[Any], float]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.held, self.counted = Held(), counted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * (2.0 if self.counted(self.held) >= SWITCHES else 1.0)).square().mean()


class Around(nn.Module):
    """Holds it as its region."""

    def __init__(self, counted: Callable[[Any], float]) -> None:
        super().__init__()
        self.inner = Scheduled(counted)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def made(kind: type[nn.Module], counted: Callable[[Any], float]) -> nn.Module:
    torch.manual_seed(0)
    return kind(counted)


def trained(model: nn.Module, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = module(x)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.every(1)
@pytest.mark.parametrize("counted", COUNTERS, ids=lambda c: c.__name__)
def test_a_counter_is_neither_moved_by_planning_nor_taken_as_constant(counted: Callable[[Any], float]) -> None:
    x = torch.randn(3, 4)
    plain = made(Scheduled, counted)
    wanted = trained(plain, plain, x)
    assert not torch.equal(wanted[0], wanted[-5]), "the schedule shows"
    model = made(Scheduled, counted)
    plan = auto_checkpoint(model, x, progress=False, check=False)
    assert counted(model.held) == 1, "planning leaves it at 0"
    model = made(Scheduled, counted)
    plan = auto_checkpoint(model, x, progress=False, check=False)
    found = trained(model, plan.module, x)
    assert len(found) == len(wanted) and all(map(torch.equal, wanted, found))


@pytest.mark.every(1)
@pytest.mark.parametrize("counted", COUNTERS, ids=lambda c: c.__name__)
def test_a_region_with_a_counter_is_refused_by_its_name(counted: Callable[[Any], float]) -> None:
    with pytest.raises(PlannerError, match="changes and reads"):
        auto_checkpoint(made(Around, counted), torch.randn(3, 4), regions=["inner"], progress=False, check=False)


def test_what_other_threads_use_and_c_points_to_is_left_alone() -> None:
    model = made(Scheduled, lambda _: 0)
    waiting: queue.Queue[int] = queue.Queue()
    model.waiting, model.event, model.pointer = waiting, threading.Event(), ctypes.py_object([1])
    model.buffer, model.closed = bytearray(3), io.StringIO()
    model.closed.close()
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(waiting.get()))
    thread.start()
    auto_checkpoint(model, torch.randn(3, 4), progress=False, check=False)
    waiting.put(5)
    thread.join(10)
    model.buffer.extend(b"more")
    assert got == [5] and model.pointer.value == [1]


def test_a_large_cache_hides_no_counter() -> None:
    x = torch.randn(3, 4)
    kept = functools.cache(lambda i: types.SimpleNamespace(i=i))
    for i in range(60_000):
        kept(i)
    model = made(Scheduled, in_a_cached_list)
    model.kept = kept
    plan = auto_checkpoint(model, x, progress=False, check=False)
    plain = made(Scheduled, in_a_cached_list)
    assert all(map(torch.equal, trained(plain, plain, x), trained(model, plan.module, x)))
