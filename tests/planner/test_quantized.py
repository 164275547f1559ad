"""Frozen weights of a tensor subclass, as torchao's quantized ones: constants of the plan, and guarded as such."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from planner import Plan, PlannerError, Unsupported
from tests.planner.steps import assert_same_gradients, plan, squares, tight


class Int8(torch.Tensor):
    """A matrix in eight bits with a scale per row; computed with as float32."""

    quantized: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, quantized: torch.Tensor, scale: torch.Tensor) -> Int8:
        return torch.Tensor._make_wrapper_subclass(cls, quantized.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, quantized: torch.Tensor, scale: torch.Tensor) -> None:
        self.quantized, self.scale = quantized, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["quantized", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Int8:
        return Int8(inner["quantized"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Int8(*(func(t) for t in (args[0].quantized, args[0].scale)))

        def plain(t: Any) -> Any:
            return t.quantized * t.scale if isinstance(t, Int8) else t

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class Adapted(nn.Module):
    """A frozen quantized layer with a low-rank adapter beside it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.weight = nn.Parameter(Int8.of(self.base.weight.detach()), requires_grad=False)
        self.base.bias.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.base(x) + self.up(self.down(x)))


def quantized() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(4)))
    return model, copy.deepcopy(model), torch.randn(256, 64)


def equal_step(ours: nn.Module, model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    for each in (model, plain):
        each.zero_grad()
    squares(ours(x)).backward()
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)


def test_a_quantized_base_is_planned_and_counted(tmp_path: Path) -> None:
    model, plain, x = quantized()
    made = tight(model, x, check=True)
    assert made.recomputed and made.checked
    equal_step(made.module, model, plain, x)
    weights = sum(t.nbytes for layer in model for t in (layer.base.weight.quantized, layer.base.weight.scale))
    others = sum(t.nbytes for t in (*model.parameters(), x) if not isinstance(t, Int8))
    assert made.static_bytes == weights + others
    again = Plan.load(made.save(tmp_path / "plan.json"), model, x, progress=False)
    assert again.schedule == made.schedule
    with pytest.raises(PlannerError, match=r"0.base.weight is of class Int8, which an exported folder cannot hold"):
        made.export(tmp_path / "out")


def test_what_becomes_of_quantized_weights_is_followed() -> None:
    model, plain, x = quantized()
    tight(model, x).apply(model)
    with torch.no_grad():
        for each in (model, plain):
            each[0].base.weight.scale.mul_(2)
    equal_step(model, model, plain, x)
    for each in (model, plain):
        each[1].base.weight.scale = each[1].base.weight.scale * 3
    with pytest.warns(UserWarning, match=r"1\.base \(Linear\) with weight=Int8 \(64, 64\)"):
        equal_step(model, model, plain, x)
    for each in (model, plain):
        each[2].base.weight = nn.Parameter(Int8.of(torch.eye(64)), requires_grad=False)
    with pytest.warns(UserWarning, match="planning anew"):
        equal_step(model, model, plain, x)
    other = copy.deepcopy(model)
    equal_step(other, other, plain, x)


def test_quantized_weights_to_be_trained_are_refused() -> None:
    model, _, x = quantized()
    model[0].base.weight.requires_grad_(True)
    with pytest.raises(Unsupported, match=r"tensor subclass at 0.base.weight \(Int8\).*A frozen one of a class that"):
        plan(model, x)


def test_torchaos_int8_weights_under_lora() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    quantize_(base, Int8WeightOnlyConfig())
    model = nn.Sequential(nn.Linear(64, 64), base.requires_grad_(False), nn.Dropout(0.1))
    plain, x = copy.deepcopy(model), torch.randn(64, 64)
    made = tight(model, x, check=True)
    for called in (made.module, plain):
        torch.manual_seed(1)
        squares(called(x)).backward()
    assert_same_gradients(model, plain)
