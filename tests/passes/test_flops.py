"""FLOPs of ops that torch's registry leaves out, against the same computation in ops that it lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from passes.profile import OpProfile, profile
from passes.trace.arguments import bind_sample
from passes.trace.capture import capture


def profiles(model: nn.Module, sample: Any) -> list[OpProfile]:
    graph = capture(model, bind_sample(model, sample)).graph_module.graph
    return list(profile(graph, measure=False).values())


def test_an_lstm_layer_counts_its_matrix_products() -> None:
    steps, batch, width, hidden = 7, 3, 10, 6
    found = profiles(nn.LSTM(width, hidden), (torch.randn(steps, batch, width),))
    forward = next(p for p in found if p.target == "aten.mkldnn_rnn_layer.default")
    gates = 4 * hidden
    assert forward.flops == 0
    assert forward.work == 2 * steps * batch * gates * (width + hidden)
    backward = next(p for p in found if p.target == "aten.mkldnn_rnn_layer_backward.default")
    assert backward.work == 2 * forward.work


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        q = q * self.scale
        return F.scaled_dot_product_attention(q, q, q)


def test_heads_of_keys_and_values_that_queries_share_count_for_each() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q * self.scale, k, k, enable_gqa=True)

    q = torch.randn(2, 4, 16, 8)
    alone, shared = (
        [p.work for p in profiles(module, given) if "scaled_dot_product" in p.target]
        for module, given in ((Attention(), (q,)), (Grouped(), (q, q[:, :2])))
    )
    assert len(alone) == 2 and shared == alone


def test_attention_on_the_cpu_counts_what_its_matrix_products_would() -> None:
    q = torch.randn(2, 4, 16, 8)
    fused = [p for p in profiles(Attention(), (q,)) if "flash_attention_for_cpu" in p.target]
    forward = next(p for p in fused if "backward" not in p.target)
    counter = FlopCounterMode(display=False)
    with counter:
        torch.softmax(q @ q.mT, -1) @ q
    assert forward.flops in (0, forward.work), "listed since torch 2.14: all or nothing"
    assert forward.work == counter.get_total_flops()
    assert any(p.work > forward.work for p in fused)


@pytest.mark.parametrize("part", [
    nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True),
    nn.MultiheadAttention(16, 2, batch_first=True),
])  # fmt: skip
def test_attentions_fast_path_counts_what_the_other_one_does(part: nn.Module) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.last = part.eval().requires_grad_(False), nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.part(x, x, x)[0] if isinstance(self.part, nn.MultiheadAttention) else self.part(x)
            return self.last(y)

    x = torch.randn(3, 5, 16)
    fused = [p for p in profiles(Head(), (x,)) if "encoder_layer" in p.target or "multi_head" in p.target]
    counter = FlopCounterMode(display=False)
    part.train()  # which has no fast path
    with counter, sdpa_kernel(SDPBackend.MATH):
        part(x, x, x) if isinstance(part, nn.MultiheadAttention) else part(x)
    assert [p.work for p in fused] == [counter.get_total_flops()] and not fused[0].flops


def test_a_bilinear_layer_counts_each_pair_of_inputs() -> None:
    every = profiles(nn.Bilinear(5, 7, 3), (torch.randn(4, 5), torch.randn(4, 7)))
    found = [p for p in every if "_trilinear" in p.target]
    assert len(found) >= 2 and all(p.work == 2 * 4 * 5 * 7 * 3 for p in found)
