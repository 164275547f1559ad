"""The block-wise cross-entropy: the same bits as autograd's kernels, fewer buffers of the logits' size."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from passes import loss
from passes._torch import below_autograd
from passes.alias import alias
from passes.capture import Traced, bind_sample, capture
from passes.cross_entropy import alone, held_once
from passes.memory import high_water, measure_peak
from passes.profile import profile
from planner import Plan, auto_checkpoint
from tests.zoo.compare import same_bits

aten = torch.ops.aten
CPU = torch.device("cpu")


def example(rows: int, classes: int, reduction: int, *, weighted: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of `cross_entropy_backward`; every third row is ignored."""
    torch.manual_seed(rows + classes)
    log_probabilities = aten._log_softmax.default(3 * torch.randn(rows, classes, dtype=dtype), 1, False)
    target = torch.randint(0, classes, (rows,))
    target[1::3] = -100
    weight = torch.rand(classes, dtype=dtype) if weighted else None
    value, total = aten.nll_loss_forward.default(log_probabilities, target, weight, reduction, -100)
    return torch.randn_like(value), log_probabilities, target, weight, reduction, -100, total


def two_kernels(*arguments: Any) -> torch.Tensor:
    picked = aten.nll_loss_backward.default(*arguments)
    return aten._log_softmax_backward_data.default(picked, arguments[1], 1, arguments[1].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("rows", "classes"), [(1, 3), (7, 1), (100, 5003), (33, 32001)])
