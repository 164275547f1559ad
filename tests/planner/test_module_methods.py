"""Methods of `plan.module`: they are the model's, and what they call of it runs the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.planner.steps import assert_same_gradients, batch, linear, plan, squares, twins


class Own(nn.Module):
    """A model with methods of its own, and others under the names of every module's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = linear(), linear()
        self.body.requires_grad_(False)
        self.evaluated = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)

    def eval(self) -> Any:
        self.evaluated += 1
        return super().eval()

    def train(self, x: Any = True, y: torch.Tensor | None = None) -> Any:
        return super().train(x) if y is None else self.loss(x) + squares(self.forward(y))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return squares(self(x))

    def once(self) -> Own:
        return self


def steps_planned(loss: torch.Tensor) -> int:
    """How many planned steps the loss was computed by."""
    seen, todo = set[Any](), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return sum(type(node).__name__ == "PlannedStepBackward" for node in seen)


def test_methods_that_the_model_has_of_its_own_are_the_models() -> None:
    model = Own()
    module = plan(model, batch()).module
    assert list(module.parameters()) == list(model.head.parameters())
    assert module.eval() is module
    assert model.evaluated == 1 and not model.training
    assert module.train() is module and module.once() is module
    assert model.training


@pytest.mark.parametrize("name", ["loss", "train"])
def test_calls_of_the_model_in_its_methods_run_the_plan(name: str) -> None:
    model, plain = twins(Own())
    module, arguments = plan(model, batch()).module, (batch(),) * (2 if name == "train" else 1)
    loss = getattr(module, name)(*arguments)
    assert steps_planned(loss) == len(arguments)
    assert steps_planned(getattr(model, name)(*arguments)) == 0
    for each in (loss, getattr(plain, name)(*arguments)):
        each.backward()
    assert_same_gradients(model, plain)
    assert "forward" not in model.__dict__


def test_a_loss_in_the_plan_is_not_put_where_the_model_calls_itself() -> None:
    model = Own()
    module = plan(model, batch(), loss_fn=squares).module
    assert steps_planned(module.loss(batch())) == 0


def test_a_container_is_one() -> None:
    layers = nn.Sequential(linear(), nn.ReLU(), linear())
    module = plan(layers, batch()).module
    assert len(module) == 3 and module[0] is layers[0] and list(module) == list(layers)
    assert isinstance(module[:2], nn.Sequential)
    with pytest.raises(TypeError):
        plan(linear(), batch()).module[0]
