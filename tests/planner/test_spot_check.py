"""Spot checks: what no guard sees shows in the calls that are compared with the plain step."""

from __future__ import annotations

import contextlib
import copy
import decimal
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from planner import auto_checkpoint
from planner.dropin import spot_check

CALLS = 12


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """`decimal`'s precision stands for what a function of C answers, which no guard compares."""
    with decimal.localcontext() as context:
        context.prec = 28
        yield


def _unseen() -> float:
    return float(decimal.getcontext().prec)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * _unseen()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)
        self.drop, self.level, self.seen = nn.Dropout(0.3), torch.zeros(()), 0
        self.register_buffer("count", torch.zeros(()))
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(self.drop(self.norm(self.first(x)).tanh()))
        self.level = h.detach().mean()
        self.seen += len(x)
        self.count.add_(1)
        return self.second(h).tanh()

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return h


class _InForward(_Block):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return h * _unseen()


class _InBackward(_Block):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = _Scaled.apply(h)
        return scaled


class _InBuffer(_Block):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        self.count.fill_(_unseen())
        return h


class _Drawing(_Block):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        if _unseen() == 7.0:
            torch.rand(3)
        return h


class _Raising(_Block):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        if _unseen() == 7.0:
            raise ArithmeticError("seven")
        return h


class _Random(_Block):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return h * random.SystemRandom().random() if _unseen() == 7.0 else h


class _ByRegions(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.part(x)
        return out if out.sum().item() < 1e9 else out * 2


def _observe(model: nn.Module, call: Callable[..., Any], i: int) -> list[Any]:
    torch.manual_seed(i)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(i))
    try:
        out = call(x)
    except ArithmeticError as error:
        out = torch.tensor(len(str(error)), dtype=torch.float32, requires_grad=True)
    out.pow(2).sum().backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    block: Any = model.part if isinstance(model, _ByRegions) else model
    values = [out.detach(), *gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state(), block.level]
    return [*values, block.seen]


def _train(model: nn.Module, change: int | None, **options: Any) -> tuple[list[int], list[str]]:
    """The calls with other results than eager's, and what was said; what forward reads unseen is changed at one."""
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
        plan = auto_checkpoint(model, x, budget_mb=8, **options)
        wrong = []
        for i in range(CALLS):
            if i == change:
                decimal.getcontext().prec = 7
            pairs = zip(_observe(plain, plain, i), _observe(model, plan.module, i), strict=True)
            if not all(a == b if isinstance(a, int) else torch.equal(a, b) for a, b in pairs):
                wrong.append(i)
    texts = [str(w.message) for w in said if "planned" in str(w.message)]
    return wrong, [text for text in texts if "that the plan did not count" not in text]


@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (_InForward, "forward computes another output"),
        (_InBackward, "gradient of first.weight is another one"),
        (_InBuffer, "other numbers in count"),
        (_Drawing, "other random numbers"),
    ],
)
def test_what_no_guard_sees(kind: type[_Block], how: str, regions: bool) -> None:
    model = _ByRegions(kind()) if regions else kind()
    wrong, said = _train(model, change=5)
    assert wrong == [5, 6]  # the eighth call is compared
    assert len(said) == 1 and how in said[0]
    assert ("region part" in said[0]) == regions


def test_a_call_that_is_compared_at_once_has_the_plain_numbers() -> None:
    wrong, said = _train(_InForward(), change=2)
    assert not wrong and len(said) == 1


def test_an_error_that_only_the_plain_forward_raises() -> None:
    assert _train(_Raising(), change=2)[0] == []


@pytest.mark.parametrize("regions", [False, True])
def test_nothing_is_moved(regions: bool) -> None:
    assert _train(_ByRegions(_Block()) if regions else _Block(), change=None) == ([], [])


def test_a_model_that_differs_again_runs_in_eager() -> None:
    model = _InForward()
    x = torch.randn(16, 32)
    plan = auto_checkpoint(model, x, budget_mb=8)
    for i in range(4):
        decimal.getcontext().prec = 7 + i
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan.module(x).pow(2).sum().backward()
    state = plan.module._plan_state
    assert state.differences == 2
    before = state.latest
    decimal.getcontext().prec = 20
    torch.manual_seed(0)
    found = plan.module(x)
    torch.manual_seed(0)
    assert torch.equal(found, model(x)) and state.latest is before


def test_a_plain_step_that_does_not_repeat_itself_is_no_finding() -> None:
    _, said = _train(_Random(), change=5)
    assert len(said) == 1 and "does not repeat itself" in said[0]


def test_an_output_whose_data_is_changed_is_not_compared() -> None:
    """Neither torch nor the plan sees that; what the plain backward beside it reads is not changed."""
    model, plain = _Block(), _Block()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(16, 32)
    plan = auto_checkpoint(model, x, budget_mb=8, progress=False)
    for i in range(4):
        for own, call in ((plain, plain), (model, plan.module)):
            own.zero_grad()
            torch.manual_seed(i)
            out = call(x)
            loss = out.sigmoid().sum()
            out.data.mul_(0.5)
            loss.backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    compared: list[int] = []
    compare = spot_check.Expected.compare

    def counting(self: spot_check.Expected, results: Any) -> None:
        compared.append(self.last)
        compare(self, results)

    monkeypatch.setattr(spot_check.Expected, "compare", counting)
    return compared


