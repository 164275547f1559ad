"""State that forward reaches by several names, and that hooks and custom backwards read or write."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from passes.errors import Unsupported
from passes.run.step import ChangedInPlace
from planner import Plan, auto_checkpoint

WIDTH = 16
registry: dict[str, torch.Tensor] = {}


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())


class _Named(nn.Module):
    """Moves an item of a container on by one name, and reads it by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()
        self.held: Any = {"v": torch.zeros(())}
        self.other = self.name()

    def name(self) -> Any:
        return self.held

    def read(self) -> torch.Tensor:
        value: torch.Tensor = self.other["v"]
        return value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        self.held["v"] = self.held["v"] * 0.9 + h.detach().mean() + 1
        out: torch.Tensor = h * self.read()
        return out


class _OfAnObject(_Named):
    def name(self) -> Any:
        return SimpleNamespace(held=self.held)

    def read(self) -> torch.Tensor:
        value: torch.Tensor = self.other.held["v"]
        return value


class _OfAClosure(_Named):
    def name(self) -> Any:
        held = self.held
        return lambda: held["v"]

    def read(self) -> torch.Tensor:
        value: torch.Tensor = self.other()
        return value


class _OfAGlobal(_Named):
    def __init__(self) -> None:
        super().__init__()
        registry.clear()
        registry.update(self.held)
        self.held = registry

    def read(self) -> torch.Tensor:
        return registry["v"]


class _Within(_Named):
    def name(self) -> Any:
        return [self.held]

    def read(self) -> torch.Tensor:
        value: torch.Tensor = self.other[0]["v"]
        return value


class _Part(nn.Module):
    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.held = _layers(), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held["v"] = self.held["v"] + 1
        out: torch.Tensor = self.layers(x) * self.held["v"]
        return out


