"""The block-wise kernels in planned steps: fewer large buffers. Their bits: `test_fused`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from passes.alias import alias
from passes.fuse import records
from passes.memory import high_water, measure_peak
from passes.profile import profile
from passes.run._torch import below_autograd
from passes.run.tensors import alone, held_once
from passes.trace.arguments import bind_sample
from passes.trace.capture import Traced, capture
from planner import Plan, auto_checkpoint
from planner.session import open_session
from tests.zoo.compare import measured_peak_bytes, same_bits

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


def test_the_gradient_takes_the_logits_place_only_if_nobody_else_has_them() -> None:
    logits, target = torch.randn(100, 503), torch.randint(0, 503, (100,))
    log_probabilities = aten._log_softmax.default(logits, 1, False)
    value, total = aten.nll_loss_forward.default(log_probabilities, target, None, 1, -100)
    expected = two_kernels(value, log_probabilities, target, None, 1, -100, total)
    over = records.CROSS_ENTROPY_LOGITS_BACKWARD.overloads[1]
    before, address = logits.clone(), logits.data_ptr()
    with below_autograd():
        beside = over(value, logits, target, 1, -100, total, over=alone(logits))
        assert same_bits(expected, beside) and same_bits(logits, before)
        logits = alone(logits)
        written = over(value, logits, target, 1, -100, total, over=logits)
    assert same_bits(expected, written) and written.data_ptr() == address


@pytest.mark.parametrize("bad", [-1, 5, 7])
def test_a_target_out_of_range_raises_as_usual(bad: int) -> None:
    logits, target = torch.randn(4, 5), torch.tensor([0, bad, 4, 1])
    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
        nn.functional.cross_entropy(logits, target)
    for ignored in (-100, 1):
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            records.CROSS_ENTROPY.op(logits, target, 1, ignored)


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


class Residual(nn.Module):
    """Three convolutions and a skip; `kind` says what is done to the sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.third = nn.Conv2d(3, 16, 3), *(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        total = self.third(self.second(x)) + x
        if self.kind == "read twice":
            return total.relu().square().mean() + total.mean()
        return total.relu_().square().mean() if self.kind == "in place" else total.relu().square().mean()


@pytest.mark.parametrize("kind", ["plain", "in place", "read twice"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_residual_sum_is_one_op(kind: str, share: float) -> None:
    torch.manual_seed(0)
    model, image = Residual(kind), torch.randn(4, 3, 80, 80)
    session = open_session(model, image, progress=False)
    low = session.minimum().minimum_bytes
    plan = session.plan(low + int((session.plain_peak_bytes - low) * share))
    found = [n.target for n in plan.prepared.traced.graph_module.graph.nodes]
    assert (records.ADD_RELU.op in found) == (kind != "read twice")
    model(image).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plan.module(image).backward()
    assert all(same_bits(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))
    assert measured_peak_bytes(plan.module, model, image, plan.static_bytes) <= plan.peak_bytes


class Tied(nn.Module):
    """A language model whose head is its embedding, with dropout; `kind` says what else reads the embedding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(8000, 64, padding_idx=3)
        self.layer, self.dropout = nn.Linear(64, 2048), nn.Dropout(0.15 if kind == "other rate" else 0.1)
        self.back = nn.Linear(2048, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        if self.kind == "twice":
            hidden = hidden + self.embedding(tokens.flip(1))
        hidden = self.back(self.dropout(self.layer(hidden)))
        logits = nn.functional.linear(hidden, self.embedding.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["plain", "twice", "other rate"])
def test_tied_weights_and_dropout_need_no_second_table_and_no_mask_of_numbers(kind: str) -> None:
    torch.manual_seed(0)
    model, tokens = Tied(kind), torch.randint(0, 8000, (4, 128))
    plan = auto_checkpoint(model, tokens, progress=False)
    graph = plan.prepared.traced.graph_module.graph
    found = [n.target for n in graph.nodes]
    assert found.count(records.EMBEDDING_BACKWARD_ADD.op) == (2 if kind == "twice" else 1)
    assert aten.embedding_dense_backward.default not in found
    assert (records.MUL_MASK.op in found) == (kind != "other rate")  # whose mask is made of numbers
    assert (records.DROPOUT.op in found) == (kind != "other rate")
    state = torch.get_rng_state()
    model(tokens).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.set_rng_state(state)
    plan.module(tokens).backward()
    assert all(same_bits(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))
    measured = measured_peak_bytes(plan.module, model, tokens, plan.static_bytes)
    assert measured <= plan.peak_bytes


def test_a_recomputed_dropout_draws_what_it_drew() -> None:
    torch.manual_seed(0)
    model, tokens = Tied("plain"), torch.randint(0, 8000, (4, 128))
    plan = auto_checkpoint(model, tokens, progress=False, recompute=["aten.native_dropout", "aten.addmm"])
    assert "native_dropout" in plan.recomputed
    state = torch.get_rng_state()
    model(tokens).backward()
    expected, after = [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.get_rng_state()
    model.zero_grad()
    torch.set_rng_state(state)
    plan.module(tokens).backward()
    assert all(same_bits(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), after)


def test_workspace_is_one_block() -> None:
    arguments = example(1024, 5000, 1, weighted=False, dtype=torch.float32)
    block = 64 * 5000 * 4
    assert high_water(lambda: records.CROSS_ENTROPY_BACKWARD.op(*arguments), CPU)[0] == block
    assert measure_peak(lambda: records.CROSS_ENTROPY_BACKWARD.overloads[1](*arguments, out=arguments[1])) == block


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
    assert (records.CROSS_ENTROPY_BACKWARD.op in found) == merged
    assert (aten.nll_loss_backward.default in found) == (kind in ("smooth", "probabilities"))


@pytest.mark.parametrize("kind", ["plain", "weighted", "z"])
@pytest.mark.parametrize("keep_outputs", [True, False])
def test_logits_are_saved_where_they_are_returned_and_let_go(kind: str, keep_outputs: bool) -> None:
    found = targets(traced(WithLogits(kind), keep_outputs=keep_outputs))
    expected = kind != "weighted" and not keep_outputs
    assert (records.CROSS_ENTROPY.op in found) == expected
    assert (records.CROSS_ENTROPY_LOGITS_BACKWARD.op in found) == expected
    assert (records.CROSS_ENTROPY_BACKWARD.op in found) == (not expected)
    assert (aten._log_softmax.default in found) == (not expected)


def test_logits_that_nobody_returns_need_no_such_thing() -> None:
    """The log-probabilities take their place."""
    assert records.CROSS_ENTROPY.op not in targets(traced(Classifier("plain"), keep_outputs=False))


OPS = (
    records.CROSS_ENTROPY, records.CROSS_ENTROPY_BACKWARD, records.CROSS_ENTROPY_LOGITS_BACKWARD,
    records.EMBEDDING_BACKWARD_ADD, records.MUL_MASK, records.DROPOUT,
)  # fmt: skip


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_workspace_is_known_without_running_it(op: Any) -> None:
    if op in (records.EMBEDDING_BACKWARD_ADD, records.MUL_MASK, records.DROPOUT):
        model: nn.Module = Tied("plain")
        graph = capture(model, {"tokens": torch.randint(0, 8000, (4, 128))}).graph_module.graph
    else:
        model = Classifier("plain") if op is records.CROSS_ENTROPY_BACKWARD else WithLogits("plain")
        graph = traced(model, keep_outputs=op is records.CROSS_ENTROPY_BACKWARD).graph_module.graph
    alias(graph)
    node = next(n for n in graph.nodes if n.target is op.op)
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
