"""Autocast around the forward, around both, and inside: the backward's casts are those of the loop, weights are cast
once per forward."""

from __future__ import annotations

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from passes.errors import Unsupported
from planner import auto_checkpoint
from tests.planner.small import plan_at
from tests.planner.steps import SmallGPT, gradients
from tests.zoo.compare import measured_peak_bytes

QUICK: dict[str, Any] = {"solver": "greedy", "time_limit": 5, "progress": False}


def bf16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


class Twice(nn.Module):
    """Layers used twice, with a part in float32: where casts and their gradients are shows in the bits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.softmax(self.a(x) @ self.b(x).transpose(-1, -2) * 0.3, -1)
        h = self.norm(h @ x)
        with bf16(False):  # whose backward is not under autocast either, unless all of it is
            h = h.float() @ self.a.weight
        return self.b(h).float().pow(2).mean(), self.a(h).float().sin().sum()


def step(called: nn.Module, model: nn.Module, x: torch.Tensor, inside: bool, starts: tuple[int, ...]) -> Any:
    model.zero_grad()
    with bf16():
        outputs = called(x)
        loss = sum(outputs[i] for i in starts)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return gradients(model)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


def test_a_backward_outside_of_autocast() -> None:
    model, x = Twice(), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    with bf16():
        plan = auto_checkpoint(model, x, check=True, **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(plan.module, model, x, False, (0, 1))
    expected = step(plain, plain, x, False, (0, 1))
    assert equal(found, expected)
    assert not equal(expected, step(plain, plain, x, True, (0, 1)))  # the backward of this model shows the difference


def test_a_backward_under_autocast_is_learned() -> None:
    model, x = Twice(), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    with bf16():
        plan = auto_checkpoint(model, x, **QUICK)
    with pytest.warns(UserWarning, match="under autocast to bfloat16 on cpu, which the plan did not expect"):
        assert equal(step(plan.module, model, x, True, (0, 1)), step(plain, plain, x, True, (0, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(step(plan.module, model, x, True, (0, 1)), step(plain, plain, x, True, (0, 1)))


def test_a_replay_casts_what_was_computed_before_it_for_each_use() -> None:
    """Autocast keeps its casts of leaves alone: of an input of the planned part it keeps none."""
    torch.manual_seed(0)
    model, before, x = Thrice(), nn.Linear(16, 16), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    with bf16():
        plan = auto_checkpoint(model, x.clone().requires_grad_(), check=False, **QUICK)
    found = []
    for called in (plan.module, plain):
        before.zero_grad()
        with bf16(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            called(before(x).float()).backward()
        found.append(gradients(before))
        assert any("replays the plain forward" in str(w.message) for w in said) == (called is plan.module)
    assert equal(*found)


class Thrice(nn.Module):
    """An input with three uses, whose gradients add up to other bits in bfloat16 than in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = (layer(x).float() for layer in self.layers)
        return (a * b + c + x).square().mean()


class CastInVain(nn.Module):
    """The first use of the input comes to nothing, but has eager cast it there, once for the second, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first(x)
        return (x.sin() + self.second(x).float() + x.cos()).square().mean()


@pytest.mark.parametrize("kind", [Thrice, CastInVain])
def test_a_leaf_that_is_cast_for_several_uses_is_refused_by_name(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(32, 16)
    with bf16():
        plan = auto_checkpoint(model, x.clone().requires_grad_(), check=False, **QUICK)
        with pytest.raises(Unsupported, match=r"'x', a leaf with several uses that autocast casts.*view_as"):
            plan.module(x.clone().requires_grad_())
        given, expected = (x.clone().requires_grad_() for _ in range(2))
        found, wanted = plan.module(given.view_as(given)), model(expected.view_as(expected))
    found.backward()
    wanted.backward()
    assert torch.equal(given.grad, expected.grad)  # type: ignore[arg-type]


def test_another_start_is_replayed_under_the_forwards_autocast() -> None:
    model, x = Twice(), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    with bf16():
        plan = auto_checkpoint(model, x, **QUICK)
    with pytest.warns(UserWarning, match="which the plan did not expect"):
        assert equal(step(plan.module, model, x, False, (1,)), step(plain, plain, x, False, (1,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(step(plan.module, model, x, False, (1,)), step(plain, plain, x, False, (1,)))


def test_weights_are_cast_once_inside_a_forward() -> None:
    class Inside(Twice):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with bf16():
                return super().forward(x)

    model, x = Inside(), torch.randn(4, 8, 16)
    plan = auto_checkpoint(model, x, check=True, **QUICK)
    traced = plan.prepared.traced
    weights = traced.pristine.find_nodes(op="placeholder")[: len(traced.state)]
    casts = [n.args[0] for n in traced.pristine.nodes if n.target is torch.ops.aten._to_copy.default]
    assert sorted(weights.index(n) for n in casts if n in weights) == [0, 1, 2, 3]


def test_autocast_that_keeps_no_casts() -> None:
    model, x = Twice(), torch.randn(4, 8, 16)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert auto_checkpoint(model, x, check=True, **QUICK).checked


def test_an_exported_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokens = SmallGPT(layers=1, dropout=0.0), torch.randint(0, 64, (4, 16))
    with bf16():
        plan = plan_at((model, tokens))
        plan.export(tmp_path / "autocast_step")
        monkeypatch.syspath_prepend(tmp_path)
        exported = importlib.import_module("autocast_step").load()
        outside, inside, reference = exported(tokens), exported(tokens), model(tokens)
    assert plan.recomputed
    outside.backward()
    reference.backward()
    assert equal(gradients(exported), gradients(model))
    with bf16(), pytest.raises(RuntimeError, match="under no autocast"):
        inside.backward()


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        ends = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.layers = nn.Sequential(ends[0], norm, nn.SiLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), ends[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8)], ids=["batch", "group"])
def test_statistics_in_another_type_than_torch_says_are_counted_as_they_are(norm: nn.Module) -> None:
    """The kernels keep float32 statistics of bfloat16 images, and what reads them can only be measured with those."""
    model, x = Normed(copy.deepcopy(norm)), torch.randn(4, 3, 24, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = auto_checkpoint(model, x, progress=False)
    module: Any = torch.autocast("cpu", dtype=torch.bfloat16)(plan.module)  # the backward is outside of it
    assert measured_peak_bytes(module, model, x, plan.static_bytes) == plan.peak_bytes
