"""Lengths that forward takes from values of its inputs: how many elements a mask picks, a maximum, a list of sizes."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner import CaptureError, Plan, PlanFileError, auto_checkpoint
from tests.planner.test_regions import planned_at
from tests.zoo.compare import differences, measured_peak_bytes, run_step

Pick = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Picked(nn.Module):
    """Blocks over what `pick` takes of the rows that a mask marks."""

    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self.pick, self.first = pick, nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Tanh(), nn.Linear(128, 32)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.pick(self.first(x), mask)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def indexed(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask]


def columns(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[:, ~mask[0]]


def nonzero(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask.nonzero(as_tuple=True)]


def where(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h.flatten(0, 1)[torch.where(mask.flatten())[0]]


def selected(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(h, mask[..., None]).reshape(-1, 32)


def repeated(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(h.flatten(0, 1), mask.flatten().long(), 0)


def longest(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[:, : int(mask.sum(1).max())]


def split(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.cumsum(0) for part in h.flatten(0, 1)[: int(mask.sum())].split(mask.sum(1).tolist())])


def rows_of_a_list(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    pairs = mask.sum(1).reshape(-1, 2).tolist()
    return torch.cat([h[i, start : 2 * end] for i, (start, end) in enumerate(pairs)])


def made_of_tensors(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h + torch.tensor([row.sum() for row in mask])[:, None, None]


def written_before(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    view = mask.view(-1)
    mask.logical_not_()
    mask[:, 16:] = False
    return h.flatten(0, 1)[view]


PICKS = [
    indexed, columns, nonzero, where, selected, repeated, longest, split, rows_of_a_list, made_of_tensors,
    written_before,
]  # fmt: skip


def mask(count: int, seed: int = 0) -> torch.Tensor:
    """Rows in which so many of the 32 places are marked, and of the first 16 half of them."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(8):
        halves = [torch.randperm(16, generator=generator) < n for n in (count // 2, count - count // 2)]
        rows.append(torch.cat(halves))
    return torch.stack(rows)


def batch(count: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(seed)), mask(count, seed)


def twins(pick: Pick) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Picked(pick)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("pick", PICKS)
def test_a_model_that_takes_lengths_is_planned_as_a_whole(pick: Pick) -> None:
    model, plain = twins(pick)
    plan = planned_at(model, batch(), 0.3, check=True)
    assert not plan.regions and plan.recomputed and plan.checked.steps
    assert any("takes lengths from values of its inputs" in note for note in plan.notes)
    for sample in (batch(), batch(seed=1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not differences(run_step(plain, plain, sample), run_step(plan.module, model, sample))


@pytest.mark.parametrize("pick", [indexed, columns, nonzero, repeated, longest, split])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_what_is_picked_is_counted_to_the_byte(pick: Pick, share: float) -> None:
    model, _ = twins(pick)
    plan = planned_at(model, batch(), share)
    assert measured_peak_bytes(plan.module, model, batch(seed=1), plan.static_bytes) == plan.peak_bytes


@pytest.mark.parametrize("pick", [indexed, selected, longest, rows_of_a_list])
def test_calls_with_other_lengths_are_planned_by_regions_once(pick: Pick) -> None:
    model, plain = twins(pick)
    plan = planned_at(model, batch(), 0.7)
    said = []
    for sample in (batch(10), batch(12, 1), batch(8)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = run_step(plan.module, model, sample)
        assert not differences(run_step(plain, plain, sample), ours)
        said += [str(w.message) for w in caught if "planning anew" in str(w.message)]
    assert len(said) == 1 and "got other lengths" in said[0]
    assert {entry.by_regions for entry in plan.module._plan_state.cache} == {True, False}


def test_without_submodules_calls_with_other_lengths_are_planned_as_a_whole() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(4))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = x[mask]
            for weight in self.weights:
                x = torch.tanh(x @ weight).sin()
            return x.square().mean()

    torch.manual_seed(0)
    model = Bare()
    plain = copy.deepcopy(model)
    plan = planned_at(model, batch(), 0.5)
    for count in (8, 10, 8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = run_step(plan.module, model, batch(count))
        assert not differences(run_step(plain, plain, batch(count)), ours)
        assert not any("eager" in str(w.message) and "runs them" not in str(w.message) for w in caught)
    assert len(plan.module._plan_state.cache) == 3


def test_a_call_that_picks_more_than_fits_runs_plain_with_a_warning() -> None:
    model, plain = twins(indexed)
    plan = planned_at(model, batch(), 0.0)
    with pytest.warns(UserWarning, match=r"no schedule found within .* Such calls run in eager"):
        ours = run_step(plan.module, model, batch(28))
    assert not differences(run_step(plain, plain, batch(28)), ours)
    assert not differences(run_step(plain, plain, batch()), run_step(plan.module, model, batch()))


def of_what_is_computed(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask & (h.mean(-1) > -100)]


def of_draws(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask & (torch.rand(mask.shape) < 0.5)]


@pytest.mark.parametrize("pick", [of_what_is_computed, of_draws])
def test_lengths_of_other_values_are_refused_and_left_to_regions(pick: Pick) -> None:
    model, plain = twins(pick)
    with pytest.raises(CaptureError, match="shape of this result depends on data"):
        planned_at(model, batch(), 0.5, regions="whole")
    plan = planned_at(model, batch(), 1.0)
    assert plan.regions
    assert not differences(run_step(plain, plain, batch(8)), run_step(plan.module, model, batch(8)))


def test_a_plan_file_and_an_export_hold_for_the_samples_lengths(tmp_path: Path, monkeypatch: Any) -> None:
    model, plain = twins(indexed)
    plan = planned_at(model, batch(), 0.5)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", copy.deepcopy(model), batch(seed=1))
    assert again.peak_bytes == plan.peak_bytes
    with pytest.raises(PlanFileError, match="another model"):
        Plan.load(tmp_path / "plan.json", copy.deepcopy(model), batch(8))
    plan.export(tmp_path / "exported_lengths")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("exported_lengths").load()
    assert torch.equal(module(*batch(seed=1)), plain(*batch(seed=1)))
    with pytest.raises(Exception, match=r"questions \[64\], the sample \[96\]"):
        module(*batch(8))
    del sys.modules["exported_lengths"]


def masked_columns(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    mask[:, :16] = False
    return mask


def masked_by_a_view(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    mask[:, :16].logical_and_(torch.zeros(1, dtype=torch.bool))
    return mask


def masked_out(mask: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros_like(mask)
    torch.logical_and(mask, torch.arange(32) >= 16, out=kept)
    return kept


def masked_in_place(mask: torch.Tensor) -> torch.Tensor:
    kept = mask.long() - (torch.arange(32) < 16).long()
    F.relu(kept, inplace=True)
    return kept


def masked_in_a_list(mask: torch.Tensor) -> torch.Tensor:
    kept = [mask.long(), mask.long()]
    torch._foreach_mul_(kept, [(torch.arange(32) >= 16).long().expand(8, 32)] * 2)
    return kept[1]


@pytest.mark.parametrize("change", [masked_columns, masked_by_a_view, masked_out, masked_in_place, masked_in_a_list])
@pytest.mark.parametrize("regions", ["auto", "whole"])
def test_what_forward_writes_into_what_it_asks_about_counts(change: Callable[..., Any], regions: str) -> None:
    def doubled(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return h * 2 if change(mask).any() else h

    model, plain = twins(doubled)
    plan = planned_at(model, batch(), 0.7, regions=regions)
    x, marked = batch()
    first_half = marked & (torch.arange(32) < 16)
    for sample in ((x, marked), (x, first_half), (x, marked), (x, torch.zeros_like(marked))):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "planning anew")
            assert not differences(run_step(plain, plain, sample), run_step(plan.module, model, sample))


def test_a_guard_does_not_write_into_the_model() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor([-1, 2]))
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            F.relu(self.seen, inplace=True)
            h = self.layers(x)
            return (h.sin() if mask.any() else h).square().mean()

    torch.manual_seed(0)
    model = Counting()
    plain = copy.deepcopy(model)
    plan = planned_at(model, batch(), 0.5)
    for _ in range(3):
        for each in (model, plain):
            each.seen.sub_(1)
        assert not differences(run_step(plain, plain, batch()), run_step(plan.module, model, batch()))


def drawn_in_place(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    mask.bernoulli_(0.5)
    return h * 2 if mask.all() else h


def written_by_an_unknown_value(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros_like(mask)
    torch.gt(h.mean(-1), 1e6, out=kept)
    return h * 2 if kept.any() else h


@pytest.mark.parametrize("pick", [drawn_in_place, written_by_an_unknown_value])
def test_what_is_written_and_not_known_is_not_answered_from_the_sample(pick: Pick) -> None:
    model, plain = twins(pick)
    try:
        plan = planned_at(model, batch(), 1.0)
    except CaptureError:
        return
    for scale in (1, 1e9):
        sample = (batch()[0] * scale, batch()[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert not differences(run_step(plain, plain, sample), run_step(plan.module, model, sample))


def test_an_exported_guard_writes_as_forward_does(tmp_path: Path, monkeypatch: Any) -> None:
    def doubled(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return h * 2 if masked_columns(mask).any() else h

    model, plain = twins(doubled)
    planned_at(model, batch(), 0.5).export(tmp_path / "exported_masks")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("exported_masks").load()
    x, marked = batch()
    assert torch.equal(module(x, marked), plain(x, marked))
    with pytest.raises(Exception, match=r"questions \[False\], the sample \[True\]"):
        module(x, marked & (torch.arange(32) < 16))
    del sys.modules["exported_masks"]


def test_a_constant_mask_is_measured_for_what_it_picks() -> None:
    def below_the_diagonal(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return h[torch.ones(8, 32, dtype=torch.bool).tril()]

    model, _ = twins(below_the_diagonal)
    plan = auto_checkpoint(model, batch(), progress=False)
    assert not plan.regions
    assert measured_peak_bytes(plan.module, model, batch(), plan.static_bytes) == plan.peak_bytes
