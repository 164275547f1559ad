"""Gradients leave the backward as they are made: hooks, an optimizer in the backward, what stops it half-way."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from passes.errors import VerificationError
from passes.memory import measure_peak
from passes.run.step import BackwardTwice, ChangedInPlace
from passes.verify import verify
from planner import Plan, auto_checkpoint
from planner.files.planfile import _checksum, render
from planner.session import open_session
from solvers.errors import PlannerError
from tests.planner.test_loop import gradient_bytes, loss_of, measured_loop, open_loop, perceptron

ADAMW = partial(torch.optim.AdamW, foreach=False)


@contextmanager
def hooked(model: nn.Module, hook: Callable[[nn.Parameter], None]) -> Iterator[None]:
    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]
    yield
    for handle in handles:
        handle.remove()


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def shares(model: nn.Module, loss: torch.Tensor) -> list[float]:
    """At which share of the backward's ops the hooks run."""
    at: list[int] = []
    with Counting() as mode, hooked(model, lambda p: at.append(mode.count)):
        loss.backward()
    return [count / mode.count for count in at]


def test_hooks_run_while_the_backward_does() -> None:
    model, x = perceptron()
    plain = shares(model, loss_of(model(x)))
    for budget in (None, "75%"):
        model.zero_grad()
        plan = auto_checkpoint(model, x, budget, loss_fn=loss_of, progress=False)
        planned = shares(model, plan.module(x))
        assert all(abs(a - b) < 0.2 for a, b in zip(plain, planned, strict=True))
        assert planned[0] < 0.45 and len({round(s, 1) for s in planned}) > 4


class Tied(nn.Module):
    """Shared, cast and unused parameters, small and large ones, some for one op, in an order that is not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 16)
        self.early, self.rows = nn.Conv1d(16, 16, 3, padding=1), nn.LSTM(16, 16, batch_first=True)
        self.norm, self.looks = nn.GroupNorm(2, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.small = nn.ParameterList(torch.randn(16) for _ in range(9))
        self.wide = nn.Linear(16, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rows(self.norm(self.early(self.words(x).mT)).mT)[0]
        a, b, c, d, e, f, g, h = list(self.small)[:8]
        x = self.looks(x * a + d, x * b.sigmoid() + e, x * c * (f - g * h.sum()))[0]
        return self.wide(x).relu().sum(-1, keepdim=True) * x @ self.words.weight.T


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("regions", ["whole", "auto", ["early", "norm", "looks", "wide"]])
def test_gradients_come_in_the_order_of_the_plain_step(regions: Any, autocast: bool) -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randint(16, (64, 3))
    model.small[8].requires_grad_(False)
    loss = loss_of if regions == "whole" else None
    names: dict[nn.Parameter, str] = {p: name for name, p in model.named_parameters()}

    def order(module: nn.Module, planned: bool = False) -> list[str]:
        found: list[str] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = module(x) if planned and loss else loss_of(module(x))
        with hooked(model, lambda p: found.append(names[p])):
            result.backward()
        model.zero_grad()
        return found

    plain = order(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plan = auto_checkpoint(model, x, "95%", loss_fn=loss, regions=regions, progress=False, time_limit=2)
    assert len(plain) == len(names) - 1 and order(plan.module, planned=True) == plain


def test_buckets_of_ddp_start_during_the_backward() -> None:
    model, x = perceptron()
    plan = auto_checkpoint(model, x, "75%", loss_fn=loss_of, progress=False, check=False)  # nor spot checks
    loss_of(model(x)).backward()
    expected = [p.grad for p in model.parameters()]
    started: list[int] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(plan.module, bucket_cap_mb=0.05)

        def reduce(mode: Counting, bucket: Any) -> Any:
            started.append(mode.count)
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        mode, reduce.__annotations__ = Counting(), {}  # which DDP compares with classes
        parallel.register_comm_hook(mode, reduce)
        for _ in range(2):  # the first step finds in which order gradients come
            model.zero_grad()
            started.clear()
            loss = parallel(x)
            mode.count = 0
            with mode:
                loss.backward()
    finally:
        dist.destroy_process_group()
    assert len(started) > 3 and started[0] < 0.45 * mode.count
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def trained(module: Any, model: nn.Module, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """Parameters after steps of an optimizer that runs in the backward."""
    optimizers = {p: ADAMW([p], lr=0.1) for p in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    with hooked(model, update):
        for _ in range(steps):
            loss = module(x)
            (loss_of(loss) if loss.dim() else loss).backward()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("gradients", ["fresh", "consumed"])
def test_an_optimizer_in_the_backward_trains_alike(gradients: str) -> None:
    expected = trained(*[perceptron()[0]] * 2, perceptron()[1])
    for share in (1.0, 0.0):
        model, x = perceptron()
        session = open_session(model, x, loss_fn=loss_of, optimizer=ADAMW, gradients=gradients, progress=False)
        low, high = session.minimum().minimum_bytes, session.plain_peak_bytes
        plan = session.plan(round(low + share * (high - low)))
        assert all(map(torch.equal, trained(plan.module, model, x), expected))


def measured_with_hooks(module: Any, model: nn.Module, x: torch.Tensor) -> int:
    optimizers = {p: ADAMW([p]) for p in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    def step() -> None:
        out = module(x)
        (loss_of(out) if out.dim() else out).backward()

    with hooked(model, update):
        step()
        return measure_peak(step)


def test_an_optimizer_in_the_backward_is_counted_exactly_and_lowers_the_minimum() -> None:
    minimum = {}
    for gradients in ("fresh", "consumed"):
        model, x = perceptron()
        session = open_session(model, x, loss_fn=loss_of, optimizer=ADAMW, gradients=gradients, progress=False)
        minimum[gradients] = session.minimum().minimum_bytes
    static = session.problem.static_bytes
    assert minimum["consumed"] - static < 0.8 * (minimum["fresh"] - static)
    plain = measured_with_hooks(model, model, x)
    for budget in (None, minimum["consumed"]):
        plan = session.plan(budget)
        measured = measured_with_hooks(plan.module, model, x)
        assert plan.static_bytes + measured == plan.peak_bytes
        assert "optimizer in its hooks" in plan.notes[-1]
        assert measured <= plain


def test_accumulated_gradients_are_gone_once_they_are_added() -> None:
    model, x = perceptron()
    session = open_loop(model, x, None, 4)
    plan = session.plan(session.minimum().minimum_bytes)
    assert measured_loop(plan, model, x, torch.optim.SGD(model.parameters()), 4) <= plan.peak_bytes
    largest = max(p.numel() * 4 for p in model.parameters())
    assert max(plan.timeline.bytes["gradients"]) <= largest + gradient_bytes(model) // 64  # besides those from before


def test_a_hook_that_changes_what_is_still_read_is_noticed() -> None:
    model, x = perceptron()
    plan = auto_checkpoint(model, x, loss_fn=loss_of, progress=False, check=False)  # nor spot checks
    plan.module(x).backward()
    changed: list[Any] = [model[0].weight]

    def change(parameter: nn.Parameter) -> None:
        if parameter is model[8].weight:
            changed[0].detach().add_(1)

    with hooked(model, change):
        plan.module(x).backward()  # only a gradient of x would read it
        changed[0] = model[2].weight
        with pytest.raises(ChangedInPlace, match=r"weight was changed in place while the backward"):
            plan.module(x).backward()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_hook_raises_ends_the_backward_and_leaves_nothing_behind(error: type[BaseException]) -> None:
    model, x = perceptron()
    plan = auto_checkpoint(model, x, "75%", loss_fn=loss_of, progress=False)
    expected = trained(*[perceptron()[0]] * 2, x)

    def stop(parameter: nn.Parameter) -> None:
        if parameter is model[4].weight:
            raise error("stop")

    loss = plan.module(x)
    run = weakref.ref(loss.grad_fn.run)
    with hooked(model, stop), pytest.raises(error, match="stop"):
        loss.backward()
    assert model[6].weight.grad is not None and model[2].weight.grad is None
    with pytest.raises(BackwardTwice):
        loss.backward()
    del loss
    gc.collect()
    assert run() is None
    model.zero_grad()
    assert all(map(torch.equal, trained(plan.module, model, x), expected))


def test_some_gradients_alone() -> None:
    model, x = perceptron()
    x.requires_grad_()
    loss_of(model(x)).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    plan = auto_checkpoint(model, x, "75%", loss_fn=loss_of, progress=False)
    model.zero_grad()
    for name, parameter in model.named_parameters():
        loss = plan.module(x)
        (found,) = torch.autograd.grad(loss, [parameter], retain_graph=True)
        assert torch.equal(found, expected[name])
        with pytest.raises(BackwardTwice):
            loss.backward()
    assert torch.equal(torch.autograd.grad(plan.module(x), x)[0], x.grad)
    plan.module(x).backward(inputs=[model[4].weight])
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["4.weight"]
    assert torch.equal(model[4].weight.grad, expected["4.weight"])


class Unusual(nn.Module):
    """A tied, an unused and a frozen parameter, and one whose gradient is another one's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.unused, self.frozen = (nn.Linear(16, 16) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.left, self.right = (nn.Parameter(torch.randn(8, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.tied(x) + self.left + self.right)
        return torch.tanh(self.tied(self.frozen(hidden))).pow(2).mean()


