"""The merged backward of a cross-entropy: the same bits as the two kernels, one buffer less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from passes import loss
from passes.alias import alias
from passes.capture import Traced, bind_sample, capture
from passes.memory import high_water, measure_peak
from passes.profile import profile
from planner import auto_checkpoint, export_runtime
from tests.zoo.compare import measured_peak_bytes, same_bits

aten = torch.ops.aten
MERGED = (loss.OP.default, loss.OP.out)


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


@pytest.mark.parametrize("function", [loss.OP, export_runtime.cross_entropy_backward], ids=["library", "export"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("rows", "classes"), [(1, 3), (7, 1), (100, 5003), (33, 32001)])
def test_same_bits(
    function: Any, rows: int, classes: int, reduction: int, weighted: bool, dtype: torch.dtype
) -> None:
    arguments = example(rows, classes, reduction, weighted=weighted, dtype=dtype)
    expected = two_kernels(*arguments)
    assert same_bits(expected, function(*arguments))
    written = function(*arguments, out=arguments[1])
    assert written.data_ptr() == arguments[1].data_ptr()
    assert same_bits(expected, written)


def test_workspace_is_one_block() -> None:
    arguments = example(1024, 5000, 1, weighted=False, dtype=torch.float32)
    expected = loss.workspace_bytes(arguments[1])
    assert expected == 64 * 5000 * 4
    assert high_water(lambda: loss.OP.default(*arguments), torch.device("cpu"))[0] == expected
    assert measure_peak(lambda: loss.OP.out(*arguments, out=arguments[1])) == expected


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


def traced(kind: str) -> Traced:
    model = Classifier(kind)
    return capture(model, bind_sample(model, (torch.randn(512, 16), torch.randint(0, 4000, (512,)))))


@pytest.mark.parametrize(
    ("kind", "merged"), [("plain", True), ("smooth", False), ("probabilities", False), ("images", False)]
)
def test_only_the_plain_pair_is_merged(kind: str, merged: bool) -> None:
    graph = traced(kind).graph_module.graph
    targets = [n.target for n in graph.nodes]
    assert (loss.OP.default in targets) == merged
    assert (aten.nll_loss_backward.default in targets) == (kind in ("smooth", "probabilities"))


def test_workspace_is_known_without_running_it() -> None:
    graph = traced("plain").graph_module.graph
    alias(graph)
    node = next(n for n in graph.nodes if n.target is loss.OP.default)
    measured, known = (profile(graph, measure=m)[node].workspace_bytes for m in (True, False))
    assert measured == known > 0


@pytest.mark.parametrize("kind", ["plain", "smooth", "probabilities", "images"])
def test_gradients_are_the_same(kind: str) -> None:
    torch.manual_seed(0)
    model = Classifier(kind)
    sample = (torch.randn(512, 16), torch.randint(0, 4000, (512,)))
    module = auto_checkpoint(model, sample, progress=False).module
    model(*sample).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    module(*sample).backward()
    assert all(same_bits(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


def test_a_step_holds_one_buffer_of_the_logits_size() -> None:
    """Eager holds three: log-probabilities, their gradient and the logits'."""
    model = Classifier("plain")
    sample = (torch.randn(512, 16), torch.randint(0, 4000, (512,)))
    plan = auto_checkpoint(model, sample, progress=False)
    measured = measured_peak_bytes(plan.module, model, sample, plan.static_bytes)
    assert measured <= plan.peak_bytes
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert measured - plan.static_bytes < 1.2 * 512 * 4000 * 4 + gradients
