"""Ops are measured on made-up data that costs what real data does."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.memory import measure_peak
from passes.one_op import _even_groups
from passes.profile import Counting
from planner import auto_checkpoint
from tests.zoo.compare import measured_peak_bytes, plan_at

GROUPED = torch.ops.aten._grouped_mm.default


@pytest.mark.parametrize(
    ("left", "right", "rows"), [((12, 4), (3, 4, 5), 12), ((5, 12), (12, 4), 12), ((3, 5, 4), (4, 12), 12)]
)
def test_groups_share_the_rows_evenly(left: tuple[int, ...], right: tuple[int, ...], rows: int) -> None:
    node: Any = SimpleNamespace(target=GROUPED)
    ends = torch.zeros(3, dtype=torch.int32)
    spread = _even_groups(node, (torch.ones(left), torch.ones(right), ends))[2]
    assert spread.tolist() == [rows // 3, 2 * rows // 3, rows] and spread.dtype == ends.dtype


def test_other_ops_keep_what_was_made_up() -> None:
    node: Any = SimpleNamespace(target=torch.ops.aten.addmm.default)
    arguments = torch.ones(3), torch.ones(2, 4), torch.zeros(4, 3)
    assert _even_groups(node, arguments) is arguments


def test_gradients_that_pass_a_count_are_accumulated_as_they_are() -> None:
    """Held by what is counted, the weight's and the bias's would be copied: two ops more each."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    with Counting(lambda _: 1.0) as counting:
        layer(x).sum().backward()
    assert counting.total == 5  # addmm, sum, ones_like, mm, sum


class Warped(nn.Module):
    """The backward of sampling makes a gradient of the grid, too, which nobody asks for: twice the image's size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), [len(x), 1, *x.shape[2:]], align_corners=False)
        return F.grid_sample(self.layer(x), grid, align_corners=False).square().mean()


def test_a_result_that_is_not_asked_for_is_workspace() -> None:
    model, x = Warped(), torch.randn(4, 3, 32, 32)
    plan = auto_checkpoint(model, x, progress=False)
    assert measured_peak_bytes(plan.module, model, x, plan.static_bytes) == plan.peak_bytes


class Dropped(nn.Module):
    """Six layers whose dropouts run again where memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_a_dropout_that_runs_again_holds_one_generator_state_beside_the_lent_one() -> None:
    model, x = Dropped(), torch.randn(256, 64)
    plan = plan_at(model, x, 30)
    assert any(name.startswith("native_dropout") for name in plan.recomputed)
    assert measured_peak_bytes(plan.module, model, x, plan.static_bytes) == plan.peak_bytes


def test_garbage_from_before_is_not_collected_while_something_is_measured() -> None:
    collects: list[bool] = []
    measure_peak(lambda: collects.append(gc.isenabled()))
    assert collects == [False] and gc.isenabled()