def test_tied_unused_frozen_and_shared_gradients() -> None:
    torch.manual_seed(0)
    model, x = Unusual(), torch.randn(8, 16)
    model(x).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    plan = auto_checkpoint(model, x, progress=False)
    model.zero_grad()
    seen: list[nn.Parameter] = []
    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(seen.append) for p in trained]
    plan.module(x).backward()
    for handle in handles:
        handle.remove()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, expected[name])
    assert {id(p) for p in seen} == {id(p) for p in model.parameters() if p.grad is not None}
    model.left.grad.zero_()
    assert torch.equal(model.right.grad, expected["right"])


def test_a_gradient_that_leaves_too_early_is_not_proved() -> None:
    model, x = perceptron()
    plan = auto_checkpoint(model, x, loss_fn=loss_of, progress=False)
    rewritten, names = plan.rewritten, [n.name for n in plan.rewritten.backward.graph.nodes if n.op == "call_function"]
    assert len(rewritten.handovers) == 4
    for i, handover in enumerate(rewritten.handovers):
        before = names[names.index(handover.after) - 3]
        moved = handover._replace(after=before)
        object.__setattr__(rewritten, "handovers", _with(rewritten.handovers, i, moved))
        with pytest.raises(VerificationError, match=r"before it is computed|after it has left"):
            verify(plan.prepared.traced, rewritten)
        object.__setattr__(rewritten, "handovers", _with(rewritten.handovers, i, handover))
    verify(plan.prepared.traced, rewritten)


def _with(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


def test_a_plan_file_whose_gradients_leave_elsewhere_says_so(tmp_path: Path) -> None:
    model, x = perceptron()
    path = auto_checkpoint(model, x, loss_fn=loss_of, gradients="accumulated", progress=False).save(tmp_path / "a.json")
    data = json.loads(path.read_text())
    data["ops"] = [op for op in data["ops"] if not op["op"].endswith("_accumulated")]
    data["checksum"] = _checksum(data)
    path.write_text(render(data))
    with pytest.raises(PlannerError, match="its gradients leave the backward elsewhere than here: plan anew"):
        Plan.load(path, model, x, loss_fn=loss_of)
