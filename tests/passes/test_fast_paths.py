"""What eager decides by whether something traces it, or reaches within its kernels: plans do the same, or say so."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from passes.errors import CaptureError, OnlyInEager
from passes.run.step import ChangedInPlace
from planner import Plan, auto_checkpoint, minimum_budget


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


@pytest.mark.parametrize("decorated", [False, True])
@pytest.mark.parametrize("part", [nn.GRU(32, 32, batch_first=True), nn.MultiheadAttention(32, 4, batch_first=True)])
@pytest.mark.every(1)
def test_inference_mode_in_forward_is_left_to_eager(part: nn.Module, decorated: bool) -> None:
    model, x = Frozen(copy.deepcopy(part), None if decorated else torch.inference_mode), torch.randn(4, 16, 32)
    if decorated:
        model.part.forward = torch.inference_mode()(model.part.forward)
    with pytest.raises(OnlyInEager, match=r"inference_mode\(\) in forward at .*no_grad"):
        plan(model, x)
    assert same_steps(model, plan(model, x, regions="auto").module, x)


def test_a_block_that_ends_inference_mode_is_none() -> None:
    model = Frozen(nn.GRU(32, 32, batch_first=True), functools.partial(torch.inference_mode, False))
    x = torch.randn(4, 16, 32)
    assert same_steps(model, plan(model, x).module, x)


class Computing(nn.Module):
    """What `way` computes, between layers that can be planned."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.way(x)).square().mean()


@contextlib.contextmanager
def set_to(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


BLOCKS = {
    "default dtype": lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "float32 precision": lambda: set_to(torch.set_float32_matmul_precision, "medium", "highest"),
    "number of threads": lambda: set_to(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "set_flush_denormal": lambda: set_to(torch.set_flush_denormal, True, False),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.every(1)
def test_a_block_of_another_setting_in_forward_is_left_to_eager(name: str) -> None:
    def way(x: torch.Tensor) -> torch.Tensor:
        with BLOCKS[name]():
            return (x @ x.mT).tanh()[:, :1] * (torch.arange(16) / 7).to(x.dtype)

    model, x = Computing(way), torch.randn(8, 16)
    with pytest.raises(OnlyInEager, match=f"{name}.* at .*test_fast_paths"):
        plan(model, x)
    assert same_steps(model, plan(model, x, regions="auto").module, x)


@pytest.mark.parametrize("name", ["default dtype", "set_flush_denormal"])
@pytest.mark.every(1)
def test_a_region_within_such_a_block_stays_eager(name: str) -> None:
    class Around(Computing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with BLOCKS[name]():
                y = self.first(x)
            return self.last(y).square().mean()

    model, x = Around(torch.tanh), torch.randn(8, 16)
    made = plan(model, x, regions=["first", "last"])
    assert {r.path: "other settings" in r.eager for r in made.regions if r.path in ("first", "last")} == {
        "first": True, "last": False
    }  # fmt: skip
    assert same_steps(model, made.module, x)


def test_such_a_setting_changed_before_a_backward_that_recomputes_is_an_error() -> None:
    """But for the default dtype, which the backward has as the forward had it (tests/planner/test_settings.py)."""
    model, x = Computing(torch.tanh), torch.randn(64, 16)
    made = auto_checkpoint(model, x, minimum_budget(model, x)[0], check=False)
    assert made.recomputed
    loss = made.module(x)
    with BLOCKS["set_flush_denormal"](), pytest.raises(ChangedInPlace, match="flushing of denormals"):
        loss.backward()


@pytest.mark.parametrize("norm", ["svdvals", "eigvalsh", "matrix_norm", "cond"])
@pytest.mark.every(1)
def test_values_without_a_gradient_are_computed_without_vectors(norm: str) -> None:
    def way(x: torch.Tensor) -> torch.Tensor:
        square = x.mT @ x
        if norm == "matrix_norm":
            return torch.linalg.matrix_norm(square, 2)
        found: torch.Tensor = getattr(torch.linalg, norm)(square)
        return found

    model, x = Computing(way), torch.randn(8, 16)
    assert same_steps(model, plan(model, x).module, x)
    x.requires_grad_()
    assert same_steps(model, plan(model, x).module, x)


def test_an_lstm_without_gradients_is_left_to_eager() -> None:
    lstm = nn.LSTM(16, 16)

    def way(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return lstm(x)[0]

    model, x = Computing(way), torch.randn(8, 16)
    with pytest.raises(OnlyInEager, match=r"nn\.LSTM without gradients .*test_fast_paths"):
        plan(model, x)
    assert same_steps(model, plan(model, x, regions="auto").module, x)


@torch.library.custom_op("test_fast_paths::times", mutates_args=())
def times(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT @ x


@times.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_custom_ops_are_left_to_eager_under_autocast() -> None:
    model, x = Computing(lambda x: times(x).float()), torch.randn(8, 16)
    assert same_steps(model, plan(model, x).module, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(OnlyInEager, match="custom op under autocast .test_fast_paths::times"):
            plan(model, x)
        assert same_steps(model, plan(model, x, regions="auto").module, x)


@pytest.mark.skipif("x86" not in torch.backends.quantized.supported_engines, reason="no quantized kernels")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_layers_are_left_to_eager() -> None:
    part = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(16, 16)), {nn.Linear})
    model, x = Computing(part), torch.randn(8, 16)
    model.way = part
    with pytest.raises(OnlyInEager, match="packed object of C"):
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
