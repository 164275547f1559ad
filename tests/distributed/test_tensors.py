"""DTensors and collectives in a process group of one rank, which run as those of several do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from passes._torch import local_part
from planner import CaptureError, auto_checkpoint

from . import models
from .talking import QUICK, Talking


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


def test_a_collective_that_cannot_be_traced_is_named() -> None:
    with pytest.raises(CaptureError, match=r"`dist.all_reduce\(mean\)`\. A collective of torch.distributed"):
        auto_checkpoint(Talking("summed"), torch.randn(8, 16), regions="whole", **QUICK)
