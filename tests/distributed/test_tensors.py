"""DTensors and collectives in a process group of one rank, which run as those of several do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from passes._torch import local_part
from passes.errors import Unsupported
from passes.memory import measure_peak
from planner import CaptureError, auto_checkpoint

from . import models
from .talking import QUICK


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random")
def test_gradients_are_spread_over_the_ranks_as_those_of_the_plain_step() -> None:
    """Under sequence parallel those of norms are sums that eager has not added up yet."""
    (model, plain), batch = (models.spread_sequence(models.scored()) for _ in range(2)), models.tokens(0)
    plan = auto_checkpoint(model, (batch, batch), "100%", **QUICK)
    for module in (plan.module, plain):
        torch.manual_seed(0)
        for start in ("loss", "loss", "logits"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the logits' backward is replayed
                module(batch, batch)[start].sum().backward()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert any(p.grad.placements != p.placements for p, _ in pairs if hasattr(p, "placements"))
    for mine, own in pairs:
        assert torch.equal(local_part(mine.grad), local_part(own.grad))
        assert getattr(mine.grad, "placements", None) == getattr(own.grad, "placements", None)


def test_tensor_parallel_within_data_parallel_is_refused_by_name() -> None:
    model, batch = models.spread(models.language(2)), models.tokens(0, rows=1)
    _pre_dp_module_transform(model)
    with pytest.raises(Unsupported, match=r"_pre_dp_module_transform\) at module.* DTensors .*Use one of the two"):
        auto_checkpoint(DistributedDataParallel(model), (batch, batch), "100%", **QUICK)


@pytest.mark.filterwarnings("ignore:DTensor random")
def test_gradients_leave_as_they_are_made() -> None:
    model, batch = models.spread(models.language(2)), models.tokens(0, rows=1)
    plan = auto_checkpoint(model, (batch, batch), "100%", gradients="consumed", **QUICK)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def step() -> None:
        plan.module(batch, batch).backward()

    step()
    held = sum(local_part(t).untyped_storage().nbytes() for t in (*model.parameters(), batch))
    assert held + measure_peak(step) == pytest.approx(plan.peak_bytes, rel=1e-3)


@pytest.mark.filterwarnings("ignore:DTensor random")
def test_a_sum_that_goes_on_outside_of_the_step_is_told_of() -> None:
    model, batch = models.spread(models.language(1)), models.tokens(0)
    model.head.weight = model.words.weight  # read twice
    plan = auto_checkpoint(model, (batch, batch), "100%", **QUICK)
    with pytest.warns(UserWarning, match=r"the gradient of words.weight is a sum"):
        (plan.module(batch, batch) + model.words.weight.to_local().sum()).backward()


@pytest.mark.parametrize(
    ("call", "why"), [("reduce(x, 0)", "A call of torch.distr"), ("all_gather_object(every, 1)", "A tensor is given")]
)
def test_a_collective_that_cannot_be_traced_is_named(call: str, why: str) -> None:
    class Calls(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            every: list[Any] = [None]
            if "object" in call:
                dist.all_gather_object(every, 1)
            else:
                dist.reduce(x, 0)
            return super().forward(x).sum()

    with pytest.raises(CaptureError, match=rf"`dist\.{re.escape(call)}`\. {why}"):
        auto_checkpoint(Calls(16, 16), torch.randn(8, 16), regions="whole", **QUICK)