def test_same_bits(rows: int, classes: int, reduction: int, weighted: bool, dtype: torch.dtype) -> None:
    arguments = example(rows, classes, reduction, weighted=weighted, dtype=dtype)
    expected = two_kernels(*arguments)
    assert same_bits(expected, loss.OP(*arguments))
    written = loss.OP(*arguments, out=arguments[1])
    assert written.data_ptr() == arguments[1].data_ptr()
    assert same_bits(expected, written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ignored", [-100, 1, 10**6])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("rows", "classes"), [(1, 3), (7, 2), (100, 5003), (33, 32001)])
def test_same_bits_from_logits(rows: int, classes: int, reduction: int, ignored: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + classes)
    logits = 3 * torch.randn(rows, classes, dtype=dtype)
    target = torch.randint(0, classes, (rows,))
    target[1::3] = ignored
    log_probabilities = aten._log_softmax.default(logits, 1, False)
    expected = aten.nll_loss_forward.default(log_probabilities, target, None, reduction, ignored)
    found = loss.FORWARD.default(logits, target, reduction, ignored)
    assert same_bits(expected[0], found[0]) and same_bits(expected[1], found[1])
    gradient = torch.randn_like(expected[0])
    wanted = two_kernels(gradient, log_probabilities, target, None, reduction, ignored, expected[1])
    arguments = gradient, logits, target, reduction, ignored, expected[1]
    before = logits.clone()
    assert same_bits(wanted, loss.FROM_LOGITS.default(*arguments))
    with below_autograd():
        beside = loss.FROM_LOGITS.over(*arguments, over=alone(logits))
    assert same_bits(wanted, beside) and same_bits(logits, before)
    address = logits.data_ptr()
    logits = alone(logits)
    arguments = gradient, logits, target, reduction, ignored, expected[1]
    written = loss.FROM_LOGITS.over(*arguments, over=logits)
    assert written.data_ptr() == address
    assert same_bits(wanted, written)


@pytest.mark.parametrize("bad", [-1, 5, 7])
def test_a_target_out_of_range_raises_as_usual(bad: int) -> None:
    logits, target = torch.randn(4, 5), torch.tensor([0, bad, 4, 1])
    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
        nn.functional.cross_entropy(logits, target)
    for ignored in (-100, 1):
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            loss.FORWARD.default(logits, target, 1, ignored)


def test_who_holds_memory_is_known() -> None:
    own = torch.randn(4, 6)
    assert held_once(own)
    mine = alone(own)
    assert not held_once(mine)
    view = own[1:]
    del own
    assert not held_once(mine), "through a view"
    array = view.numpy()
    del view
    assert not held_once(mine), "through numpy"
    del array
    assert held_once(mine)
    flat = mine.view(24)
    del mine
    assert held_once(flat), "its own base does not count"


def test_workspace_is_one_block() -> None:
    arguments = example(1024, 5000, 1, weighted=False, dtype=torch.float32)
    block = 64 * 5000 * 4
    assert high_water(lambda: loss.OP.default(*arguments), CPU)[0] == block
    assert measure_peak(lambda: loss.OP.out(*arguments, out=arguments[1])) == block


class Classifier(nn.Module):
    """Linear layer and loss; `penalty` reads what the first kernel writes into, `smooth` the log-probabilities."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(16, 4000)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x)
        if self.kind == "images":
            return nn.functional.cross_entropy(logits.T.reshape(1, 4000, -1), target[None])
        if self.kind == "smooth":
            return nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
        if self.kind == "probabilities":
            given = logits.log_softmax(-1)
            return nn.functional.nll_loss(given, target) + given.mean()
        return nn.functional.cross_entropy(logits, target)


class WithLogits(Classifier):
    """Returns its logits as language models do, `[batch, length, classes]`."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        logits = self.linear(x).view(2, -1, 4000)
        value = nn.functional.cross_entropy(
            logits.view(-1, 4000), target, self.linear.bias.detach() if self.kind == "weighted" else None
        )
        if self.kind == "z":
            value = value + logits.logsumexp(-1).square().mean()
        return {"loss": value, "logits": logits}


SAMPLE = torch.Generator().manual_seed(1)
SAMPLE_X, SAMPLE_Y = torch.randn(512, 16, generator=SAMPLE), torch.randint(0, 4000, (512,), generator=SAMPLE)


def traced(model: nn.Module, *, keep_outputs: bool = True) -> Traced:
    return capture(model, bind_sample(model, (SAMPLE_X, SAMPLE_Y)), keep_outputs=keep_outputs)


def targets(found: Traced) -> list[Any]:
    return [n.target for n in found.graph_module.graph.nodes]


@pytest.mark.parametrize(
    ("kind", "merged"), [("plain", True), ("smooth", False), ("probabilities", False), ("images", False)]
)
def test_only_the_plain_pair_is_merged(kind: str, merged: bool) -> None:
    found = targets(traced(Classifier(kind)))
    assert (loss.OP.default in found) == merged
    assert (aten.nll_loss_backward.default in found) == (kind in ("smooth", "probabilities"))


@pytest.mark.parametrize("kind", ["plain", "weighted", "z"])
@pytest.mark.parametrize("keep_outputs", [True, False])
def test_logits_are_saved_where_they_are_returned_and_let_go(kind: str, keep_outputs: bool) -> None:
    found = targets(traced(WithLogits(kind), keep_outputs=keep_outputs))
    expected = kind != "weighted" and not keep_outputs
    assert [op in found for op in (loss.FORWARD.default, loss.FROM_LOGITS.default)] == [expected] * 2
    assert (loss.OP.default in found) == (not expected)
    assert (aten._log_softmax.default in found) == (not expected)


def test_logits_that_nobody_returns_need_no_such_thing() -> None:
    """The log-probabilities take their place."""
    assert loss.FORWARD.default not in targets(traced(Classifier("plain"), keep_outputs=False))


@pytest.mark.parametrize("op", [loss.OP, loss.FORWARD, loss.FROM_LOGITS])
def test_workspace_is_known_without_running_it(op: Any) -> None:
    model = Classifier("plain") if op is loss.OP else WithLogits("plain")
    graph = traced(model, keep_outputs=op is loss.OP).graph_module.graph
    alias(graph)
    node = next(n for n in graph.nodes if n.target is op.default)
    measured, known = (profile(graph, measure=m)[node].workspace_bytes for m in (True, False))
    assert 0 < measured <= known <= 1.02 * measured


@pytest.mark.parametrize("kind", ["plain", "smooth", "probabilities", "images"])
def test_gradients_are_the_same(kind: str) -> None:
    torch.manual_seed(0)
    model = Classifier(kind)
    module = auto_checkpoint(model, (SAMPLE_X, SAMPLE_Y), progress=False).module
    model(SAMPLE_X, SAMPLE_Y).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    module(SAMPLE_X, SAMPLE_Y).backward()
    assert all(same_bits(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["plain", "z"])
@pytest.mark.parametrize("held", ["nothing", "logits", "part", "array"])
def test_whoever_holds_the_logits_keeps_them(kind: str, held: str) -> None:
    torch.manual_seed(0)
    model = WithLogits(kind)
    expected = model(SAMPLE_X, SAMPLE_Y)
    expected["loss"].backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plan = auto_checkpoint(model, (SAMPLE_X, SAMPLE_Y), progress=False, keep_outputs=False)
    out = SimpleNamespace(**plan.module(SAMPLE_X, SAMPLE_Y))
    assert same_bits(expected["loss"].detach(), out.loss.detach())
    kept = {
        "nothing": lambda: None, "logits": lambda: out.logits, "part": lambda: out.logits[1, 3:],
        "array": lambda: out.logits.detach().numpy(),
    }[held]()  # fmt: skip
    del out.logits
    out.loss.backward()
    assert all(same_bits(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    logits = expected["logits"].detach()
    if kept is not None:
        kept = torch.as_tensor(kept).detach()
        assert same_bits(logits[1, 3:] if held == "part" else logits, kept)


def test_a_step_holds_one_buffer_of_the_logits_size() -> None:
    """Eager holds three: log-probabilities, their gradient and the logits'."""
    model = Classifier("plain")
    plan = auto_checkpoint(model, (SAMPLE_X, SAMPLE_Y), progress=False)
    assert above_gradients(plan, model, lambda: plan.module(SAMPLE_X, SAMPLE_Y)) < 1.2 * 512 * 4000 * 4


def test_logits_that_are_let_go_are_that_buffer() -> None:
    """Eager holds four."""
    model = WithLogits("plain")
    plan = auto_checkpoint(model, (SAMPLE_X, SAMPLE_Y), progress=False, keep_outputs=False)
    assert above_gradients(plan, model, lambda: plan.module(SAMPLE_X, SAMPLE_Y)["loss"]) < 1.3 * 512 * 4000 * 4


def above_gradients(plan: Plan, model: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """The measured peak of a step whose caller holds the loss alone; no more than planned."""
    forward().backward()
    model.zero_grad()
    measured = measure_peak(lambda: forward().backward())
    assert measured <= plan.peak_bytes - plan.static_bytes
    return measured - sum(p.numel() * p.element_size() for p in model.parameters())
