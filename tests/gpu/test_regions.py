"""Plans by regions on a CUDA device: the code between them is measured there, and played with the regions' own ops."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from passes.device import empty_cache
from planner import Plan, auto_checkpoint
from tests.bench.step_time import BLOCKS
from tests.gpu.device import CUDA, HOLLOW, MIB, ON_A_GPU, measure, on_device, plan_for
from tests.zoo.compare import differences, run_step
from tests.zoo.table import ENTRIES

pytestmark = ON_A_GPU


class Dropping(nn.Module):
    """Asks for a draw before each block, as speech encoders do, so that it is planned by regions; ends in eager."""

    def __init__(self, width: int = 256, blocks: int = 4) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 1000)
        layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True) for _ in range(blocks))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            if torch.rand([]) >= 0.0:
                x = block(x)
        return self.head(x).logsumexp(-1).mean()


def _dropping(blocks: int = 4) -> tuple[nn.Module, Any]:
    return Dropping(blocks=blocks), torch.randn(16, 256, 64)


def _assert_as_predicted(plan: Plan, model: nn.Module, sample: Any) -> None:
    found = measure(plan, model, sample)
    assert 0.999 * plan.peak_bytes <= found.allocated_bytes <= plan.peak_bytes
    assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
    assert found.reserved_bytes == pytest.approx(plan.reserved_bytes, rel=0.02)
    assert found.retries == 0


@pytest.mark.parametrize("share", [None, 80, 60])
@pytest.mark.parametrize("name", ["gpt2-sdpa", "vit", "resnet50"])
def test_blocks_of_a_model(name: str, share: int | None) -> None:
    model, sample = on_device(ENTRIES[name])
    plan = plan_for(model, sample, share, regions=BLOCKS[name.partition("-")[0]])
    assert plan.runs
    _assert_as_predicted(plan, model, sample)


@pytest.mark.parametrize("share", [None, 60])
def test_what_cannot_be_traced_as_a_whole(share: int | None) -> None:
    model, sample = on_device(_dropping)
    plan = plan_for(model, sample, share)
    assert len(plan.runs) == 4
    _assert_as_predicted(plan, model, sample)


@pytest.mark.parametrize("options", [{"optimizer": torch.optim.AdamW}, {"gradients": "accumulated"}])
def test_what_the_loop_holds_besides(options: dict[str, Any]) -> None:
    model, sample = on_device(_dropping)
    plan = plan_for(model, sample, 60, **options)
    optimizer = options["optimizer"](model.parameters()) if "optimizer" in options else None
    for parameter in model.parameters() if optimizer is None else ():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    empty_cache(CUDA)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        plan.module(sample).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    assert 0.999 * plan.peak_bytes <= torch.cuda.max_memory_allocated() <= plan.peak_bytes
    assert torch.cuda.max_memory_reserved() == pytest.approx(plan.reserved_bytes, rel=0.02)


def _without_a_budget(megabytes: int) -> str:
    code = (
        "from planner import auto_checkpoint\n"
        "from tests.gpu.device import measure, on_device\n"
        "from tests.gpu.test_regions import _dropping\n"
        "model, sample = on_device(lambda: _dropping(12))\n"
        "plan = auto_checkpoint(model, sample, check=False, progress=False, time_limit=5)\n"
        "found = measure(plan, model, sample)\n"
        "print(plan.baseline_peak_bytes, plan.reserved_bytes, found.reserved_bytes, found.retries)"
    )
    environment = {**os.environ, "HOLLOW_MB": str(megabytes)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout.strip() or done.stderr


@pytest.mark.skipif(not HOLLOW, reason="a real device's memory is what it is")
@pytest.mark.parametrize("megabytes", [420, 300])
def test_planning_needs_no_more_than_the_plan_where_the_plain_step_does_not_fit(megabytes: int) -> None:
    """Blocks in a list, and what is in modules that cannot be regions, keep nothing while regions are looked for."""
    plain, predicted, reserved, retries = map(int, _without_a_budget(megabytes).split())
    assert plain > 2 * megabytes * MIB
    assert 0.95 * megabytes * MIB <= reserved <= megabytes * MIB
    assert reserved == pytest.approx(predicted, rel=0.02)
    assert retries == 0


@pytest.mark.skipif(not HOLLOW, reason="a real device's memory is what it is")
def test_a_device_that_is_too_small_is_refused_by_name() -> None:
    assert re.search(r"BudgetError: the step does not fit( on cuda:0)?: ", _without_a_budget(150))


def test_planning_leaves_nothing_on_the_device() -> None:
    """Blocks that are refused hold the caches that they were given, and errors the frames that they came through."""
    model, sample = on_device(ENTRIES["gpt2-sdpa"])
    levels = []
    for _ in range(2):
        auto_checkpoint(model, sample, float(MIB), check=False, progress=False, regions=BLOCKS["gpt2"])
        gc.collect()
        empty_cache(CUDA)
        levels.append(torch.cuda.memory_allocated())
    assert levels[0] == levels[1]
    resident = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()}
    assert levels[0] < 1.05 * sum(resident.values())


@pytest.mark.skipif(HOLLOW, reason="the kernels of the hollow GPU do nothing: there are no numbers to compare")
def test_the_numbers_are_the_plain_models() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model, sample = on_device(_dropping)
        plan = plan_for(model, sample, 60)
        assert differences(run_step(model, model, sample), run_step(plan.module, model, sample)) == []
    finally:
        torch.use_deterministic_algorithms(False)
