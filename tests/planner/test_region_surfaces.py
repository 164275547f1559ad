"""What shows, keeps and ships a plan does so for a plan by regions, too."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from planner import Plan, PlannerError, auto_checkpoint
from planner.command.cli import app
from planner.show.curve import planned_curve
from planner.show.regions import BETWEEN, bands, lines
from tests.zoo.compare import differences, run_step

BLOCKS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Careful(nn.Module):
    """Looks at values between its blocks, so that it cannot be traced as a whole."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(BLOCKS)), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if not math.isfinite(x.detach().sum()):
                x = x.clamp(-1, 1)
        return self.head(x).pow(2).mean()


def careful() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Careful(), torch.randn(64, 8, 16)


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, Any, Plan]:
    model, sample = careful()
    return model, sample, auto_checkpoint(model, sample, "70%", progress=False, time_limit=2, check=False)


def test_regions_are_listed_with_all_that_is_held(made: tuple[nn.Module, Any, Plan]) -> None:
    _, _, plan = made
    paths = [r.path for r in plan.regions if r.runs]
    assert paths == [f"blocks.{i}" for i in range(BLOCKS)]
    assert sum(r.memory_share for r in plan.regions) == pytest.approx(1)
    assert sum(r.recompute for r in plan.regions) == pytest.approx(plan.overhead)
    [whole] = [r for r in plan.regions if r.path == "" and r.eager]
    assert "isfinite" in whole.eager


def test_every_surface_names_the_regions_and_why(made: tuple[nn.Module, Any, Plan], tmp_path: Path) -> None:
    _, _, plan = made
    page = plan.report(tmp_path / "report.html").read_text()
    for text in (str(plan), plan.explain(), plan._repr_html_(), page):
        assert f"Planned by {BLOCKS} regions" in text
        assert "isfinite" in re.sub(r"\s+", " ", text)
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page).group(1))  # type: ignore[union-attr]
    assert {path for _, _, path in data["regions"]} == {f"blocks.{i}" for i in range(BLOCKS)}
    assert plan._repr_html_().count("<title>blocks.") == 2 * BLOCKS
    assert "blocks.1/gelu" in plan.explain("blocks.1")


def test_bands_do_not_overlap_and_lie_within_the_step(made: tuple[nn.Module, Any, Plan]) -> None:
    _, _, plan = made
    curve = planned_curve(plan)
    found = list(bands(plan, curve.starts))
    ends = [0.0, *(end for _, end, _ in found)]
    assert all(end <= start for end, (start, _, _) in zip(ends, found, strict=False))
    assert ends[-1] <= curve.end


def test_a_saved_plan_by_regions_loads_and_decides_the_same(made: tuple[nn.Module, Any, Plan], tmp_path: Path) -> None:
    model, sample, plan = made
    first = plan.save(tmp_path / "plan.json").read_bytes()
    loaded = Plan.load(tmp_path / "plan.json", model, sample, progress=False)
    assert loaded.schedule == plan.schedule
    assert loaded.peak_bytes == plan.peak_bytes
    assert loaded.save(tmp_path / "again.json").exists()
    assert json.loads(first)["options"]["regions"] == [f"blocks.{i}" for i in range(BLOCKS)]
    plain, _ = careful()
    expected = run_step(plain, plain, sample)
    assert differences(expected, run_step(loaded.module, model, sample)) == []


def test_export_says_why_it_cannot(made: tuple[nn.Module, Any, Plan], tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match='regions="whole"'):
        made[2].export(tmp_path / "folder")


def test_a_whole_plan_has_no_regions() -> None:
    block = Block(16)
    plan = auto_checkpoint(block, torch.randn(8, 16), progress=False, time_limit=1, check=False)
    assert plan.regions == ()
    assert lines(plan) == []
    assert BETWEEN not in str(plan)


def test_the_command_line_takes_regions() -> None:
    factory = f"{Path(__file__)}:careful"
    options = ["--budget", "100%", "--no-check", "--json", "--time-limit", "1"]
    by_pattern = CliRunner().invoke(app, ["plan", factory, *options, "--regions", "blocks.[01]"])
    assert by_pattern.exit_code == 0, by_pattern.output
    assert json.loads(by_pattern.stdout)["options"]["regions"] == ["blocks.0", "blocks.1"]
    whole = CliRunner().invoke(app, ["plan", factory, *options, "--regions", "whole"])
    assert isinstance(whole.exception, PlannerError) or whole.exit_code == 2
