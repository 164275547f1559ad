"""Forwards whose next call would not compute what a trace of this one shows: equal numbers, a refusal, or a word.

Each case is a forward. Three planned steps are compared with three plain ones of a twin: outputs, gradients, buffers,
plain attributes and the generators of torch, Python and NumPy. A case says which of these it expects:

* same: all of that is equal, and nothing is said.
* said: outputs and gradients are equal, and a warning or a note tells what is not.
* refused: `Unsupported` or `CaptureError`; where a line is at fault (marked `# <<`) the error shows it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import operator
import os
import pathlib
import random
import secrets
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from random import random as draw_one
from time import perf_counter as stopwatch
from typing import Any

import numpy as np
import pytest
import torch
from torch import initial_seed, manual_seed, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from passes.errors import CaptureError, Unsupported
from passes.trace.structure import flatten
from passes.trace.watch import CHECKPOINTED

from .steps import Wrap, linear, plan

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One forward, what it needs on its module, and what is expected of its plan."""

    name: str
    kind: str
    expected: str
    forward: Callable[..., Any]
    attributes: dict[str, Callable[[], Any]]
    marked: bool

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        layer = linear()
        layer.weight.data += torch.eye(8)  # values of some size, so that a wrong factor shows
        model = Wrap(self.forward, layer=layer)
        for name, make in self.attributes.items():
            value = make()
            if type(value) is torch.Tensor and name.startswith("buffer"):
                model.register_buffer(name, value)
            else:
                setattr(model, name, value)
        _reset_globals()
        return model


CASES: dict[str, Case] = {}


def case(kind: str, expected: str, **attributes: Callable[[], Any]) -> Callable[..., Any]:
    """Register a forward as a case; `attributes` are set on its module."""

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        with open(__file__, encoding="utf-8") as file:
            first = forward.__code__.co_firstlineno
            body = list(itertools.islice(file, first - 1, first + 25))
        body = list(itertools.takewhile(lambda line: line.strip() or line is body[0], body))
        marked = any("# <<" in line for line in body)
        assert forward.__name__ not in CASES
        CASES[forward.__name__] = Case(forward.__name__, kind, expected, forward, attributes, marked)
        return forward

    return register


# Globals that forwards change ---------------------------------------------------------------------------------------

COUNTER = 0
SEEN: list[Any] = []
TABLE: dict[str, Any] = {}
CYCLE = itertools.cycle([1.0, 2.0, 3.0])


class Config:
    """A plain object, with an attribute of its class."""

    calls = 0

    def __init__(self) -> None:
        self.n, self.rate, self.seen = 0, 0.5, []


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("n", "value")

    def __init__(self, value: Any = None) -> None:
        self.n, self.value = 0, value


@dataclasses.dataclass
class Record:
    """A dataclass, which is taken apart."""

    value: Any
    n: int = 1


