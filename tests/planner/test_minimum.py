"""The smallest budget that a refusal names is one that works."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from planner import BudgetError, auto_checkpoint, preference
from planner.session import open_session
from solvers import known
from tests.zoo.compare import differences, run_step

from .small import mlp
from .steps import MIB


class Inner(nn.Module):
    """Its smallest peak needs recomputes that stand where they cannot run: after another module's forward began."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.gain = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.tensor(1.1))
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("index", torch.randperm(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x) * self.gain
        a, b = h.new_zeros(h.shape).copy_(-h) - h, h * 1
        c = checkpoint(lambda y: (y @ self.matrix).relu() * y, b, use_reentrant=False)
        self.mean.lerp_(c.detach().mean(0), 0.2)
        placed = h.clone()
        placed[:, self.index] = a
        return self.norm(placed), b * 2


class Outer(nn.Module):
    """Asks for a number, so that it is planned by regions."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.gain = nn.ModuleList(parts), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = (x,)
        for part in self.parts:
            found = part(outputs[0])
            outputs = (found,) if isinstance(found, Tensor) else found
        loss = sum((t.pow(2).mean() for t in outputs), torch.zeros(()))
        if loss.item() > 1e9:
            loss = loss * 2
        return loss * self.gain, *outputs


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.silu(self.gate(x)) * self.up(x).tanh()), 0.1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "inner": lambda: Outer(Inner()),
    "mixed": lambda: Outer(Gated(), Inner()),
}


@pytest.mark.every(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seconds", [0.1, 0.3])
def test_what_a_refusal_names_works(name: str, seconds: float) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(8, 8)
    plain, options = copy.deepcopy(model), {"progress": False, "check": False, "time_limit": seconds}
    known._schedules.clear()  # as in another process
    with pytest.raises(BudgetError) as refused:
        auto_checkpoint(model, x, budget_mb=85 / MIB, **options)
    named = refused.value.minimum_bytes
    assert named is not None and f"({named} bytes)" in str(refused.value)
    plan = auto_checkpoint(model, x, budget_mb=named / MIB, **options)
    assert plan.peak_bytes <= named
    assert differences(run_step(plain, plain, x), run_step(plan.module, model, x)) == []


def test_what_does_not_fit_where_it_can_run_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search has found a schedule that fits, which peaks higher where its recomputes can run."""
    known._schedules.clear()
    model, x = mlp()
    session = open_session(model, x, progress=False, time_limit=0.5)
    minimum, plain = session.minimum(), session.solve(None)
    assert plain.peak_bytes > minimum.minimum_bytes
    found, move = preference.solve_preferring, preference.placed

    def to_plain(prepared: object, schedule: object) -> object:
        return schedule if schedule in (minimum.schedule, plain.schedule) else plain.schedule

    monkeypatch.setattr(preference, "placed", to_plain)
    assert move(session.prepared, minimum.schedule) == minimum.schedule
    budget = (minimum.minimum_bytes + plain.peak_bytes) // 2
    assert found(session.problem, (), budget, session.prepared.options, None).schedule != minimum.schedule
    solved = session.solve(budget)
    assert solved.schedule == minimum.schedule and solved.notes == (preference.SMALLEST,)
    with pytest.raises(BudgetError) as refused:
        session.solve(minimum.minimum_bytes - 1)
    assert refused.value.minimum_bytes == minimum.minimum_bytes