class _OfTwoModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        held = {"v": torch.zeros(())}
        self.first, self.second = _Part(held), _Part(held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


class _LeftTwice(nn.Module):
    """Leaves one list under two names; the next forward changes it by one, and reads it by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()
        self.one = self.other = [torch.zeros(())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.one[0] = self.one[0] + 1
        h: torch.Tensor = self.layers(x) * self.other[0]
        self.one = self.other = [h.detach().mean()]
        return h


class _LeftAtFirst(_LeftTwice):
    """The first call makes it."""

    def __init__(self) -> None:
        super().__init__()
        del self.one, self.other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "one"):
            self.one = self.other = [torch.zeros(WIDTH)]
        h: torch.Tensor = self.layers(x) + self.other[0]
        self.one[0] = h.detach().mean(0)
        return h


def _made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _train(kind: Callable[[], nn.Module], between: Callable[[Any, int], None], plan: bool, **options: Any) -> Any:
    """What four steps give, and the plan."""
    model, found = _made(kind), []
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(8, WIDTH, generator=generator) for _ in range(5)]
    made: Plan | None = auto_checkpoint(model, xs[0], budget_mb=8, progress=False, **options) if plan else None
    for i, x in enumerate(xs[1:]):
        between(model, i)
        out = model(x) if made is None else made.module(x)
        out.pow(2).mean().backward()
        found += [out.detach(), *_gradients(model), *(b.clone() for b in model.buffers())]
        model.zero_grad()
    return found, made


def _assert_equal(kind: Callable[[], nn.Module], between: Callable[[Any, int], None] = lambda m, i: None) -> Plan:
    plain, _ = _train(kind, between, plan=False)
    for check in ("auto", False):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "planning anew|this step holds")
            planned, made = _train(kind, between, plan=True, check=check)
        assert len(plain) == len(planned) and all(map(torch.equal, plain, planned))
    plan: Plan = made
    return plan


@pytest.mark.every(1)
@pytest.mark.parametrize(
    "kind", [_Named, _OfAnObject, _OfAClosure, _OfAGlobal, _Within, _OfTwoModules, _LeftTwice, _LeftAtFirst],
)  # fmt: skip
def test_a_container_of_several_names_goes_by_regions(kind: type[nn.Module]) -> None:
    """As an argument of the step it would be another one under one of them."""
    assert _assert_equal(kind).runs
    with pytest.raises(Unsupported, match="state that forward changes and reads"):
        _train(kind, lambda m, i: None, plan=True, regions="whole")


# Hooks and custom backwards -------------------------------------------------------------------------------------------


class _Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = _layers(), _layers()
        self.register_buffer("level", torch.ones(()))
        self.level: torch.Tensor
        self.scale = torch.ones(())

    def hook(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        if h.requires_grad:
            h.register_hook(self.hook)
        out: torch.Tensor = self.after(h)
        return out


class _Counts(_Hooked):
    def hook(self, gradient: torch.Tensor) -> torch.Tensor:
        self.level.add_(1)
        return gradient / self.level


class _Follows(_Hooked):
    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Parameter(torch.ones(WIDTH))

    def hook(self, gradient: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.target.mul_(0.9)
        return gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.target


class _Reads(_Hooked):
    def hook(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.level


class _SetsAndReads(_Hooked):
    def hook(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale * 1.5
        return super().forward(x)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: _Hooked) -> torch.Tensor:
        ctx.model = model
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.model.level, None


class _ByFunction(_Hooked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = _Scaled.apply(self.before(x), self)
        out: torch.Tensor = self.after(scaled)
        return out


class _Assigns(_ByFunction):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level = self.level * 1.5
        return super().forward(x)


@pytest.mark.every(1)
@pytest.mark.parametrize("kind", [_Counts, _Follows, _Reads, _SetsAndReads, _ByFunction, _Assigns])
def test_what_the_backward_reads_and_writes(kind: type[_Hooked]) -> None:
    """Planning runs it, on stand-ins."""
    _assert_equal(kind)


@pytest.mark.every(1)
@pytest.mark.parametrize("kind", [_Reads, _ByFunction])
@pytest.mark.parametrize("how", ["in place", "assigned", "loaded"])
def test_a_buffer_that_the_backward_reads_is_replaced_between_steps(kind: type[_Hooked], how: str) -> None:
    def between(model: _Hooked, i: int) -> None:
        value = torch.tensor(3.0 + i)
        if i == 1 and how == "in place":
            model.level.copy_(value)
        elif i == 1 and how == "assigned":
            model.level = value
        elif i == 1:
            model.load_state_dict({**model.state_dict(), "level": value}, assign=True)

    assert not _assert_equal(kind, between).runs


def test_one_that_is_replaced_between_forward_and_backward_is_noticed() -> None:
    model, x = _made(_ByFunction), torch.randn(8, WIDTH)
    out = auto_checkpoint(model, x, budget_mb=8, progress=False).module(x)
    model.level = torch.tensor(2.0)
    with pytest.raises(ChangedInPlace, match="level"):
        out.pow(2).mean().backward()


def test_one_that_another_forward_changes_before_the_backward_is_noticed() -> None:
    class Moves(_Reads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.level.mul_(0.9)
            return out

    model, x = _made(Moves), torch.randn(8, WIDTH)
    module = auto_checkpoint(model, x, budget_mb=8, progress=False).module
    module(x).pow(2).mean().backward()
    loss = (module(x) * module(x)).mean()
    with pytest.raises(ChangedInPlace, match="other numbers in level"):
        loss.backward()


class _Leaves(_Hooked):
    def hook(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = x.detach().mean()
        return super().forward(x)


def test_what_forward_leaves_for_the_backward_goes_by_regions() -> None:
    """Of two calls before one backward, both read what the second has left."""
    assert _assert_equal(_Leaves).runs
    with pytest.raises(Unsupported, match=r"state that forward changes and the backward reads at self\.scale"):
        _train(_Leaves, lambda m, i: None, plan=True, regions="whole")


def test_state_that_forward_moves_on_for_the_backward_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"state that forward changes and the backward reads at self\.scale"):
        _train(_SetsAndReads, lambda m, i: None, plan=True, regions="whole")


# Decorated forwards ---------------------------------------------------------------------------------------------------


def _with_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, x: torch.Tensor) -> Any:
        return function(self, x, torch.arange(WIDTH) % 2)

    return wrapper


def _with_more(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, mask=torch.arange(WIDTH) % 2, **kwargs)

    return wrapper


def _scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kwargs.pop("scale", 2.0) * function(self, *args, **kwargs)

    return wrapper


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()

    def masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x * mask)
        return out


class _Injects(_Masked):
    forward = _with_mask(_Masked.masked)


class _Adds(_Masked):
    forward = _with_more(_Masked.masked)


class _Swallows(_Masked):
    @_scaled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class _Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.stem, self.part, self.head = _layers(), part, _layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.part(self.stem(x))
        out: torch.Tensor = self.head(h if h.detach().sum().item() < 1e9 else h / 2)
        return out


@pytest.mark.every(1)
@pytest.mark.parametrize("kind", [_Injects, _Adds, _Swallows])
@pytest.mark.parametrize("within", [False, True])
def test_decorators_with_arguments_of_their_own(kind: type[nn.Module], within: bool) -> None:
    _assert_equal((lambda: _Around(kind())) if within else kind)


def test_a_decorators_own_argument() -> None:
    model, x = _made(_Swallows), torch.randn(8, WIDTH)
    plan = auto_checkpoint(model, {"x": x, "scale": 3.0}, budget_mb=8, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in ({"scale": 3.0}, {"scale": 5.0}, {}):
            assert torch.equal(plan.module(x, **given), model(x, **given))


# Which tensor one is --------------------------------------------------------------------------------------------------


class _Looks(nn.Module):
    """Looks up what belongs to a parameter by the parameter itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.after, self.how = _layers(), _layers(), how
        weight = self.before[0].weight
        self.scales: dict[Any, float] = {id(weight): 2.0} if how == "id" else {weight: 2.0}

    def scale(self) -> float:
        weight = self.before[0].weight
        if self.how == "set":
            return 2.0 if weight in set(self.scales) else 1.0
        return self.scales.get(id(weight) if self.how == "id" else weight, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.after(self.before(x)) * self.scale()
        return out


@pytest.mark.every(1)
@pytest.mark.parametrize("how", ["id", "dict", "set"])
def test_lookups_by_a_parameter_are_left_to_eager(how: str) -> None:
    def kind() -> nn.Module:
        return _Looks(how)

    assert _assert_equal(kind).runs
    with pytest.raises(Unsupported, match=r"which tensor one is, in forward .* at .*test_other_names\.py"):
        _train(kind, lambda m, i: None, plan=True, regions="whole")