class Plain:
    """An object with a `__dict__`, which is taken apart."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _reset_globals() -> None:
    global COUNTER
    COUNTER = 0
    SEEN.clear()
    TABLE.clear()
    Config.calls = 0
    if hasattr(Wrap, "steps"):
        del Wrap.steps
    remembered.__defaults__[0].clear()  # type: ignore[index]
    closure.reset()  # type: ignore[attr-defined]
    a_default_read_late.__defaults__[0].clear()  # type: ignore[index]
    cached_mask.cache_clear()
    cached_noise.cache_clear()
    helper.count = 0  # type: ignore[attr-defined]


# A.2: torch's generators --------------------------------------------------------------------------------------------


@case("A.2", "refused")
def reseeds(self: Any, x: torch.Tensor) -> Any:
    torch.manual_seed(3)  # <<
    return self.layer(x) * torch.rand(4, 8)


@case("A.2", "refused")
def reseeds_by_an_alias(self: Any, x: torch.Tensor) -> Any:
    manual_seed(3)  # <<
    return F.dropout(self.layer(x))


@case("A.2", "refused")
def reseeds_after_the_last_draw(self: Any, x: torch.Tensor) -> Any:
    y = F.dropout(self.layer(x))
    torch.random.manual_seed(7)  # <<
    return y


@case("A.2", "refused")
def reseeds_from_entropy(self: Any, x: torch.Tensor) -> Any:
    torch.seed()  # <<
    return F.dropout(self.layer(x))


@case("A.2", "refused")
def forks(self: Any, x: torch.Tensor) -> Any:
    with torch.random.fork_rng():  # <<
        noise = torch.rand(4, 8)
    return self.layer(x) * noise + torch.rand(4, 8)


@case("A.2", "refused")
def forks_with_a_seed(self: Any, x: torch.Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):  # <<
        torch.manual_seed(1)
        noise = torch.rand(4, 8)
    return F.dropout(self.layer(x)) * noise


@case("A.2", "refused")
def forks_within_a_fork(self: Any, x: torch.Tensor) -> Any:
    with torch.random.fork_rng(), torch.random.fork_rng():  # <<
        noise = torch.rand(4, 8)
    return self.layer(x) * noise


@case("A.2", "same")
def forks_not_at_all(self: Any, x: torch.Tensor) -> Any:
    with torch.random.fork_rng(enabled=False):
        noise = torch.rand(4, 8)
    return F.dropout(self.layer(x)) * noise


@case("A.2", "refused")
def draws_the_same_twice(self: Any, x: torch.Tensor) -> Any:
    state = torch.get_rng_state()  # <<
    y = F.dropout(self.layer(x))
    torch.set_rng_state(state)
    return y + F.dropout(self.layer(x))


@case("A.2", "refused", kept=torch.get_rng_state)
def sets_a_kept_state(self: Any, x: torch.Tensor) -> Any:
    torch.set_rng_state(self.kept)  # <<
    return F.dropout(self.layer(x))


@case("A.2", "refused")
def default_generator_by_name(self: Any, x: torch.Tensor) -> Any:
    torch.default_generator.manual_seed(2)  # <<
    return F.dropout(self.layer(x))


@case("A.2", "refused")
def asks_for_the_seed(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (1 + initial_seed() % 5)  # <<


@case("A.2", "refused")
def a_generator_made_in_forward(self: Any, x: torch.Tensor) -> Any:
    generator = torch.Generator()
    generator.manual_seed(4)  # <<
    return self.layer(x) * torch.rand(4, 8, generator=generator)


@case("A.2", "refused", generator=torch.Generator)
def draws_from_its_own_generator(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * torch.rand(4, 8, generator=self.generator)


@case("A.2", "refused", generator=torch.Generator)
def dropout_by_its_own_generator(self: Any, x: torch.Tensor) -> Any:
    mask = torch.empty(4, 8).bernoulli_(0.5, generator=self.generator)
    return self.layer(x) * mask


@case("A.2", "refused", generator=torch.Generator)
def seeds_its_own_generator(self: Any, x: torch.Tensor) -> Any:
    self.generator.manual_seed(5)  # <<
    return self.layer(x) * torch.randn(4, 8, generator=self.generator)


@case("A.2", "refused")
def seeds_every_device(self: Any, x: torch.Tensor) -> Any:
    torch.cuda.manual_seed_all(5)  # <<
    return F.dropout(self.layer(x))


@case("A.2", "refused")
def reseeds_within_a_helper(self: Any, x: torch.Tensor) -> Any:
    def inner() -> torch.Tensor:
        torch.manual_seed(9)  # <<
        return torch.rand(4, 8)

    return self.layer(x) * inner()


@case("A.2", "refused")
def reseeds_and_hides_the_error(self: Any, x: torch.Tensor) -> Any:
    with contextlib.suppress(Exception):
        torch.manual_seed(9)  # <<
    return F.dropout(self.layer(x))


@case("A.2", "refused")
def reseeds_through_map(self: Any, x: torch.Tensor) -> Any:
    list(map(torch.manual_seed, [1]))  # <<
    return F.dropout(self.layer(x))


@case("A.2", "same")
def draws_and_nothing_else(self: Any, x: torch.Tensor) -> Any:
    return F.dropout(self.layer(x)) + torch.rand_like(x) * torch.randn(4, 8)


@case("A.2", "same")
def checkpoint_forks_by_itself(self: Any, x: torch.Tensor) -> Any:
    return checkpoint(lambda t: F.dropout(self.layer(t)).tanh(), x, use_reentrant=False)


@case("A.2", "refused")
def checkpoint_that_draws_anew(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return checkpoint(lambda t: F.dropout(t).tanh(), y, use_reentrant=False, preserve_rng_state=False)  # <<


@case("A.2", "refused", cell=lambda: nn.LSTM(8, 8, 2, dropout=0.5))
def checkpoint_that_draws_anew_in_a_checkpoint(self: Any, x: torch.Tensor) -> Any:
    def outer(t: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: self.cell(t)[0], t, use_reentrant=False, preserve_rng_state=False)  # <<

    return checkpoint(outer, self.layer(x), use_reentrant=False)


@case("A.2", "same")
def checkpoint_that_does_not_draw(self: Any, x: torch.Tensor) -> Any:
    def step(t: torch.Tensor) -> torch.Tensor:
        t = F.scaled_dot_product_attention(t[None], t[None], t[None])[0]
        return self.layer(F.dropout(t, training=False)).tanh()

    y = checkpoint(step, x, use_reentrant=False, preserve_rng_state=False)
    with torch.no_grad():  # nothing is recomputed
        z = checkpoint(F.dropout, y, use_reentrant=False, preserve_rng_state=False)
    return F.dropout(y) + z


@case("A.2", "refused")
def a_random_answer_from_a_constant(self: Any, x: torch.Tensor) -> Any:
    if torch.rand_like(torch.ones(())) < 0.5:  # <<
        return self.layer(x)
    return self.layer(x) * 2


@case("A.2", "refused")
def a_coin_from_a_constant(self: Any, x: torch.Tensor) -> Any:
    keep = torch.bernoulli(torch.tensor(0.5))
    return self.layer(x) * (2 if keep.bool().item() else 1)  # <<


# A.3: Python's and NumPy's randomness, the clock, what is outside ---------------------------------------------------


@case("A.3", "refused")
def layer_drop(self: Any, x: torch.Tensor) -> Any:
    if random.random() < 0.5:  # <<
        return self.layer(x)
    return self.layer(self.layer(x))


@case("A.3", "refused")
def layer_drop_by_an_alias(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (2 if draw_one() < 0.5 else 1)  # <<


@case("A.3", "refused", rng=lambda: random.Random(0))
def an_instance_of_random(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * self.rng.uniform(0.5, 1.5)  # <<


@case("A.3", "refused")
def a_choice(self: Any, x: torch.Tensor) -> Any:
    return random.choice([F.relu, F.gelu])(self.layer(x))  # <<


@case("A.3", "refused")
def a_shuffle(self: Any, x: torch.Tensor) -> Any:
    order = list(range(4))
    random.shuffle(order)  # <<
    return self.layer(x)[order]


@case("A.3", "refused")
def random_through_map(self: Any, x: torch.Tensor) -> Any:
    factors = list(map(random.gauss, [1.0], [0.1]))  # <<
    return self.layer(x) * factors[0]


@case("A.3", "refused")
def numpy_mask(self: Any, x: torch.Tensor) -> Any:
    mask = np.random.rand(4, 8) < 0.5  # <<
    return self.layer(x) * torch.from_numpy(mask)


@case("A.3", "refused")
def numpy_permutation(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x)[torch.from_numpy(np.random.permutation(4))]  # <<


@case("A.3", "refused", rng=lambda: np.random.default_rng(0))
def numpy_generator(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * float(self.rng.random())  # <<


@case("A.3", "refused", rng=lambda: [np.random.RandomState(0)])
def numpy_random_state_in_a_list(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * float(self.rng[0].uniform())  # <<


RNG = np.random.default_rng(0)


@case("A.3", "refused")
def numpy_generator_of_the_module(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * RNG.normal()  # <<


@case("A.3", "refused")
def numpy_generator_from_entropy(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * np.random.default_rng().random()  # <<


@case("A.3", "said")
def numpy_reseeded_with_a_constant(self: Any, x: torch.Tensor) -> Any:
    np.random.seed(1)
    return self.layer(x) * float(np.random.rand())


@case("A.3", "refused")
def secret_bits(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (1 + secrets.randbelow(3))  # <<


@case("A.3", "refused")
def entropy(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (1 + os.urandom(1)[0])  # <<


@case("A.3", "refused")
def unique_numbers(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (uuid.uuid4().int % 7 + 1)  # <<


@case("A.3", "refused")
def the_time(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (time.time() % 10)  # <<


@case("A.3", "refused")
def a_stopwatch(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (1 + stopwatch() % 1)  # <<


@case("A.3", "refused")
def monotonic_time(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) if time.monotonic_ns() % 2 else self.layer(x) * 2  # <<


@case("A.3", "refused")
def today(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (1 + datetime.datetime.now().microsecond % 5)  # <<


@case("A.3", "refused")
def a_file(self: Any, x: torch.Tensor) -> Any:
    with open(os.devnull, encoding="utf-8") as file:  # <<
        return self.layer(x) * (1 + len(file.read()))


@case("A.3", "refused")
def a_path(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (1 + len(pathlib.Path(os.devnull).read_text(encoding="utf-8")))  # <<


@case("A.3", "refused")
def the_process(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (1 + os.getpid() % 3)  # <<


@case("A.3", "refused")
def the_thread(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (1 + threading.get_ident() % 3)  # <<


@case("A.3", "said")
def the_environment(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * float(os.environ.get("PLANNER_TEST_SCALE", "2"))


@case("A.3", "same")
def logs_and_warns(self: Any, x: torch.Tensor) -> Any:
    import logging

    logging.getLogger("planner.test").debug("a forward")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("told", stacklevel=1)
    return self.layer(x)


@case("A.3", "same")
def numpy_without_randomness(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * torch.from_numpy(np.linspace(0, 1, 8, dtype=np.float32)) * float(np.prod([1, 2]))


@case("A.3", "same")
def dates_without_a_clock(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * datetime.timedelta(seconds=2).total_seconds() * math_of(2)


def math_of(n: int) -> int:
    return n * n


# A.4: Python state that forward changes -----------------------------------------------------------------------------


@case("A.4", "refused", n=lambda: 0)
def warm_up(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return self.layer(x) * min(1, self.n / 10)  # <<


@case("A.4", "refused", n=lambda: 0)
def warm_up_that_begins_late(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return self.layer(x) * (2 if self.n > 100 else 1)  # <<


@case("A.4", "refused", n=lambda: 0)
def returns_the_old_count(self: Any, x: torch.Tensor) -> Any:
    old = self.n  # <<
    self.n = self.n + 1  # <<
    return self.layer(x), old


@case("A.4", "refused", n=lambda: 0)
def count_read_by_name(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return self.layer(x) if getattr(self, "n") < 50 else x  # noqa: B009  # <<


@case("A.4", "same", n=lambda: 0)
def a_count_nobody_reads(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return self.layer(x)


@case("A.4", "same", last=lambda: None)
def remembers_its_output(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    self.last = y
    return y.tanh()


@case("A.4", "same", seen=list)
def a_log_nobody_reads(self: Any, x: torch.Tensor) -> Any:
    self.seen.append(tuple(x.shape))
    return self.layer(x)


@case("A.4", "refused", seen=list)
def a_list_that_grows(self: Any, x: torch.Tensor) -> Any:
    self.seen.append(1)
    return self.layer(x) * len(self.seen)  # <<


@case("A.4", "refused", stats=lambda: {"n": 0})
def a_dict_that_counts(self: Any, x: torch.Tensor) -> Any:
    self.stats["n"] += 1
    return self.layer(x) * self.stats["n"]  # <<


@case("A.4", "refused", deep=lambda: {"a": [{"n": 0}]})
def a_nested_count(self: Any, x: torch.Tensor) -> Any:
    self.deep["a"][0]["n"] += 1
    return self.layer(x) * self.deep["a"][0]["n"]  # <<


@case("A.4", "refused", seen=set)
def a_set_that_grows(self: Any, x: torch.Tensor) -> Any:
    self.seen.add(len(self.seen))  # <<
    return self.layer(x) * len(self.seen)  # <<


@case("A.4", "refused", queue=lambda: collections.deque([1.0, 2.0, 3.0]))
def a_deque_that_turns(self: Any, x: torch.Tensor) -> Any:
    self.queue.rotate(1)  # <<
    return self.layer(x) * self.queue[0]  # <<


@case("A.4", "refused", cfg=Config)
def an_object_that_counts(self: Any, x: torch.Tensor) -> Any:
    self.cfg.n += 1
    return self.layer(x) * self.cfg.n  # <<


@case("A.4", "refused", cfg=Slotted)
def slots_that_count(self: Any, x: torch.Tensor) -> Any:
    self.cfg.n += 1
    return self.layer(x) * self.cfg.n  # <<


@case("A.4", "refused")
def a_class_that_counts(self: Any, x: torch.Tensor) -> Any:
    Config.calls += 1
    return self.layer(x) * Config.calls  # <<


@case("A.4", "refused")
def a_global_that_counts(self: Any, x: torch.Tensor) -> Any:
    global COUNTER
    COUNTER += 1
    return self.layer(x) * COUNTER  # <<


@case("A.4", "refused")
def a_global_list(self: Any, x: torch.Tensor) -> Any:
    SEEN.append(1)
    return self.layer(x) * len(SEEN)  # <<


@case("A.4", "refused")
def a_global_read_late(self: Any, x: torch.Tensor) -> Any:
    TABLE["n"] = TABLE.get("n", 0) + 1  # <<
    return self.layer(x) * (0 if TABLE["n"] > 20 else 1)  # <<


def _closure() -> Callable[..., Any]:
    n = 0

    def forward(self: Any, x: torch.Tensor) -> Any:
        nonlocal n
        n += 1
        return self.layer(x) * n  # <<

    def reset() -> None:
        nonlocal n
        n = 0

    forward.__name__, forward.reset = "a_variable_of_a_closure", reset  # type: ignore[attr-defined]
    return forward


closure = case("A.4", "refused")(_closure())


@case("A.4", "refused")
def remembered(self: Any, x: torch.Tensor, seen: list[int] = []) -> Any:  # noqa: B006
    seen.append(1)  # <<
    return self.layer(x) * len(seen)  # <<


@case("A.4", "refused")
def helper(self: Any, x: torch.Tensor) -> Any:
    helper.count += 1  # type: ignore[attr-defined]
    return self.layer(x) * helper.count  # type: ignore[attr-defined]  # <<


@case("A.4", "refused", it=lambda: itertools.count(1))
def an_iterator_advanced(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * next(self.it)  # <<


@case("A.4", "refused", it=lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]))
def a_list_iterator_advanced(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * next(self.it)  # <<


@case("A.4", "refused", it=lambda: (float(i) for i in range(100)))
def a_generator_advanced(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * next(self.it)  # <<


@case("A.4", "refused", buffer=lambda: torch.ones(8))
def buffer_data_replaced(self: Any, x: torch.Tensor) -> Any:
    self.buffer.data = self.buffer * 2  # <<
    return self.layer(x) * self.buffer


@case("A.4", "refused")
def weight_data_replaced(self: Any, x: torch.Tensor) -> Any:
    self.layer.weight.data = self.layer.weight.data * 0.5  # <<
    return self.layer(x)


@case("A.4", "refused")
def weight_data_transposed(self: Any, x: torch.Tensor) -> Any:
    self.layer.weight.data = self.layer.weight.data.t()  # <<
    return self.layer(x)


@case("A.4", "same")
def weight_data_changed_by_an_operator(self: Any, x: torch.Tensor) -> Any:
    self.layer.weight.data *= 0.5
    return self.layer(x)


@case("A.4", "refused", buffer=lambda: torch.ones(8))
def buffer_set(self: Any, x: torch.Tensor) -> Any:
    self.buffer.set_(self.buffer * 2)  # <<
    return self.layer(x) * self.buffer


@case("A.4", "same", buffer=lambda: torch.ones(8))
def buffer_data_copied_into(self: Any, x: torch.Tensor) -> Any:
    self.buffer.data.copy_(self.buffer * 2)
    return self.layer(x) * self.buffer


@case("A.4", "same", buffer=lambda: torch.ones(8))
def buffer_assigned(self: Any, x: torch.Tensor) -> Any:
    self.buffer = self.buffer * 2
    return self.layer(x) * self.buffer


@case("A.4", "refused", buffer=lambda: torch.eye(8))
def buffer_assigned_in_other_strides(self: Any, x: torch.Tensor) -> Any:
    self.buffer = (self.buffer * 2).t()
    return self.layer(x) * self.buffer.sum(0)


@case("A.4", "same", buffer=lambda: torch.ones(8))
def buffer_assigned_whose_old_value_is_returned(self: Any, x: torch.Tensor) -> Any:
    old = self.buffer
    self.buffer = old * 2
    return self.layer(x) * self.buffer, old


@case("A.4", "same", buffer=lambda: torch.zeros(()))
def a_counter_in_a_buffer(self: Any, x: torch.Tensor) -> Any:
    self.buffer += 1
    return self.layer(x) * self.buffer


@case("A.4", "refused", count=lambda: torch.zeros(()))
def a_counter_in_a_plain_tensor(self: Any, x: torch.Tensor) -> Any:
    self.count += 1  # <<
    return self.layer(x) * self.count


@case("A.4", "refused", tables=lambda: {"a": [torch.zeros(8)]})
def a_plain_tensor_in_a_dict(self: Any, x: torch.Tensor) -> Any:
    self.tables["a"][0].add_(1)  # <<
    return self.layer(x) * self.tables["a"][0]


@case("A.4", "refused", array=lambda: np.ones(8, dtype=np.float32))
def an_array_changed(self: Any, x: torch.Tensor) -> Any:
    self.array += 1  # <<
    return self.layer(x) * torch.tensor(self.array)


@case("A.4", "said", state=lambda: None)
def recurrent_state(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x) if self.state is None else self.layer(x) + self.state
    self.state = y.detach()
    return y


@case("A.4", "said", average=lambda: 0.0)
def a_moving_average(self: Any, x: torch.Tensor) -> Any:
    self.average = 0.9 * self.average + 0.1 * x.detach().mean()
    return self.layer(x) - self.average


@case("A.4", "said", mask=lambda: None)
def the_first_batch_remembered(self: Any, x: torch.Tensor) -> Any:
    if self.mask is None:
        self.mask = x > 0
    return self.layer(x) * self.mask


@case("A.4", "said", noise=lambda: None)
def the_first_draw_remembered(self: Any, x: torch.Tensor) -> Any:
    if self.noise is None:
        self.noise = torch.rand(4, 8)
    return self.layer(x) * self.noise


@case("A.4", "said", mask=lambda: None)
def a_causal_mask_remembered(self: Any, x: torch.Tensor) -> Any:
    if self.mask is None:
        self.mask = torch.ones(4, 8).tril_()
    return self.layer(x) * self.mask


@case("A.4", "said", tables=dict, buffer=lambda: torch.arange(8.0))
def tables_remembered(self: Any, x: torch.Tensor) -> Any:
    n = x.shape[0]
    if n not in self.tables:
        self.tables[n] = (torch.arange(n)[:, None] * self.buffer).cos()
    return self.layer(x) * self.tables[n]


@case("A.4", "said", ready=lambda: False)
def prepares_itself(self: Any, x: torch.Tensor) -> Any:
    if not self.ready:
        self.ready = True
    return self.layer(x)


@case("A.4", "refused", ready=lambda: False)
def the_first_call_differs(self: Any, x: torch.Tensor) -> Any:
    if self.ready:
        return self.layer(x)
    self.ready = True  # <<
    return self.layer(x) * 2


@case("A.4", "refused", flag=lambda: False)
def every_second_call_differs(self: Any, x: torch.Tensor) -> Any:
    self.flag = not self.flag
    return self.layer(x) * (2 if self.flag else 1)  # <<


@case("A.4", "refused")
def builds_a_layer(self: Any, x: torch.Tensor) -> Any:
    if not hasattr(self, "extra"):
        self.extra = nn.Linear(8, 8)  # <<
    return self.extra(self.layer(x))  # <<


@case("A.4", "same", total=lambda: 0)
def written_then_read(self: Any, x: torch.Tensor) -> Any:
    self.aux = self.layer(x).pow(2).mean()
    return self.layer(x) + self.aux


@case("A.4", "same", parts=list)
def a_list_rebuilt(self: Any, x: torch.Tensor) -> Any:
    self.parts = []
    for row in (0, 1):
        self.parts.append(self.layer(x)[row])
    return torch.stack(self.parts)


@case("A.4", "same", cfg=Config)
def state_only_read(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * self.cfg.rate + len(SEEN) + COUNTER


@functools.lru_cache
def cached_mask(n: int) -> torch.Tensor:
    return torch.ones(n, 8).tril()


@functools.lru_cache
def cached_noise(n: int) -> torch.Tensor:
    return torch.rand(n, 8)


@case("A.4", "same")
def a_cached_function(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * cached_mask(x.shape[0])


@functools.lru_cache(maxsize=4)
def cached_positions(mask: torch.Tensor, scale: float) -> torch.Tensor:
    return mask.cumsum(-1) * scale


@case("A.4", "same")
def a_function_cached_for_a_tensor_of_the_step(self: Any, x: torch.Tensor) -> Any:
    mask = x > 0
    return self.layer(x) * cached_positions(mask, 0.5) + cached_positions(mask, 0.5)


CACHED_PRODUCT = functools.lru_cache(functools.partial(operator.mul, 3))
CACHED_SUM = functools.lru_cache(functools.partial(lambda a, b: a + b, 1))


@case("A.4", "same")
def a_cached_partial_function(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * CACHED_PRODUCT(2) + CACHED_SUM(2)


class Unsized(tuple[int, ...]):
    """e3nn's representations are such tuples."""

    def __len__(self) -> int:
        raise NotImplementedError


