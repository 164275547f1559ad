"""What a caller does to outputs of a planned step of which one is computed from another, or lies in its memory."""

from __future__ import annotations

import copy
import importlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.run.listeners import _asked_for
from passes.run.tensors import distinct
from planner import Plan, PlannerError, auto_checkpoint
from tests.planner.steps import assert_same_gradients

X, Y = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 5


# Computed from one another --------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.body(x)
        logits = self.head(hidden)
        return F.cross_entropy(logits, y), logits, hidden, hidden.detach().exp(), self.head(hidden.detach()).exp()


Outputs = tuple[torch.Tensor, ...]


def _scaled(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    outputs[1].register_hook(lambda gradient: gradient * 0.5)
    return outputs[0]


def _scaled_twice(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    outputs[1].register_hook(lambda gradient: gradient * 0.5)
    outputs[2].register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    outputs[2].register_hook(lambda gradient: gradient + 1)
    return outputs[0]


def _scaled_with_more(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    outputs[1].register_hook(lambda gradient: gradient * 0.5)
    return outputs[0] + outputs[1].square().mean()


def _looked_at(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    outputs[2].register_hook(lambda gradient: seen.append(gradient.clone()))
    return outputs[0]


def _retained(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    for output in outputs[1:3]:
        output.retain_grad()
    seen += outputs[1:3]
    return outputs[0] * 2


def _retained_with_more(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    return _retained(outputs, seen) + outputs[2].sin().mean()


LISTENING = [_scaled, _scaled_twice, _scaled_with_more, _looked_at, _retained, _retained_with_more]


def _from_outside(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    outputs[1].register_hook(lambda gradient: gradient * 0.5)
    outputs[0].register_hook(lambda gradient: seen.append(gradient.clone()))
    outputs[1].retain_grad()
    seen.append(outputs[1])
    return outputs[1].square().mean()


def _after_a_detach(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    outputs[2].register_hook(seen.append)
    return outputs[4].mean()


def _removed(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    outputs[1].register_hook(lambda gradient: gradient * 0.5).remove()
    return outputs[0]


def _changed_before(outputs: Outputs, seen: list[Any]) -> torch.Tensor:
    outputs[1].mul_(2).register_hook(lambda gradient: gradient * 0.5)
    outputs[1].retain_grad()
    seen.append(outputs[1])
    return outputs[0] + outputs[1].square().mean()


def _values(seen: list[Any]) -> list[torch.Tensor]:
    found = [t.grad if t.requires_grad else t for t in seen]
    assert all(t is not None for t in found)
    return found


def _same_step(model: nn.Module, plain: nn.Module, planned: nn.Module, step: Callable[..., torch.Tensor]) -> None:
    both: list[list[Any]] = [[], []]
    for each, seen in zip((plain, planned), both, strict=True):
        step(each(X, Y), seen).backward()
    assert_same_gradients(model, plain)
    pairs = list(zip(*map(_values, both), strict=True))
    assert all(torch.equal(*pair) for pair in pairs)
    model.zero_grad()
    plain.zero_grad()


def _planned() -> tuple[Plan, nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Classifier()
    plain = copy.deepcopy(model)
    return auto_checkpoint(model, (X, Y), progress=False, time_limit=2, check=False), model, plain


def test_what_fabric_hooks_on_every_output_replays_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """It asks whether Fabric's own `backward` was called, of the loss and of the logits."""
    pytest.importorskip("lightning_fabric")
    from lightning_fabric import Fabric

    torch.manual_seed(0)
    plan = auto_checkpoint(Classifier(), (X, Y), progress=False, time_limit=1, check=False)
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    model = fabric.setup(plan.module)
    for _ in range(2):
        recwarn.clear()
        fabric.backward(model(X, Y)[0])
    assert not [w for w in recwarn if "replays" in str(w.message)]


@pytest.mark.parametrize("step", LISTENING)
def test_what_listens_to_an_output_hears_of_its_whole_gradient(step: Callable[..., torch.Tensor]) -> None:
    plan, model, plain = _planned()
    for _ in range(2):
        told = r"with a hook or retain_grad\(\) on .*replays the plain forward.*Listen to"
        with pytest.warns(UserWarning, match=told):
            _same_step(model, plain, plan.module, step)
    _same_step(model, plain, plan.module, lambda outputs, seen: outputs[0])


@pytest.mark.parametrize("step", [_from_outside, _after_a_detach, _removed, _changed_before])
@pytest.mark.filterwarnings("ignore:planning anew", "ignore:backward started from")
def test_what_hears_of_all_of_a_gradient_anyhow_leaves_the_planned_step(step: Callable[..., torch.Tensor]) -> None:
    plan, model, plain = _planned()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            _same_step(model, plain, plan.module, step)
    assert not any("retain_grad" in str(w.message) for w in told)


def test_a_hook_stays_and_is_removed_as_in_eager() -> None:
    plan, model, plain = _planned()
    for each in (plan.module, plain):
        loss, logits, *_ = each(X, Y)
        handles: list[Any] = []
        handles.append(logits.register_hook(lambda gradient, handles=handles: handles[0].remove()))
        kept = logits.register_hook(lambda gradient: gradient * 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward()
        assert list(logits._backward_hooks) == [kept.id]
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("ask", [
    lambda loss, logits, weight: torch.autograd.grad(loss * 2 + logits.sin().sum(), logits),
    lambda loss, logits, weight: torch.autograd.grad(loss + logits.sin().sum(), [logits, weight]),
    lambda loss, logits, weight: torch.autograd.grad(loss, (weight, logits), allow_unused=True),
    lambda loss, logits, weight: torch.autograd.grad(loss, logits),
    lambda loss, logits, weight: torch.autograd.grad(loss, torch.autograd.graph.get_gradient_edge(logits)),
    lambda loss, logits, weight: (loss + logits.sum()).backward(inputs=[weight, logits]),
])  # fmt: skip
def test_the_gradient_of_an_output_from_another_is_refused(ask: Callable[..., Any]) -> None:
    plan, *_ = _planned()
    loss, logits, *_ = plan.module(X, Y)
    with pytest.raises(PlannerError, match=r"asks for the gradient of \[1\].* computes \[0\] from \[1\].*Take"):
        ask(loss, logits, next(plan.module.parameters()))
    plan.module(X, Y)[0].backward()


@pytest.mark.parametrize("ask", [
    lambda loss, logits, weights: torch.autograd.grad(logits.square().sum(), [logits, weights[0]]),
    lambda loss, logits, weights: torch.autograd.grad(loss, weights),
    lambda loss, logits, weights: torch.autograd.grad(loss + logits.sin().sum(), weights),
    lambda loss, logits, weights: torch.autograd.grad(loss.detach() + logits.exp().sum(), logits),
])  # fmt: skip
@pytest.mark.filterwarnings("error:torch.autograd.grad", "ignore:planning anew", "ignore:backward started from")
def test_a_gradient_that_is_whole_is_given(ask: Callable[..., Any]) -> None:
    plan, _, plain = _planned()
    asked = [ask(*each(X, Y)[:2], list(each.parameters())) for each in (plan.module, plain)]
    assert len(asked[0]) == len(asked[1]) and all(map(torch.equal, *asked))


def test_the_stack_that_asks_is_found_from_threads_of_autograd() -> None:
    """As on CUDA, where autograd runs the backward in a thread that the caller waits for."""
    found: list[Any] = []

    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: found.extend(_asked_for()))
            thread.start()
            thread.join()
            return gradient

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Elsewhere.apply(x).sum(), [x])
    assert [asked is x for asked in found] == [True]
    Elsewhere.apply(x).sum().backward()
    assert len(found) == 1


def test_a_hook_of_any_of_several_tensors_is_not_called_where_there_is_no_gradient() -> None:
    plan, _, plain = _planned()
    heard = []
    for each in (plan.module, plain):
        loss, logits, *_ = each(X, Y)
        torch.autograd.graph.register_multi_grad_hook((loss, logits), heard.append, mode="any")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits.square().sum().backward()
    assert torch.equal(*heard)


def test_a_hook_of_several_tensors_is_refused_on_an_output_that_the_loss_is_computed_from() -> None:
    plan, model, _ = _planned()
    loss, logits, hidden, *_ = plan.module(X, Y)
    torch.autograd.graph.register_multi_grad_hook((logits, hidden), lambda gradients: None)
    with pytest.raises(PlannerError, match="register_multi_grad_hook was called with"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_an_exported_step_refuses_what_would_hear_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, *_ = _planned()
    plan.export(tmp_path / "hooked_step")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("hooked_step").load()
    loss, logits, *_ = module(X, Y)
    logits.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(RuntimeError, match=r"\[1\] has a hook, or retain_grad\(\).*computes \[0\] from \[1\]"):
        loss.backward()
    assert all(p.grad is None for p in module.parameters())
    loss, *_ = module(X, Y)
    loss.backward()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(16, 64), nn.GELU()), nn.Sequential(nn.Linear(64, 64), nn.GELU())
        self.c = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.a(x)
        return self.c(self.b(hidden)), hidden


class Regions(nn.Module):
    """Listens to what a region returns and reads, in code that cannot be traced."""

    def __init__(self, with_more: bool) -> None:
        super().__init__()
        self.first, self.second, self.with_more = Encoder(), Encoder(), with_more
        self.listen = ""
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, hidden = self.first(x)
        if self.listen == "scale":
            hidden.register_hook(lambda gradient: gradient * 0.5)
        elif self.listen == "retain":
            hidden.retain_grad()
            self.kept[:] = [hidden]
        if x.detach().sum() > 1e9:
            x = x * 2
        loss: torch.Tensor = self.second(x)[0].square().mean() + (hidden.mean() if self.with_more else 0)
        return loss


@pytest.mark.parametrize("from_the_sample_on", [True, False])
@pytest.mark.parametrize("listen", ["scale", "retain"])
@pytest.mark.parametrize("with_more", [True, False])
@pytest.mark.filterwarnings("ignore:backward started from")
def test_by_regions_what_listens_hears_of_the_whole_gradient(
    with_more: bool, listen: str, from_the_sample_on: bool
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model = Regions(with_more)
    model.listen = listen if from_the_sample_on else ""
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, X, progress=False, time_limit=2)
    assert any(run.path == "first" for run in plan.runs) != from_the_sample_on
    model.listen = plain.listen = listen
    for _ in range(2):
        for each in (plan.module, plain):
            each(X).backward()
        assert_same_gradients(model, plain)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.kept, plain.kept, strict=True))


# In the memory of one another -----------------------------------------------------------------------------------------


class Views(nn.Module):
    """The sample's loss reads `loss` alone; the others share memory, but for the two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layer(x)
        other, alone = hidden + 1, hidden * 3
        return {
            "loss": hidden.sum(), "other": other, "view": other.view(2, -1, 16), "alone": alone,
            "detached": alone.detach(), "left": (halves := hidden * 2)[:16], "right": halves[16:],
        }  # fmt: skip


def _view_changed(o: Any) -> torch.Tensor:
    o["view"].mul_(0.5)
    return o["loss"] + o["other"].sin().sum()


def _base_changed(o: Any) -> torch.Tensor:
    o["other"].mul_(0.5)
    return o["loss"] + o["view"].sin().sum()


def _base_changed_and_read(o: Any) -> torch.Tensor:
    return o["loss"] + o["other"].mul_(0.5).sin().sum()


def _detached_changed(o: Any) -> torch.Tensor:
    o["detached"].mul_(0.5)
    return o["loss"] + o["alone"].sin().sum()


def _changed_beside_a_detached(o: Any) -> torch.Tensor:
    o["alone"].mul_(0.5)
    return o["loss"] + o["alone"].sin().sum() + o["detached"].sum()


def _other_half_changed(o: Any) -> torch.Tensor:
    o["left"].mul_(0.5)
    return o["loss"] + o["right"].sin().sum() + o["left"].exp().sum()


def _planned_views() -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Views()
    plan = auto_checkpoint(model, X, progress=False, time_limit=1)
    return model, copy.deepcopy(model), plan.module


@pytest.mark.parametrize("change", [_view_changed, _base_changed])
@pytest.mark.filterwarnings("ignore:backward started from")
def test_outputs_in_one_memory_are_not_changed_where_another_is_read(change: Callable[..., torch.Tensor]) -> None:
    model, _, planned = _planned_views()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"of PlannedStep(Backward)? is a view and .*modified inplace"):
            change(planned(X)).backward()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("change", [
    _base_changed_and_read, _detached_changed, _changed_beside_a_detached, _other_half_changed,
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:backward started from", "ignore:planning anew")
def test_what_can_be_changed_has_the_plain_gradients(change: Callable[..., torch.Tensor]) -> None:
    model, plain, planned = _planned_views()
    for _ in range(2):
        for each in (planned, plain):
            change(each(X)).backward()
        assert_same_gradients(model, plain)


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x)
        return hidden, hidden[:2]


class SlicedRegions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.change = nn.ModuleList([Sliced(), Sliced()]), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden, part = layer(x)
            x = hidden * 2 if hidden.detach().sum() > 1e9 else hidden
            if self.change == "whole":
                hidden.mul_(2)
                x = torch.cat([part, hidden.detach()[2:]])
            elif self.change == "part":
                part.mul_(2)
                x = hidden.sin()
        return x.square().mean()


@pytest.mark.parametrize("from_the_sample_on", [True, False])
@pytest.mark.parametrize("change", ["whole", "part"])
def test_by_regions_outputs_in_one_memory_are_not_changed_or_stay_eager(change: str, from_the_sample_on: bool) -> None:
    torch.manual_seed(0)
    model = SlicedRegions()
    model.change = change if from_the_sample_on else ""
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, X, progress=False, time_limit=1)
    model.change = plain.change = change
    if from_the_sample_on:
        for each in (plan.module, plain):
            each(X).backward()
        assert_same_gradients(model, plain)
    else:
        with pytest.raises(RuntimeError, match="of PlannedStep(Backward)? is a view and"):
            plan.module(X).backward()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("view", [
    lambda z: z.view(4, -1), lambda z: z[1:3], lambda z: z.t(), torch.view_as_real, torch.conj, lambda z: z.real,
    lambda z: torch.conj(z).imag, lambda z: z.view_as(z),
])  # fmt: skip
def test_outputs_in_one_memory_are_views_of_one_tensor_and_have_the_same_values(view: Callable[..., Any]) -> None:
    numbers = torch.randn(4, 4, dtype=torch.complex64)
    expected = view(numbers).clone()
    for outputs in ([numbers, view(numbers).detach()], [view(numbers).detach(), numbers.detach()]):
        first, second = distinct(outputs, [True, True])
        found = second if outputs[0] is numbers else first
        assert torch.equal(found, expected) and found.stride() == view(numbers).stride()
        assert first is not second and (second._base is first or second._base is first._base)
        assert all(a is b for a, b in zip(distinct(outputs, [True, False])[:1], outputs, strict=False))
