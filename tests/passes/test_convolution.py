"""A convolution's backward in two halves: the same bits, and the second does without the input."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from passes.fuse.records import CONVOLUTION_BACKWARD, INPUT, MASK
from passes.memory import measure_peak
from passes.rewrite import rewrite
from passes.trace.arguments import bind_sample
from passes.trace.capture import capture
from planner import auto_checkpoint
from solvers.schedule import computes
from tests.zoo.compare import measured_peak_bytes, plan_at, same_bits

aten = torch.ops.aten

# batch, channels in and out, spatial size, kernel, stride, groups, transposed, bias
SHAPES = (
    (2, 8, 8, (100,), 3, 1, 1, False, True), (2, 64, 64, (28, 28), 3, 1, 1, False, False),
    (2, 64, 128, (28, 28), 1, 2, 1, False, False), (2, 3, 32, (64, 64), 7, 2, 1, False, False),
    (4, 32, 32, (28, 28), 3, 1, 32, False, True), (4, 48, 24, (14, 14), 2, 2, 1, True, True),
    (1, 64, 64, (32, 32), 3, 1, 1, False, True), (4, 16, 16, (9, 9), 3, 1, 4, False, True),
    (1, 8, 16, (16, 16, 16), 2, 2, 1, False, True), (1, 1, 8, (16, 16, 16), 5, 1, 1, False, True),
    (1, 32, 16, (8, 8, 8), 2, 2, 1, True, True),
)  # fmt: skip


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_halves_have_the_bits_of_the_whole(shape: Any, dtype: torch.dtype, layout: torch.memory_format) -> None:
    batch, inside, outside, size, kernel, stride, groups, transposed, bias = shape
    if layout is torch.channels_last and len(size) != 2:
        pytest.skip("channels_last is for images")
    torch.manual_seed(0)
    channels = (inside, outside // groups) if transposed else (outside, inside // groups)
    x = torch.randn(batch, inside, *size, dtype=dtype).contiguous(memory_format=layout)
    weight = torch.randn(*channels, *[kernel] * len(size), dtype=dtype).contiguous(memory_format=layout)
    padding, n = (kernel // 2 if stride == 1 else 0), len(size)
    settings = ([stride] * n, [padding] * n, [1] * n, transposed, [0] * n, groups)
    gradient = torch.randn_like(aten.convolution.default(x, weight, None, *settings))

    def backward(mask: list[bool], source: torch.Tensor = x) -> Any:
        sizes = [outside] if bias else None
        return CONVOLUTION_BACKWARD(gradient, source, weight, sizes, *settings, mask)

    whole = backward([True, True, bias])
    rest = backward([False, True, bias])
    other = torch.full((x.numel(),), float("nan"), dtype=dtype)  # its values must not matter
    of_input = backward([True, False, False], other.as_strided(x.shape, x.stride()))
    assert same_bits(whole[0], of_input[0])
    assert whole[0].stride() == of_input[0].stride()
    assert same_bits(whole[1], rest[1])
    assert not bias or same_bits(whole[2], rest[2])
    held = [measure_peak(partial(backward, m)) for m in ([True, True, bias], [False, True, bias], [True, False, False])]
    assert held[0] <= held[1] + held[2]  # what `join_convolutions` takes for granted


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def network() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 64, 3, padding=1), nn.ReLU(),
              nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 30), Total()]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(1, 8, 32, 32),)


def test_the_input_is_let_go_where_something_can_stand_for_it() -> None:
    model, sample = network()
    graph = capture(model, bind_sample(model, sample)).graph_module.graph
    halves = [n for n in graph.nodes if n.target is CONVOLUTION_BACKWARD]
    whole, *parts = [n.args[MASK] for n in halves]  # the last convolution's weight is larger than its input
    assert whole == [True, True, True]
    assert parts == [[False, True, True], [True, False, False], [False, True, True], [True, False, False],
                     [False, True, True]]  # fmt: skip
    inputs = [n.args[INPUT].target for n in halves]
    assert [target is aten.as_strided.default for target in inputs] == [False, False, True, False, True, False]


def narrow_and_wide() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """At its highest point it computes the gradient of the widest convolution's input."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 64, 3, padding=1), nn.GELU(),
              nn.Conv2d(64, 8, 3, padding=1), nn.GELU(), Total()]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(1, 8, 32, 32),)


def strided() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Its second convolution's input has a larger gradient than its result, and is computed first."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
              nn.Conv2d(16, 256, 1), nn.GELU(), nn.GELU(), Total()]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(2, 3, 32, 32),)


@pytest.mark.parametrize("share", [100, 80])
@pytest.mark.parametrize(
    ("build", "whole"),
    [
        (network, [True, True, True, False]), (narrow_and_wide, [False, False, True, False]),
        (strided, [True, True, False]),
    ],
)  # fmt: skip
def test_halves_run_at_once_where_there_is_room_and_bits_and_peak_are_the_same(
    build: Any, whole: list[bool], share: int
) -> None:
    model, sample = build()
    plan = plan_at(model, sample, share)
    model(*sample).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plan.module(*sample).backward()
    assert all(same_bits(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))
    assert measured_peak_bytes(plan.module, model, sample, plan.static_bytes) == plan.peak_bytes
    nodes = plan.rewritten.backward.graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD)
    assert [all(n.args[MASK]) for n in nodes] == whole
    assert all(n.users for n in plan.rewritten.backward.graph.nodes if n.target is torch.ops.aten.as_strided.default)


def test_halves_stay_apart_where_allocations_are_foretold() -> None:
    model, sample = network()
    plan = plan_at(model, sample, 100)
    prepared = plan.prepared
    apart = rewrite(prepared.traced, prepared.aliases, prepared.lowered, plan.schedule, as_scheduled=True)
    nodes = apart.backward.graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD)
    names = [prepared.lowered.problem.ops[i].name for i in computes(plan.schedule)]
    assert len(nodes) == sum(name.startswith("convolution_backward") for name in names) == 6


class Bottlenecks(nn.Module):
    """Two equal blocks, and behind them a wide layer, in which the step holds the most."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*network()[0][:4]) for _ in range(2))
        self.narrow = nn.Conv2d(64, 8, 1)
        self.wide = nn.Sequential(nn.Conv2d(8, 512, 1), nn.GELU(), nn.GELU(), Total())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.narrow(block(x))
        total: torch.Tensor = self.wide(x)
        return total


def test_halves_in_a_region_run_at_once_up_to_the_peak_of_the_step() -> None:
    model, sample = Bottlenecks(), (torch.randn(1, 8, 32, 32),)
    plan = auto_checkpoint(model, sample, regions=("blocks.?", "narrow", "wide"), progress=False)
    graphs = [run.planned.rewritten.backward.graph for run in plan.runs]
    masks = [n.args[MASK] for g in graphs for n in g.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD)]
    assert masks == [[True, True, True], [False, True, True], *[[True, True, True]] * 5]
    assert measured_peak_bytes(plan.module, model, sample, plan.static_bytes) == plan.peak_bytes