@case("A.4", "same", sizes=lambda: Unsized((1, 2)))
def a_tuple_that_has_no_length(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * self.sizes[1]


@case("A.4", "refused")
def a_cached_draw(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * cached_noise(x.shape[0])  # <<


@case("A.4", "refused")
def a_default_read_late(self: Any, x: torch.Tensor, seen: list[int] = []) -> Any:  # noqa: B006
    seen.append(1)
    return self.layer(x) * (2 if len(seen) > 50 else 1)  # <<


@case("A.4", "refused", n_0=lambda: 0)
def a_computed_name(self: Any, x: torch.Tensor) -> Any:
    name = "_".join(("n", "0"))
    setattr(self, name, getattr(self, name) + 1)  # <<
    return self.layer(x) * (2 if getattr(self, name) > 50 else 1)


@case("A.4", "refused")
def a_training_flag(self: Any, x: torch.Tensor) -> Any:
    y = F.dropout(self.layer(x), 0.5, self.layer.training)
    self.layer.training = not self.layer.training  # <<
    return y


@case("A.4", "refused", data=collections.UserDict)
def a_user_dict(self: Any, x: torch.Tensor) -> Any:
    self.data["n"] = self.data.get("n", 0) + 1  # <<
    return self.layer(x) * self.data["n"]  # <<


@case("A.4", "refused", add=lambda: functools.partial(_bump, Config()))
def an_object_in_a_partial(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * self.add()


def _bump(cfg: Config) -> int:
    cfg.n += 1
    return cfg.n


@case("A.4", "said", table=lambda: None)
def a_buffer_registered_at_the_first_call(self: Any, x: torch.Tensor) -> Any:
    if self.table is None:
        self.table = x.detach().mean(0)
    return self.layer(x) * self.table


@case("A.4", "refused", first=lambda: True)
def data_dependent_start(self: Any, x: torch.Tensor) -> Any:
    if self.first:
        with torch.no_grad():
            self.layer.bias.copy_(-self.layer(x).mean(0))
        self.first = False  # <<
    return self.layer(x)


class Jitter(torch.autograd.Function):
    """Reseeds in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch.manual_seed(5)  # << (not in the case's own body)
        return gradient * torch.rand_like(gradient)


@case("A.2", "refused")
def reseeds_in_the_backward(self: Any, x: torch.Tensor) -> Any:
    return Jitter.apply(self.layer(x))


class Shaky(torch.autograd.Function):
    """Draws from Python's generator in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * random.random()


@case("A.3", "refused")
def python_randomness_in_the_backward(self: Any, x: torch.Tensor) -> Any:
    return Shaky.apply(self.layer(x))


@case("A.4", "refused", cfg=collections.Counter)
def a_counter_object(self: Any, x: torch.Tensor) -> Any:
    self.cfg["n"] += 1
    return self.layer(x) * self.cfg["n"]  # <<


@case("A.4", "refused", cfg=lambda: collections.defaultdict(int))
def a_default_dict(self: Any, x: torch.Tensor) -> Any:
    self.cfg["n"] += 1
    return self.layer(x) * (2 if self.cfg["n"] > 30 else 1)  # <<


@case("A.4", "refused")
def an_attribute_of_its_class(self: Any, x: torch.Tensor) -> Any:
    type(self).steps = getattr(type(self), "steps", 0) + 1  # <<
    return self.layer(x) * type(self).steps  # <<


@case("A.4", "refused")
def a_global_iterator(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * next(CYCLE)  # <<


@case("A.4", "refused", its=lambda: {"a": iter(range(1, 99))})
def an_iterator_in_a_dict(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * next(self.its["a"])  # <<


@case("A.4", "refused")
def swaps_its_layers(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    self.layer, self.other = nn.Identity(), self.layer
    return y


@case("A.4", "refused")
def freezes_a_parameter(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    self.layer.bias.requires_grad_(False)  # <<
    return y


@case("A.4", "refused")
def reads_a_gradient(self: Any, x: torch.Tensor) -> Any:
    found = self.layer.weight.grad  # <<
    return self.layer(x) if found is None else self.layer(x) * 2


@case("A.4", "refused")
def drops_a_gradient(self: Any, x: torch.Tensor) -> Any:
    self.layer.weight.grad = None  # <<
    return self.layer(x)


@case("A.4", "refused", items=lambda: [Config(), Config()])
def objects_in_a_list(self: Any, x: torch.Tensor) -> Any:
    for item in self.items:
        item.n += 1
    return self.layer(x) * self.items[1].n  # <<


@case("A.4", "refused", pair=lambda: (0, [0]))
def a_list_in_a_tuple(self: Any, x: torch.Tensor) -> Any:
    self.pair[1][0] += 1
    return self.layer(x) * self.pair[1][0]  # <<


@case("A.4", "refused", record=lambda: Record(0))
def a_dataclass_that_counts(self: Any, x: torch.Tensor) -> Any:
    self.record.n += 1
    return self.layer(x) / self.record.n  # <<


@case("A.4", "refused", scale=lambda: 1.0)
def a_decaying_factor(self: Any, x: torch.Tensor) -> Any:
    self.scale *= 0.5
    return self.layer(x) * self.scale  # <<


@case("A.4", "refused")
def a_hook_registered(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    self.layer.register_forward_hook(lambda module, args, out: out * 2)  # <<
    return y


@case("A.3", "refused")
def numpy_choice(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * int(np.random.choice([1, 2, 3]))  # <<


@case("A.3", "refused")
def a_system_generator(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * random.SystemRandom().random()  # <<


@case("A.3", "refused")
def the_age_of_a_file(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (1 + os.path.getmtime(os.devnull) % 7)  # <<


@case("A.3", "refused")
def a_shuffled_index(self: Any, x: torch.Tensor) -> Any:
    order = sorted(range(4), key=lambda i: random.random())  # <<
    return self.layer(x)[order]


# Autograd's own tools in forward ------------------------------------------------------------------------------------


@case("autograd", "same")
def a_gradient_taken_inside(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    (slope,) = torch.autograd.grad(y.pow(3).sum(), y, create_graph=True)
    return y + slope


@case("autograd", "same")
def a_transform_inside(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return torch.func.vmap(lambda row: row.softmax(-1) * row.sum())(y) + torch.func.grad(lambda t: t.sin().sum())(y)


@case("autograd", "same")
def gradients_on_again_inside_no_grad(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    with torch.no_grad():
        scale = y * 2
        with torch.enable_grad():
            inner = F.dropout(y).sin()
    return inner + scale


@case("A.8", "same")
def a_hook_reads_what_forward_computed(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x).tanh()
    gate = y.detach().sigmoid()
    y.register_hook(lambda gradient: gradient * gate)
    return y


@case("A.8", "same")
def a_fixed_point_with_an_implicit_backward(self: Any, x: torch.Tensor) -> Any:
    z = torch.tanh(self.layer(x))
    start = z.detach().requires_grad_()
    again = torch.tanh(self.layer(start))

    def solve(gradient: torch.Tensor) -> torch.Tensor:
        found = gradient
        for _ in range(3):
            found = torch.autograd.grad(again, start, found * 0.1, retain_graph=True)[0] + gradient
        return found

    z.register_hook(solve)
    return z


@case("autograd", "same", scale=lambda: 3.0)
def a_hook_on_a_tensor(self: Any, x: torch.Tensor) -> Any:
    y = F.dropout(self.layer(x))
    y.register_hook(lambda gradient: gradient * self.scale)
    return y.tanh()


@case("autograd", "refused", seen=list)
def a_hook_on_a_tensor_that_counts(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    y.register_hook(lambda gradient: self.seen.append(1))
    return y.tanh()


class Noisy(torch.autograd.Function):
    """Draws in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] * torch.rand(())


@case("autograd", "same")
def draws_in_the_backward(self: Any, x: torch.Tensor) -> Any:
    return F.dropout(Noisy.apply(self.layer(x)))


# A.9: updates inside a checkpoint -----------------------------------------------------------------------------------


def norm() -> nn.Module:
    return nn.BatchNorm1d(8)


@case("A.9", "said", norm=norm)
def norm_in_a_checkpoint(self: Any, x: torch.Tensor) -> Any:
    return checkpoint(lambda t: self.norm(self.layer(t)), x, use_reentrant=False)


@case("A.9", "refused", norm=norm)
def norm_in_a_reentrant_checkpoint(self: Any, x: torch.Tensor) -> Any:
    return checkpoint(lambda t: self.norm(t).tanh(), self.layer(x), use_reentrant=True)  # <<


@case("A.9", "said", buffer=lambda: torch.zeros(()))
def counter_in_a_checkpoint(self: Any, x: torch.Tensor) -> Any:
    def inner(t: torch.Tensor) -> torch.Tensor:
        self.buffer += 1
        return self.layer(t).tanh()

    return checkpoint(inner, x, use_reentrant=False)


@case("A.9", "said", buffer=lambda: torch.zeros(8))
def average_in_a_checkpoint(self: Any, x: torch.Tensor) -> Any:
    def inner(t: torch.Tensor) -> torch.Tensor:
        y = self.layer(t).tanh()
        with torch.no_grad():
            self.buffer.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y

    return checkpoint(inner, x, use_reentrant=False)


@case("A.9", "said", norm=lambda: nn.InstanceNorm1d(4, track_running_stats=True))
def instance_norm_in_a_checkpoint(self: Any, x: torch.Tensor) -> Any:
    return checkpoint(lambda t: self.norm(self.layer(t)[None])[0], x, use_reentrant=False)


@case("A.9", "said", norm=norm)
def norm_in_a_partial_checkpoint(self: Any, x: torch.Tensor) -> Any:
    run = functools.partial(checkpoint, use_reentrant=False)
    return run(lambda t: self.norm(self.layer(t)), x)


@case("A.9", "said", norm=norm)
def norm_in_a_checkpoint_in_a_checkpoint(self: Any, x: torch.Tensor) -> Any:
    def outer(t: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.norm, self.layer(t), use_reentrant=False).tanh()

    return checkpoint(outer, x, use_reentrant=False)


@case("A.9", "said", norm=norm)
def norm_in_checkpointed_blocks(self: Any, x: torch.Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint_sequential

    return checkpoint_sequential([self.norm, self.layer, nn.Tanh()], 2, x, use_reentrant=False)


@case("A.9", "same", norm=norm)
def norm_beside_a_checkpoint(self: Any, x: torch.Tensor) -> Any:
    return self.norm(checkpoint(lambda t: F.dropout(self.layer(t)).tanh(), x, use_reentrant=False))


@case("A.9", "same", norm=lambda: nn.BatchNorm1d(8, track_running_stats=False))
def norm_without_statistics_in_a_checkpoint(self: Any, x: torch.Tensor) -> Any:
    return checkpoint(lambda t: self.norm(self.layer(t)), x, use_reentrant=False)


# Hooks on saved tensors ---------------------------------------------------------------------------------------------


class Halves(torch.autograd.graph.saved_tensors_hooks):
    """Keeps what autograd saves in half precision."""

    def __init__(self) -> None:
        super().__init__(lambda t: t.half(), lambda t: t.float())


@case("saved", "refused")
def saves_in_half_precision(self: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):  # <<
        return torch.tanh(self.layer(x))


@case("saved", "refused", hooks=Halves)
def saves_by_hooks_of_its_own(self: Any, x: torch.Tensor) -> Any:
    with self.hooks:  # <<
        return torch.tanh(self.layer(x))


@case("saved", "same")
def saves_on_the_cpu(self: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(self.layer(x))


# What stands for a parameter ---------------------------------------------------------------------------------------


@case("types", "same", buffer_own=lambda: torch.ones(8))
def asks_what_is_a_parameter(self: Any, x: torch.Tensor) -> Any:
    kinds = [isinstance(t, nn.Parameter) for t in (self.layer.weight, self._buffers["buffer_own"], x)]
    return self.layer(x) * (2.0 if kinds == [True, False, False] else 3.0)


@case("types", "same", buffer_own=lambda: nn.Buffer(torch.ones(8)))
def assigns_a_buffer_to_itself(self: Any, x: torch.Tensor) -> Any:
    self.buffer_own = self.buffer_own.to(x.device)
    return self.layer(x) * self.buffer_own


@case("types", "refused")
def asks_for_the_exact_type(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y * (2.0 if type(y) is torch.Tensor else 3.0)  # <<


@case("types", "refused")
def asks_for_the_class(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (2.0 if self.layer.weight.__class__ == nn.Parameter else 3.0)  # <<


@case("types", "same")
def asks_for_other_types(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x) * (2.0 if isinstance(x, torch.Tensor) and type(self) is Wrap else 3.0)


# A.10: tensors hidden in outputs ------------------------------------------------------------------------------------


@case("A.10", "refused")
def in_a_set(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y, {y.detach() + 1}


@case("A.10", "refused")
def in_a_frozenset(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x), frozenset([x * 2])


@case("A.10", "refused")
def in_slots(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y, Slotted(y.tanh())


@case("A.10", "refused")
def in_a_closure(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y, lambda: y + 1


@case("A.10", "refused")
def in_a_default(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y, lambda scale=y: scale * 2


@case("A.10", "refused")
def in_a_generator(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y, (row for row in y)


@case("A.10", "refused")
def in_a_generator_function(self: Any, x: torch.Tensor) -> Any:
    def rows(t: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from t

    y = self.layer(x)
    return y, rows(y)


@case("A.10", "refused")
def in_a_partial(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y, functools.partial(torch.add, y)


@case("A.10", "refused")
def in_an_iterator(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y, iter([y + 1])


@case("A.10", "refused")
def in_a_bound_method(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y, y.add


@case("A.10", "refused")
def in_a_map(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return {"y": y, "later": map(torch.neg, [y])}


@case("A.10", "refused")
def in_a_dict_of_sets(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return {"y": y, "more": [{"deep": {y + 1}}]}


@case("A.10", "refused")
def in_a_set_of_an_object(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return Plain({"y": y, "hidden": {y + 1}})


@case("A.10", "refused")
def in_a_proxy(self: Any, x: torch.Tensor) -> Any:
    import types

    y = self.layer(x)
    return y, types.MappingProxyType({"y": y})


@case("A.10", "same")
def in_a_dataclass(self: Any, x: torch.Tensor) -> Any:
    return Record(self.layer(x))


@case("A.10", "same")
def in_an_object(self: Any, x: torch.Tensor) -> Any:
    return Plain({"y": self.layer(x)}), "text", {1, 2}, lambda: 3


class Keeper(nn.Module):
    """A module made in forward."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


@case("A.10", "refused")
def in_a_module_made_in_forward(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    return y, Keeper(y + 1)


@case("A.10", "same")
def the_model_itself(self: Any, x: torch.Tensor) -> Any:
    return self.layer(x), self


@case("A.10", "refused")
def a_count_returned(self: Any, x: torch.Tensor) -> Any:
    TABLE["n"] = TABLE.get("n", 0) + 1  # <<
    return {"y": self.layer(x), "step": TABLE["n"]}  # <<


# Exceptions of the trace that forward catches ------------------------------------------------------------------------


@case("caught", "refused")
def a_caught_item(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    try:
        scale = y.abs().mean().item()  # <<
    except Exception:  # noqa: BLE001
        scale = 0.0
    return y + scale


@case("caught", "refused")
def a_caught_branch(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    with contextlib.suppress(Exception):
        return y * 2 if y.sum() > -1e9 else y  # <<
    return y


@case("caught", "refused")
def a_caught_list(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    try:
        first = (y > 0).sum(0).tolist()[0]  # <<
    except RuntimeError:
        first = 0
    return y + first


@case("caught", "refused")
def a_caught_array(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    with contextlib.suppress(Exception):
        y = y + float(y.detach().numpy().max())  # <<
    return y


@case("caught", "refused")
def a_caught_length(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    with contextlib.suppress(Exception):
        y = y + len((y > 0).nonzero())  # <<
    return y


@case("caught", "refused")
def a_caught_mask(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    with contextlib.suppress(Exception):
        y = y + y[y > 0].sum()  # <<
    return y


@case("caught", "said")
def a_caught_check(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    try:
        finite = bool(torch.isfinite(y).all())
    except Exception:  # noqa: BLE001
        finite = False
    return y * 2 if finite else y


@case("caught", "same")
def a_caught_error_of_forwards_own(self: Any, x: torch.Tensor) -> Any:
    y = self.layer(x)
    try:
        y = torch.cat([y, y[:, :3]])
    except RuntimeError:
        y = torch.cat([y, y[:3]])
    return y


# The property -------------------------------------------------------------------------------------------------------


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def _loss(output: Any) -> torch.Tensor:
    tensors, _ = flatten(output)
    return sum((t.float().pow(2).mean() for t in tensors if t.requires_grad), torch.zeros(()))


def _train(run: nn.Module, model: nn.Module) -> tuple[list[Any], list[Any]]:
    """What three steps show: numbers, and the state that they leave."""
    _seed()
    numbers: list[Any] = []
    for step in range(STEPS):
        x = torch.linspace(-1, 1 + step, 32).reshape(4, 8)
        for parameter in model.parameters():
            parameter.grad = None
        output = run(x)
        _loss(output).backward()
        tensors, _ = flatten(output)
        assert all(type(t) is torch.Tensor for t in tensors)
        numbers += [t.detach().clone() for t in tensors]
        numbers += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    generators = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    left = [*(b.clone() for b in model.buffers()), *generators]
    plain = {k: v for m in model.modules() for k, v in m.__dict__.items() if isinstance(v, (int, float, str, list))}
    return numbers, [*left, sorted(plain)]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def check(case: Case) -> str:
    """What became of the case: same, said, refused; an AssertionError where it is wrong."""
    model = case.build()
    before = dict(model.__dict__)
    _seed()
    state = random.getstate(), torch.get_rng_state().tolist(), repr(np.random.get_state())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            planned = plan(model, batch_like(), solver="greedy")
        except (Unsupported, CaptureError) as error:
            return "refused" if not case.marked or "# <<" in str(error) else f"refused without its line: {error}"
        finally:
            now = random.getstate(), torch.get_rng_state().tolist(), repr(np.random.get_state())
            assert now == state, "planning moved a generator"
            assert {k: v for k, v in model.__dict__.items() if before.get(k) is not v} == {}
        numbers, left = _train(planned.module, model)
    told = [str(w.message) for w in said] + [n for n in planned.notes if n != CHECKPOINTED]
    plain = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, state_left = _train(plain, plain)
    assert len(numbers) == len(expected)
    assert all(map(_equal, numbers, expected)), "other numbers than the plain model's"
    if told:
        return "said"
    assert all(map(_equal, left, state_left)), "other state than the plain model's, and no word"
    return "same"


def batch_like() -> torch.Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.mark.parametrize("name", CASES)
def test_never_silently_wrong(name: str) -> None:
    assert check(CASES[name]) == CASES[name].expected


# A.11: a model in eval mode -----------------------------------------------------------------------------------------


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.BatchNorm1d(8), nn.Dropout(0.3), linear())


EVAL = "planned in eval mode"


def _words(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in said if EVAL in str(w.message)]


def _module(model: nn.Module, **options: Any) -> nn.Module:
    return plan(model, batch_like(), solver="greedy", **options).module


def _applied(model: nn.Module, **options: Any) -> nn.Module:
    return plan(model, batch_like(), solver="greedy", **options).apply(model)


DOORS: dict[str, Callable[..., nn.Module]] = {"module": _module, "apply": _applied}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("options", [{}, {"loss_fn": lambda y: y.pow(2).mean()}], ids=["", "loss"])
def test_a_call_for_gradients_in_eval_mode_is_said_once(door: str, options: dict[str, Any]) -> None:
    run = DOORS[door](small_net().eval(), **options)
    x = batch_like()
    assert _words(lambda: [run(x) for _ in range(3)]) != []
    assert _words(lambda: run(x)) == []


@pytest.mark.parametrize("door", DOORS)
def test_evaluating_without_gradients_in_eval_mode_is_fine(door: str) -> None:
    run, x = DOORS[door](small_net().eval()), batch_like()
    with torch.no_grad():
        assert _words(lambda: run(x)) == []


@pytest.mark.parametrize("door", DOORS)
def test_evaluating_after_training_is_fine(door: str) -> None:
    model, x = small_net().eval(), batch_like()
    run = DOORS[door](model)
    model.train()
    run(x).sum().backward()
    model.eval()
    assert _words(lambda: run(x)) == []


@pytest.mark.parametrize("door", DOORS)
def test_a_model_planned_in_training_mode_may_be_evaluated(door: str) -> None:
    model, x = small_net().train(), batch_like()
    run = DOORS[door](model)
    model.eval()
    assert _words(lambda: run(x)) == []


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("options", [{}, {"loss_fn": lambda y: y.pow(2).mean()}], ids=["", "loss"])
def test_a_backward_through_a_call_in_eval_mode_is_said_once(door: str, options: dict[str, Any]) -> None:
    model, x = small_net().train(), batch_like()
    run = DOORS[door](model, **options)
    run(x).sum().backward()
    model.eval()
    with pytest.warns(UserWarning, match="in eval mode: its own forward ran, and not under the budget"):
        run(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x).sum().backward()
        with torch.no_grad():
            run(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_plan_made_in_eval_mode_has_a_note(training: bool) -> None:
    planned = plan(small_net().train(training), batch_like(), solver="greedy")
    assert any("eval mode" in note for note in planned.notes) is not training


@pytest.mark.parametrize("door", DOORS)
def test_a_model_planned_in_eval_mode_trains_as_the_plain_one(door: str) -> None:
    model, plain = small_net().eval(), small_net().train()
    run = DOORS[door](model)
    model.train()
    for expected, found in zip(_train(plain, plain), _train(run, model), strict=True):
        assert all(map(_equal, found, expected))


def test_there_are_enough_cases_of_each_class() -> None:
    counts = collections.Counter(c.kind for c in CASES.values())
    assert {kind for kind, n in counts.items() if n >= 8} >= {"A.2", "A.3", "A.4", "A.9", "A.10"}


class Lazy(collections.OrderedDict[str, Any]):
    """As transformers has them: asked for an item, it makes one; asked for its keys, it names more than it holds."""

    def __getitem__(self, key: str) -> Any:
        raise ImportError(f"{key} was looked up")

    def __iter__(self) -> Any:
        return iter(("something", "else"))

    def keys(self) -> Any:
        return ["something", "else"]


LAZY = Lazy(held=1)


def test_a_mapping_that_makes_what_it_is_asked_for_is_not_asked() -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if isinstance(LAZY, dict) else 3)

    model, x = Model(8, 8), torch.randn(4, 8)
    model.table = LAZY
    assert torch.equal(plan(model, x).module(x), model(x))
    assert dict.__len__(LAZY) == 1
