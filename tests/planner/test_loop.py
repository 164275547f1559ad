"""The whole training loop under its budget: forward, backward, `optimizer.step()`, accumulation, changing losses."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from passes.memory import measure_peak, round_up
from planner import Plan, auto_checkpoint
from planner.files.planfile import _checksum, render
from planner.optimizer import MAX_ELEMENTS, measure_update
from planner.session import Session, open_session
from solvers.errors import MIB, BudgetError, PlannerError

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW for-loop": partial(torch.optim.AdamW, foreach=False),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "Adafactor": torch.optim.Adafactor,
}


def perceptron(width: int = 128, batch: int = 256) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 16)), torch.randn(batch, width)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def gradient_bytes(model: nn.Module) -> int:
    return sum(round_up(p.numel() * p.element_size(), 64) for p in model.parameters())


def run_loop(module: nn.Module, x: torch.Tensor, optimizer: Any, micro_batches: int) -> None:
    for _ in range(micro_batches):
        loss = module(x)
        loss.backward()
    optimizer.step()


def measured_loop(plan: Plan, model: nn.Module, x: torch.Tensor, optimizer: Any, micro_batches: int) -> int:
    """Highest point of a loop whose optimizer has its state and whose gradients were set to None."""
    run_loop(plan.module, x, optimizer, micro_batches)
    optimizer.zero_grad()
    resident = plan.static_bytes - (gradient_bytes(model) if micro_batches > 1 else 0)
    return resident + measure_peak(lambda: run_loop(plan.module, x, optimizer, micro_batches))


def open_loop(model: nn.Module, x: torch.Tensor, optimizer: Any, micro_batches: int = 1) -> Session:
    mode = "accumulated" if micro_batches > 1 else "fresh"
    return open_session(model, x, loss_fn=loss_of, optimizer=optimizer, gradients=mode, time_limit=2.0, progress=False)


# The optimizer's step -------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("batch", [8, 512])  # where the update peaks, and where the activations do
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_whole_loop_stays_under_its_budget(name: str, micro_batches: int, batch: int) -> None:
    model, x = perceptron(batch=batch)
    optimizer = OPTIMIZERS[name](model.parameters())
    session = open_loop(model, x, optimizer, micro_batches)
    plan = session.plan(max(session.minimum().minimum_bytes, session.plain_peak_bytes * 7 // 10))
    measured = measured_loop(plan, model, x, optimizer, micro_batches)
    assert plan.budget_bytes is not None and measured <= plan.budget_bytes
    assert measured <= plan.peak_bytes <= 1.02 * measured
    assert "the whole loop: forward" in plan.notes[-1]


def test_the_updates_temporaries_are_not_added_to_the_activations() -> None:
    model, x = perceptron(batch=512)
    peaks = [open_loop(model, x, OPTIMIZERS[n]).plain_peak_bytes for n in ("AdamW fused", "AdamW foreach")]
    assert peaks[0] == peaks[1]


def test_a_budget_below_the_update_is_refused_by_name() -> None:
    model, x = perceptron(batch=8)
    session = open_loop(model, x, OPTIMIZERS["AdamW foreach"])
    needed = session.prepared.update_peak_bytes
    assert session.minimum().floor_bytes >= needed
    with pytest.raises(BudgetError, match=r"optimizer\.step\(\) alone peaks at") as caught:
        session.plan(needed - 64)
    assert caught.value.floor_bytes is not None and caught.value.floor_bytes >= needed


@pytest.mark.parametrize("name", ["SGD", "AdamW for-loop", "AdamW foreach", "AdamW fused"])
def test_stand_ins_of_large_parameters_are_scaled_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 512), nn.LayerNorm(512))
    exact = measure_update(OPTIMIZERS[name], model, CPU)
    monkeypatch.setattr("planner.optimizer.MAX_ELEMENTS", 1 << 14)
    scaled = measure_update(OPTIMIZERS[name], model, CPU)
    assert scaled.state_bytes == pytest.approx(exact.state_bytes, rel=0.02)
    assert scaled.step_bytes == pytest.approx(exact.step_bytes, rel=0.02, abs=4096)
    assert MAX_ELEMENTS > 1 << 14


def test_an_instance_is_measured_with_its_own_groups_and_left_as_it_was() -> None:
    model, _ = perceptron()
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step()
    before = [p.clone() for p in model.parameters()]
    assert measure_update(optimizer, model, CPU).state_bytes == first.numel() * 4
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and keeps slow weights."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.detach().clone())


def test_an_optimizer_within_an_optimizer_is_counted_or_refused_and_never_stepped() -> None:
    model, x = perceptron()
    alone = measure_update(torch.optim.AdamW, model, CPU)
    both = measure_update(lambda own: Lookahead(torch.optim.AdamW(own)), model, CPU)
    assert both.state_bytes - alone.state_bytes == sum(round_up(p.nbytes, 64) for p in model.parameters())
    model(x).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(BudgetError, match="its inner is another optimizer, AdamW, with the model's own parameters"):
        measure_update(Lookahead(torch.optim.AdamW(model.parameters())), model, CPU)
    assert all(map(torch.equal, model.parameters(), before))


def test_hooks_of_every_optimizer_do_not_hear_of_stand_ins() -> None:
    heard: list[Any] = []
    registers = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    handles = [register(lambda *given: heard.append(given)) for register in registers]
    try:
        measure_update(torch.optim.SGD, perceptron()[0], CPU)
        assert heard == []
        torch.optim.SGD(perceptron()[0].parameters()).step()
        assert len(heard) == 2
    finally:
        for handle in handles:
            handle.remove()


def test_muon_is_counted_for_matrices() -> None:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    optimizer = torch.optim.Muon(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    found = measure_update(optimizer, model, CPU)
    optimizer.step()
    assert found.state_bytes == 2 * 64 * 128 * 4
    assert found.step_bytes == measure_peak(optimizer.step)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [(torch.optim.LBFGS, "LBFGS.*closure.*reserve_mb"), (torch.optim.Muon, "Muon.*reserve_mb"), ("adam", "not an opt")],
)
def test_what_cannot_be_measured_is_refused_by_name(optimizer: Any, said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        measure_update(optimizer, perceptron()[0], CPU)


def test_what_grows_faster_than_a_parameter_is_not_scaled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.optimizer.MAX_ELEMENTS", 1 << 12)
    with pytest.raises(BudgetError, match="grows faster"):
        measure_update(torch.optim.Muon, nn.Sequential(nn.Linear(128, 128, bias=False)), CPU)


# Gradients from before the step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_accumulated_gradients_are_counted_exactly(share: float) -> None:
    model, x = perceptron()
    session = open_loop(model, x, None, 2)
    plan = session.plan(max(session.minimum().minimum_bytes, int(share * session.plain_peak_bytes)))
    plan.module(x).backward()
    assert plan.static_bytes + measure_peak(lambda: plan.module(x).backward()) == plan.peak_bytes


def test_accumulated_gradients_of_a_shared_and_of_an_expanded_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.bias = nn.Linear(64, 64, bias=False), nn.Parameter(torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.tanh(self.inner(x.t()).t() @ self.inner.weight) + self.bias).sum() + self.bias.sum()

    torch.manual_seed(0)
    model, x = Tied(), torch.randn(64, 64)
    plan = auto_checkpoint(model, x, gradients="accumulated", progress=False)
    plan.module(x).backward()
    assert plan.static_bytes + measure_peak(lambda: plan.module(x).backward()) == plan.peak_bytes


def test_gradients_that_are_not_counted_are_told_once() -> None:
    model, x = perceptron()
    plan = auto_checkpoint(model, x, "80%", loss_fn=loss_of, progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            plan.module(x).backward()
    found = [str(w.message) for w in caught if "of gradients that the plan did not count" in str(w.message)]
    assert len(found) == 1
    held = sum(p.numel() * 4 for p in model.parameters()) / MIB
    assert f"holds {held:.3f} MiB" in found[0] and 'gradients="accumulated"' in found[0]


@pytest.mark.parametrize("options", [{"gradients": "accumulated"}, {"reserve_mb": 1}])
def test_gradients_that_are_counted_are_not_told(options: dict[str, Any]) -> None:
    model, x = perceptron()
    plan = auto_checkpoint(model, x, "80%", loss_fn=loss_of, progress=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            plan.module(x).backward()


def test_other_modes_are_refused() -> None:
    mode: Any = "stale"
    with pytest.raises(PlannerError, match="'stale' is unknown: it takes 'fresh', 'accumulated', 'consumed'"):
        auto_checkpoint(*perceptron(), gradients=mode, progress=False)


@pytest.mark.parametrize("gradients", ["accumulated", "consumed"])
def test_plan_files_keep_the_loop_and_older_ones_load(gradients: Any, tmp_path: Path) -> None:
    model, x = perceptron()
    optimizer = OPTIMIZERS["AdamW foreach"]
    plan = auto_checkpoint(model, x, "100%", loss_fn=loss_of, optimizer=optimizer, gradients=gradients, progress=False)
    loaded = Plan.load(plan.save(tmp_path / "loop.json"), model, x, loss_fn=loss_of)
    assert loaded.peak_bytes == plan.peak_bytes and loaded.notes == plan.notes
    first = auto_checkpoint(model, x, loss_fn=loss_of, progress=False).save(tmp_path / "first.json")
    data = json.loads(first.read_text())
    for key in ("gradients", "state_bytes", "step_bytes", "hook_bytes"):
        del data["options"][key]
    data["checksum"] = _checksum(data)
    first.write_text(render(data))
    assert Plan.load(first, model, x, loss_fn=loss_of).prepared.options.gradients == "fresh"


# Losses and lengths that change ---------------------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.body(x))
        return {"a": self.a(h), "b": self.b(h)}


def counted_replans(plan: Plan) -> list[Any]:
    state, made = plan.module._plan_state, []
    replan = state.replan

    def counting(*arguments: Any) -> Any:
        made.append(arguments[2])
        return replan(*arguments)

    state.replan = counting
    return made


@pytest.mark.parametrize("pattern", ["ab", "aab", "aabb"])
def test_losses_that_alternate_keep_a_plan_each(pattern: str) -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(8, 16)
    plan = auto_checkpoint(model, x, progress=False)
    made = counted_replans(plan)
    steps = [pattern[i % len(pattern)] for i in range(24)]
    for i, head in enumerate(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.zero_grad()
            loss_of(plan.module(x)[head]).backward()
        assert i < 12 or not caught  # from then on each step runs its own plan
        got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        loss_of(model(x)[head]).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert got.keys() == expected.keys() and all(torch.equal(got[n], expected[n]) for n in got)
    assert len(made) == 2


@pytest.mark.every(3)
@pytest.mark.parametrize(("lengths", "most"), [((6,), 0), ((6, 4, 5), 0), ((130,), 10)])
def test_a_cell_in_a_loop_is_planned_for_both_of_its_backwards(lengths: tuple[int, ...], most: int) -> None:
    """The last backward starts from `h` alone, all others from `h` and `c`; all calls come before any of them."""
    torch.manual_seed(0)
    model, start = nn.LSTMCell(8, 16), torch.zeros(4, 16)
    plan = auto_checkpoint(model, (torch.randn(4, 8), (start, start)), progress=False)
    made = counted_replans(plan)
    for i in range(8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = (start, start)
            for _ in range(lengths[i % len(lengths)]):
                state = plan.module(torch.randn(4, 8), state)
            state[0].pow(2).mean().backward()
        assert i < 4 or sum("replays the plain forward" in str(w.message) for w in caught) <= most
    assert len(made) <= 3  # two for a state that requires a gradient, and one or two for one that does not


def test_ten_lengths_are_planned_once_each_and_slowing_down_is_said() -> None:
    model, _ = perceptron(16)
    plan = auto_checkpoint(model, torch.randn(4, 16), loss_fn=loss_of, progress=False)
    made = counted_replans(plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for rows in range(5, 15):
                plan.module(torch.randn(rows, 16)).backward()
    assert len(made) == 10
    slow = [str(w.message) for w in caught if "calls were planned anew so far" in str(w.message)]
    assert [text.split()[0] for text in slow] == ["5", "10"] and "input: 5" in slow[0]


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(16, 16), 1.0

    def forward(self, x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        return self.inner(x).square().mean() * temperature * self.weight


@pytest.mark.parametrize("of_the_model", [False, True])
def test_a_number_that_changes_is_better_a_tensor(of_the_model: bool) -> None:
    model, x = Annealed(), torch.randn(4, 16)
    plan = auto_checkpoint(model, (x, 1.0), progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            model.weight = 0.5 + step if of_the_model else 1.0
            plan.module(x, 1.0 if of_the_model else 0.5 + step).backward()
    slow = [str(w.message) for w in caught if "calls were planned anew so far" in str(w.message)]
    assert len(slow) == 1 and "pass a number that changes as a tensor, or keep it in a buffer" in slow[0]


def test_no_buckets_are_advised_where_parameters_are_frozen_in_turn() -> None:
    model, x = perceptron(16)[0], torch.randn(4, 16)
    plan = auto_checkpoint(model, x, loss_fn=loss_of, progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            for k, parameter in enumerate(model.parameters()):
                parameter.requires_grad_(k > 2 or bool(step >> k & 1))
            plan.module(x).backward()
    (slow,) = (str(w.message) for w in caught if "calls were planned anew so far" in str(w.message))
    assert "let it stay, or change it rarely" in slow and "bucket" not in slow


def test_a_harmless_change_does_not_replan() -> None:
    model, x = perceptron(16)
    plan = auto_checkpoint(model, x, loss_fn=loss_of, progress=False)
    made = counted_replans(plan)
    for step in range(3):
        model.global_step = step  # type: ignore[assignment]
        model.history = [step]  # type: ignore[assignment]
        plan.module(x.clone()).backward()
    assert not made


@pytest.mark.parametrize(("budget", "said"), [("70%", 1), (None, 0)])
def test_calls_that_wait_for_one_backward_are_told_of_once(budget: Any, said: int) -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))), torch.randn(128, 32)
    module = auto_checkpoint(model, x, budget, loss_fn=lambda y: y.pow(2).mean(), progress=False, check=False).module
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            module(x).backward()
            model.zero_grad()
        module(x)  # without a backward: nothing is held
        assert not found
        for _ in range(2):
            sum(module(x) for _ in range(3)).backward()
            model.zero_grad()
    assert [str(w.message).partition(",")[0] for w in found] == ["an earlier call waits for its backward"] * said
