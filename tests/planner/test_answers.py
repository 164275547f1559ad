"""Questions about computed values: a step takes the sample's answers, compares its own, and leaves others to eager."""

from __future__ import annotations

import copy
import importlib
import math
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F

from planner import CaptureError, Plan, auto_checkpoint
from tests.planner.test_regions import planned_at
from tests.zoo.compare import differences, measured_peak_bytes, run_step
from tests.zoo.hazards import Wrap


class Checked(nn.Module):
    """Blocks with dropout and a batch norm, each asked about what it makes."""

    def __init__(self, ask: Callable[[torch.Tensor], torch.Tensor], middle: nn.Module | None = None) -> None:
        super().__init__()
        self.ask, middle = ask, middle or nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), middle, nn.Linear(128, 32)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.ask(self.norm(x + block(x)))
        return x.square().mean()


def finite(x: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(x).all():
        x = torch.nan_to_num(x, 0.0, 1.0, -1.0)
    return x


def asserted(x: torch.Tensor) -> torch.Tensor:
    assert not torch.isnan(x.sum()), "not a number"
    return x


def counted(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-9, 9) if torch.isinf(x).sum() > 0 else x


def as_item(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if (x > 1e6).any().item() else x


def equal(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if not torch.equal(x, x.abs()) else x


def close(x: torch.Tensor) -> torch.Tensor:
    return x if torch.allclose(x, x.abs(), atol=0.1) else x.sin()


def combined(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if (x > 1e6).any() | (x < -1e6).any().cpu() else x


def within_torch(x: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(x, torch.zeros_like(x), F.softplus(x), reduction="none")


def contained(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if 0.125 in x else x


def written_later(x: torch.Tensor) -> torch.Tensor:
    large = (x > 1e6).any()
    if large:
        x = x.clamp(max=1e6)
    return x + large.logical_not_()


def rows() -> torch.Tensor:
    return torch.randn(64, 32)


def spoiled(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, 0] = math.inf
    return x


@pytest.mark.parametrize("ask", [finite, asserted, counted, as_item, equal, close, combined, within_torch, contained,
                                 written_later])  # fmt: skip
def test_a_model_that_asks_is_planned_as_a_whole(ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Checked(ask), rows()
    plain, draws, state = copy.deepcopy(model), torch.get_rng_state(), copy.deepcopy(model.state_dict())
    plan = planned_at(model, x, 0.3, check=True)
    assert not plan.regions and plan.recomputed and plan.checked.steps
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert any("asks about values that it computes" in note and "test_answers.py" in note for note in plan.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not differences(run_step(plain, plain, x), run_step(plan.module, model, x))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_is_asked_about_is_counted_to_the_byte(share: float) -> None:
    torch.manual_seed(0)
    model, x = Checked(finite, nn.Tanh()), rows()
    plan = planned_at(model, x, share)
    assert measured_peak_bytes(plan.module, model, x, plan.static_bytes) == plan.peak_bytes


def test_a_call_that_answers_otherwise_has_the_plain_forwards_numbers() -> None:
    torch.manual_seed(0)
    model, x = Checked(finite), rows()
    plain = copy.deepcopy(model)
    plan = planned_at(model, x, 0.3)
    for batch, strays in ((x, False), (spoiled(x), True), (x, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = run_step(plan.module, model, batch)
        assert not differences(run_step(plain, plain, batch), ours)
        said = "`if not torch.isfinite(x).all():` is False, and was True"
        assert [said in str(w.message) for w in caught] == [True] * strays


def test_an_assertion_of_the_models_own_is_raised_as_in_eager() -> None:
    torch.manual_seed(0)
    model, x = Checked(asserted), rows()
    plain = copy.deepcopy(model)
    plan = planned_at(model, x, 0.3)
    for module in (plan.module, plain):
        torch.manual_seed(3)
        with pytest.raises(AssertionError, match=r"^not a number"):
            module(x * math.nan)
    pairs = zip(model.buffers(), plain.buffers(), strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    assert not differences(run_step(plain, plain, x), run_step(plan.module, model, x))


def test_tensors_of_other_shapes_are_not_equal_whatever_they_hold() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        return (h.sin() if torch.equal(h, x[1:]) else h).square().mean()

    torch.manual_seed(0)
    model = Wrap(forward, layers=nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)))
    plan = planned_at(model, rows(), 0.3)
    assert not plan.regions and not any("asks about values" in note for note in plan.notes)


def test_tensors_that_forward_holds_are_asked_about_in_each_step() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.layers = (rows(),), nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held = self.held[0]
            h = self.layers(x if torch.equal(held, held.unsqueeze(-1).squeeze(-1)) else x.sin())
            return (h if torch.equal(held, self.held[0]) else h.sin()).square().mean()

    torch.manual_seed(0)
    model, x = Held(), rows()
    plain = copy.deepcopy(model)
    plan = planned_at(model, x, 0.3)
    assert not plan.regions
    assert not differences(run_step(plain, plain, x), run_step(plan.module, model, x))
    for each in (model, plain):
        each.held[0][0, 0] = math.nan  # not equal to itself any more
    with pytest.warns(UserWarning, match="is False, and was True"):
        ours = run_step(plan.module, model, x)
    assert not differences(run_step(plain, plain, x), ours)


def test_what_a_loss_of_torchs_raises_is_raised_as_in_eager() -> None:
    def forward(self: Any, x: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return F.gaussian_nll_loss(self.layers(x), x, variance)

    torch.manual_seed(0)
    model = Wrap(forward, layers=nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)))
    plan = planned_at(model, (rows(), rows().abs()), 0.3)
    assert not plan.regions
    with pytest.raises(ValueError, match="negative entr"):
        plan.module(rows(), rows())


def test_a_check_that_keeps_an_index_in_bounds() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        index = (3 * x.abs()).long()
        if (index >= 16).any():
            index = index.clamp(max=15)
        return self.layers(self.table(index)).square().mean()

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 8))
    model, x = Wrap(forward, table=nn.Embedding(16, 32), layers=layers), torch.rand(32, 8)
    plain = copy.deepcopy(model)
    plan = planned_at(model, x, 0.3)
    with pytest.warns(UserWarning, match=r"index out of range .* of table in the planned forward.* not raise it\.$"):
        ours = run_step(plan.module, model, 50 * x)
    assert not differences(run_step(plain, plain, 50 * x), ours)
    assert not differences(run_step(plain, plain, x), run_step(plan.module, model, x))


def test_where_calls_stray_again_and_again_regions_are_planned() -> None:
    torch.manual_seed(0)
    model, x = Checked(finite), rows()
    plain = copy.deepcopy(model)
    plan = planned_at(model, x, 0.5)
    counts = []
    for batch in (*[spoiled(x)] * 4, x):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = run_step(plan.module, model, batch)
        assert not differences(run_step(plain, plain, batch), ours)
        counts.append(len(caught))
    assert counts == [1, 1, 2, 0, 0]  # the third call says that the next one is planned by regions
    assert [entry.by_regions for entry in plan.module._plan_state.cache] == [True]


def test_a_model_without_submodules_keeps_its_plan_however_often_calls_stray() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = finite(torch.tanh(x @ weight).sin())
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Bare(), rows()
    plain, spoiled_rows = copy.deepcopy(model), x.clone()
    spoiled_rows[0, 0] = math.nan
    plan = planned_at(model, x, 0.5)
    entry = plan.module._plan_state.cache[0]
    for batch in (*[spoiled_rows] * 5, x):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = run_step(plan.module, model, batch)
        assert not differences(run_step(plain, plain, batch), ours)
        assert not any("run in eager" in str(w.message) for w in caught)
    assert not caught and plan.module._plan_state.cache == [entry] and not entry.by_regions


class Between(nn.Module):
    """Blocks that check what they make, and between them a question that no plan can take."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Wrap(lambda own, x: finite(x + own.layers(x)), layers=nn.Sequential(
                nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 32),
            )) for _ in range(3)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            assert math.isfinite(x.detach().sum())
        return x.square().mean()


def test_regions_are_planned_with_answers_of_their_own_and_those_that_stray_stay_eager() -> None:
    torch.manual_seed(0)
    model, x = Between(), torch.randn(128, 32)
    plain = copy.deepcopy(model)
    plan = planned_at(model, x, 0.3, check=True)
    assert [region.path for region in plan.regions if not region.eager][:3] == ["blocks.0", "blocks.1", "blocks.2"]
    assert plan.recomputed
    assert measured_peak_bytes(plan.module, model, x, plan.static_bytes) == plan.peak_bytes
    for number, batch in enumerate((x, *[spoiled(x)] * 4, x)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = run_step(plan.module, model, batch)
        assert not differences(run_step(plain, plain, batch), ours)
        said = ["planned region blocks.0 not used" in str(w.message) for w in caught]
        assert said == ([True] if 0 < number < 4 else [])
    runs = plan.module._plan_state.cache[0].planned.runs
    assert {run.path for run in runs} == {"blocks.0.layers", "blocks.1", "blocks.2"}


def drawn_alone(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if (torch.rand(2) < 0.5).any() else x


def branch(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.mean() > 0 else x


def drawn_too(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if (x.std() * torch.randn(1) > 0).any() else x


@pytest.mark.parametrize("ask", [drawn_alone, branch, drawn_too])
def test_what_each_batch_may_answer_otherwise_is_refused(ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(1)
    with pytest.raises(CaptureError, match="The value of a tensor is needed in Python here") as caught:
        auto_checkpoint(Checked(ask), rows(), solver="greedy", regions="whole", progress=False)
    assert caught.value.location == f"{__file__}:{ask.__code__.co_firstlineno + 1}"


def test_a_forward_that_writes_into_a_parameter_is_not_run_for_its_answers() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        return finite(self.layer(x)).sum()

    model = Wrap(forward, layer=nn.Linear(32, 32))
    before = model.layer.weight.detach().clone()
    with pytest.raises(CaptureError, match="The value of a tensor is needed"):
        auto_checkpoint(model, rows(), solver="greedy", regions="whole", progress=False)
    assert torch.equal(model.layer.weight, before)


def variational() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mean, scale = self.encoder(x).chunk(2, -1)
        code = Normal(mean, F.softplus(scale), validate_args=True)
        prior = Normal(torch.zeros_like(mean), torch.ones_like(scale), validate_args=True)
        made = Normal(self.decoder(code.rsample()), 1.0, validate_args=True)
        return (kl_divergence(code, prior).sum(-1) - made.log_prob(x).sum(-1)).mean()

    def layers(*sizes: int) -> nn.Module:
        return nn.Sequential(*(m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.GELU())))

    return Wrap(forward, encoder=layers(32, 128, 128, 16), decoder=layers(8, 128, 128, 32)), torch.randn(256, 32)


def policy() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        chosen = Categorical(logits=self.net(x), validate_args=True)
        return -chosen.log_prob(action).mean() - 0.01 * chosen.entropy().mean()

    net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 9))
    return Wrap(forward, net=net), (torch.randn(256, 32), torch.randint(9, (256,)))


@pytest.mark.parametrize("make", [variational, policy])
def test_the_checks_of_distributions_are_planned(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    torch.manual_seed(0)
    model, sample = make()
    plain = copy.deepcopy(model)
    plan = planned_at(model, sample, 0.3)
    assert not plan.regions
    assert not differences(run_step(plain, plain, sample), run_step(plan.module, model, sample))


def test_another_size_is_planned_with_answers_of_its_own() -> None:
    torch.manual_seed(0)
    model = Checked(finite)
    plain = copy.deepcopy(model)
    plan = planned_at(model, rows(), 0.5)
    for count in (48, 32, 24, 16):
        batch = torch.randn(count, 32)
        with warnings.catch_warnings(record=True):
            ours = run_step(plan.module, model, batch)
        assert not differences(run_step(plain, plain, batch), ours)
    assert not any(entry.by_regions for entry in plan.module._plan_state.cache)


def test_a_plan_with_answers_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Checked(finite), rows()
    plan = planned_at(model, x, 0.3)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", twin := copy.deepcopy(model), x)
    assert loaded.schedule == plan.schedule
    assert not differences(run_step(plan.module, model, x), run_step(loaded.module, twin, x))


def test_an_exported_step_compares_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Checked(finite), rows()
    plan = planned_at(model, x, 0.3)
    plan.export(tmp_path / "exported_answers")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = importlib.import_module("exported_answers")
    try:
        module = folder.load()
        assert not differences(run_step(plan.module, model, x), run_step(module, module, x))
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(folder.ExportError, match=r"is False, and was True for the sample"):
            module(spoiled(x))
        assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "exported_answers"]:
            del sys.modules[name]