@pytest.mark.parametrize(("size", "due"), [(16, [2, 3, 4, 5, 8]), (1 << 17, [2, 4, 8])])
def test_which_calls_are_compared(size: int, due: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _counted(monkeypatch)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    module = auto_checkpoint(model, torch.randn(size, 32), budget_mb=200, progress=False).module
    found = []
    for i in range(1, CALLS):
        model.zero_grad()
        module(torch.randn(size, 32)).pow(2).sum().backward()
        found += [i] * len(compared)
        compared.clear()
    assert found == due


def test_none_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _counted(monkeypatch)
    _train(_Block(), change=None, check=False)
    assert not compared


left: dict[str, Any] = {}


class _Elsewhere(_Block):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        left["h"] = h
        return h


@pytest.mark.filterwarnings("ignore")
def test_none_where_forward_leaves_something_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _counted(monkeypatch)
    left["h"] = None
    model = _Elsewhere()
    plan = auto_checkpoint(model, torch.randn(16, 32), budget_mb=8, progress=False)
    for _ in range(4):
        plan.module(torch.randn(16, 32)).pow(2).sum().backward()
    assert not compared and left["h"] is None


def test_autocast_keeps_no_casts_of_stand_ins() -> None:
    model = _Block()
    x = torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        plan = auto_checkpoint(model, x, budget_mb=8, progress=False)
    wrong = []
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        for i in range(6):
            pairs = zip(_observe(plain, plain, i), _observe(model, plan.module, i), strict=True)
            wrong += [i] * (not all(a == b if isinstance(a, int) else torch.equal(a, b) for a, b in pairs))
    assert not wrong


def test_none_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _counted(monkeypatch)
    monkeypatch.setattr(spot_check, "free_bytes", lambda device: 1000)
    _train(_Block(), change=None)
    assert not compared


@pytest.mark.parametrize(
    "around", [torch.profiler.profile, partial(FlopCounterMode, display=False), torch.autograd.graph.save_on_cpu]
)
@pytest.mark.filterwarnings("ignore")
def test_none_where_it_would_be_noticed(around: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _counted(monkeypatch)
    model = _Block()
    plan = auto_checkpoint(model, torch.randn(16, 32), budget_mb=8)
    for _ in range(2):
        plan.module(torch.randn(16, 32)).pow(2).sum().backward()
    assert compared
    compared.clear()
    with around():
        for _ in range(4):
            plan.module(torch.randn(16, 32)).pow(2).sum().backward()
    assert not compared


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_within_a_checkpoint_of_the_callers(reentrant: bool) -> None:
    model, plain = _Block(), _Block()
    plain.load_state_dict(model.state_dict())
    plan = auto_checkpoint(model, torch.randn(16, 32), budget_mb=8)
    for i in range(6):
        for own, call in ((plain, plain), (model, plan.module)):
            torch.manual_seed(i)
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(i)).requires_grad_()
            checkpoint(call, x, use_reentrant=reentrant).pow(2).sum().backward()
            assert own.first.weight.grad is not None
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("way", ["no backward", "hook", "a backward that fails"])
@pytest.mark.filterwarnings("ignore")
def test_none_is_kept(way: str) -> None:
    model = nn.Linear(8, 8)
    if way == "hook":
        model.weight.register_post_accumulate_grad_hook(lambda p: None)
    module = auto_checkpoint(model, torch.randn(4, 8), budget_mb=8, progress=False).module
    for _ in range(4):
        output = module(torch.randn(4, 8))
        if way == "a backward that fails":
            with torch.no_grad():
                output.mul_(2)
        if way != "no backward":
            with contextlib.suppress(RuntimeError):
                output.pow(2).mean().backward()
    del output
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, spot_check.Expected)]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.norm = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False), nn.BatchNorm1d(8)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.norm(self.first(x))))


class _Interrupts:
    """Ctrl-C at the line of this number, of those that put other tensors into a model and take them out again."""

    files = ("passes/_torch.py", "utils/stateless.py", "_named_member_accessor.py", "dropin/plain_forward.py")

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_code.co_filename.endswith(self.files):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_leaves_the_model_as_it_was() -> None:
    x, number, model = torch.randint(0, 9, (4,)), 0, _Tied()
    module = auto_checkpoint(model, x, budget_mb=8, progress=False).module
    before = [*map(id, model.parameters()), *map(id, model.buffers()), id(model.head.weight)]
    while True:
        number += 7
        module._plan_state.cache[0].calls = 1  # the next one is compared
        previous, interrupts = sys.gettrace(), _Interrupts(number)
        sys.settrace(interrupts)
        try:
            module(x)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(previous)
        assert [*map(id, model.parameters()), *map(id, model.buffers()), id(model.head.weight)] == before
        if interrupts.left > 0:
            break
    assert number > 30


@pytest.mark.filterwarnings("ignore")
def test_numpys_generator_is_left_alone() -> None:
    class Seeds(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            numpy.random.seed(5)
            return super().forward(input) * float(numpy.random.rand())

    module = auto_checkpoint(Seeds(8, 8), torch.randn(4, 8), budget_mb=8, progress=False).module
    drawn = set()
    for _ in range(6):
        numpy.random.seed(1)
        module(torch.randn(4, 8)).pow(2).mean().backward()
        drawn.add(numpy.random.randint(1 << 30))
    assert len(drawn) == 1
