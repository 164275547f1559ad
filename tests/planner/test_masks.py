"""What is written where a boolean mask says, and needs a gradient: mask tokens, features of images among embeddings."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import CaptureError
from tests.planner.test_lengths import batch
from tests.planner.test_regions import planned_at
from tests.zoo.compare import differences, measured_peak_bytes, run_step

Sample = tuple[Tensor, Tensor, Tensor]


class Filled(nn.Module):
    """Blocks over rows of which `fill` has written some."""

    def __init__(self, fill: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fill, self.first, self.token = fill, nn.Linear(16, 32), nn.Parameter(torch.randn(32))
        self.register_buffer("columns", torch.arange(32) % 3 > 0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Tanh(), nn.Linear(128, 32)) for _ in range(3)
        )

    def forward(self, x: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        x = self.fill(self, self.first(x).sin(), mask, features)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def token(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    h[mask] = self.token
    return h


def features(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    h[mask] = self.first(features).tanh()
    return h


def rows_of_one_dimension(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    flat = h.flatten(0, 1)
    flat[~mask.flatten(), 4:] = self.token[4:]
    return flat


def columns_of_a_buffer(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    h[..., self.columns] = h[..., self.columns] * 2
    return h


def columns_of_a_constant(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    h[:, None, :, torch.arange(32) > 7] = self.token[8:]
    return h


def added(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    return h.index_put((mask,), self.first(features), accumulate=True)


def written(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    return h.index_put_(indices=(mask,), values=self.first(features))


def into_zeros(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    made = torch.zeros(h.shape)
    made[mask] = self.first(features)
    return made + h


FILLS = [token, features, rows_of_one_dimension, columns_of_a_buffer, columns_of_a_constant, added, written, into_zeros]


def filled(count: int = 12, seed: int = 0) -> Sample:
    x, mask = batch(count, seed)
    return x, mask, torch.randn(8 * count, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.every(2)
@pytest.mark.parametrize("fill", FILLS)
def test_what_a_mask_places_is_planned_as_a_whole(fill: Any) -> None:
    torch.manual_seed(0)
    model = Filled(fill)
    plain = copy.deepcopy(model)
    plan = planned_at(model, filled(), 0.3, check=True)
    assert not plan.regions and plan.recomputed and plan.checked.steps
    for sample in (filled(), filled(seed=1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not differences(run_step(plain, plain, sample), run_step(plan.module, model, sample))
    assert measured_peak_bytes(plan.module, model, filled(seed=2), plan.static_bytes) <= plan.peak_bytes


@pytest.mark.parametrize("fill", [token, features])
def test_calls_whose_masks_pick_other_numbers_are_planned_anew(fill: Any) -> None:
    torch.manual_seed(0)
    model = Filled(fill)
    plain, plan = copy.deepcopy(model), planned_at(model, filled(), 0.7)
    said = []
    for sample in (filled(10), filled(12, 1), filled(8), filled(10, 3)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = run_step(plan.module, model, sample)
        assert not differences(run_step(plain, plain, sample), ours)
        said += [str(w.message) for w in caught]
    assert any("planning anew" in each for each in said)


def test_what_needs_no_gradient_is_placed_by_any_mask() -> None:
    def zeros(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        h[mask] = 0.0
        h[~mask] = features.mean()
        return h

    torch.manual_seed(0)
    model = Filled(zeros)
    plain, plan = copy.deepcopy(model), planned_at(model, filled(), 0.7)
    for count in (10, 12):
        sample = (*filled(count)[:2], filled()[2])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not differences(run_step(plain, plain, sample), run_step(plan.module, model, sample))


def test_a_mask_of_computed_values_is_refused_and_left_to_regions() -> None:
    def computed(self: Any, h: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        h[h.detach() > 0] = self.token.sum()
        return h

    torch.manual_seed(0)
    model = Filled(computed)
    plain = copy.deepcopy(model)
    with pytest.raises(CaptureError, match="shape of this result depends on data"):
        planned_at(model, filled(), 0.5, regions="whole")
    plan = planned_at(model, filled(), 1.0)
    assert plan.regions
    assert not differences(run_step(plain, plain, filled()), run_step(plan.module, model, filled()))
