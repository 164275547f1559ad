"""What eager decides by whether something traces it, or reaches within its kernels: plans do the same, or say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from passes.errors import CaptureError, OnlyInEager
from planner import Plan, auto_checkpoint


class Frozen(nn.Module):
    """A part that is not trained, in eval mode, under a head that is."""

    def __init__(self, part: nn.Module, under: Any = None) -> None:
        super().__init__()
        self.part, self.under = part.eval().requires_grad_(False), under
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.part.eval()
        return self

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        with self.under() if self.under is not None else torch.enable_grad():
            if isinstance(self.part, nn.MultiheadAttention):
                y = self.part(x, x, x, key_padding_mask=padding)[0]
            elif isinstance(self.part, nn.GRU):
                y = self.part(x)[0]
            else:
                y = self.part(x, src_key_padding_mask=padding)
        return self.head(y.clone().mean(1)).square().mean()


def encoder(nested: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


def padding(*, at_the_end: bool = True) -> torch.Tensor:
    mask = torch.zeros(4, 16, dtype=torch.bool)
    mask[1, 10:] = mask[2, 5:] = True
    mask[3, 0] = not at_the_end
    return mask


def plan(model: nn.Module, *sample: Any, regions: Any = "whole") -> Plan:
    return auto_checkpoint(model, sample, None, regions=regions, check=False, time_limit=1)


def same_steps(model: nn.Module, module: nn.Module, *sample: Any) -> bool:
    found = []
    for run in (model, module):
        model.zero_grad()
        loss = run(*sample)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    return len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


@pytest.mark.parametrize("under", [None, torch.no_grad])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("part", ["encoder", "attention"])
@pytest.mark.every(1)
def test_frozen_attention_takes_the_fast_path(part: str, padded: bool, under: Any) -> None:
    model = Frozen(encoder() if part == "encoder" else nn.MultiheadAttention(32, 4, batch_first=True), under)
    sample = (torch.randn(4, 16, 32), *([padding()] if padded else []))
    made = plan(model, *sample)
    assert any("encoder_layer_fwd" in str(node) or "native_multi_head" in str(node) for node in made.graph.nodes)
    assert same_steps(model, made.module, *sample)
    assert torch.overrides.has_torch_function.__module__ != "passes._torch"


@pytest.mark.every(1)
def test_a_nested_tensor_is_refused_and_training_goes_on_in_eager() -> None:
    model, x = Frozen(encoder(nested=True)), torch.randn(4, 16, 32)
    with pytest.raises(OnlyInEager, match=r"nested tensor.*TransformerEncoder.*enable_nested_tensor=False"):
        plan(model, x, padding())
    made = plan(model, x, padding(at_the_end=False))  # of which eager makes none
    assert same_steps(model, made.module, x, padding(at_the_end=False))
    with pytest.warns(UserWarning, match="nested tensor.*Such calls run in eager"):
        assert same_steps(model, made.module, x, padding())


def test_layers_that_are_called_with_nested_tensors_are_no_regions() -> None:
    model = Frozen(encoder(nested=True))
    made = plan(model, torch.randn(4, 16, 32), padding(), regions=["part.layers.*", "head"])
    eager = {region.path: region.eager for region in made.regions}
    assert "nested tensor" in eager["part.layers.0"] and not eager["head"]
    assert same_steps(model, made.module, torch.randn(4, 16, 32), padding())


class Multiplied(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.way, self.last = way, nn.Bilinear(16, 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x).float()
        if self.way == "bilinear":
            return self.last(y, y.flip(0)).square().mean()
        return torch.linalg.pinv(y).square().mean()


@pytest.mark.parametrize("way", ["bilinear", "pinv"])
def test_products_within_kernels_are_left_to_eager_under_autocast(way: str) -> None:
    model, x = Multiplied(way), torch.randn(8, 16)
    assert same_steps(model, plan(model, x).module, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(OnlyInEager, match="under autocast at .*test_fast_paths.*enabled=False"):
            plan(model, x)
        if way == "bilinear":  # the other's backward fails in eager, but for one under autocast
            assert same_steps(model, plan(model, x, regions="auto").module, x)


@pytest.mark.parametrize("part", [nn.GRU(32, 32, batch_first=True), nn.MultiheadAttention(32, 4, batch_first=True)])
def test_inference_mode_in_forward_is_left_to_eager(part: nn.Module) -> None:
    model, x = Frozen(part, torch.inference_mode), torch.randn(4, 16, 32)
    with pytest.raises(OnlyInEager, match=r"inference_mode\(\) in forward at .*no_grad"):
        plan(model, x)
    assert same_steps(model, plan(model, x, regions="auto").module, x)


class Branching(nn.Module):
    """Asks about the values of a tensor, unless it is compiled."""

    def __init__(self, compiled: float) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.compiled, self.asks = compiled, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.asks and torch.compiler.is_compiling():
            y = y * self.compiled
        elif self.asks and y.sum().item() > -1e9:
            y = y * 2
        return self.last(y).square().mean()


def test_a_librarys_compiled_path_is_taken_only_where_it_computes_the_same() -> None:
    x = torch.randn(4, 16)
    for factor, same in ((2.0, True), (3.0, False)):
        model = Branching(factor)
        made = plan(model, x, regions="auto")
        assert bool(made.regions) is not same and any("is_compiling" in note for note in made.notes) is same
        assert same_steps(model, made.module, x)
    with pytest.raises(CaptureError, match=r"\.item\(\)"):
        plan(model, x)
    model.asks = False
    made = plan(model, x, regions="auto")
    model.asks = True
    assert same_steps(model, made.module, x)
