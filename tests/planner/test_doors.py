"""Hooks, parameters changed in forward, wrapped models, signatures: what people have on a model when they plan it."""

from __future__ import annotations

import collections
import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

from planner import PlannerError, Unsupported
from tests.planner.steps import assert_same_gradients, batch, linear, plan, tight, twins
from tests.zoo.hazards import Wrap


def same_steps(model: nn.Module, x: torch.Tensor, count: int = 3) -> None:
    """Train plain and planned side by side: losses, parameters and gradients stay the same bits."""
    plain = copy.deepcopy(model)
    module = tight(model, x).module
    for _ in range(count):
        losses = []
        for each in (plain, module):
            torch.manual_seed(0)
            losses.append(each(x).pow(2).sum())
            losses[-1].backward()
        assert torch.equal(*losses)
        for (name, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(a, b), name
            assert (a.grad is None) == (b.grad is None), name
            assert a.grad is None or torch.equal(a.grad, b.grad), name
        with torch.no_grad():
            for p in (*plain.parameters(), *model.parameters()):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=1e-3)
        plain.zero_grad()
        model.zero_grad()


# Hooks ----------------------------------------------------------------------------------------------------------------


def require_gradients(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.requires_grad_(True)


def add_noise(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + torch.zeros_like(output).uniform_(-0.1, 0.1)


def frozen_embedding() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 8), linear(), nn.GELU(), linear())
    model[0].weight.requires_grad_(False)
    return model


HOOKS: dict[str, Callable[..., Any]] = {
    "requires_grad": require_gradients, "noise": add_noise, "inert": lambda *_: None,
    "scaled": lambda m, a, out: out * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_a_submodule_is_part_of_the_step(name: str) -> None:
    model = frozen_embedding()
    model[0].register_forward_hook(HOOKS[name])
    same_steps(model, torch.randint(10, (4, 5)))


def test_a_pre_hook_and_a_hook_with_kwargs() -> None:
    model = nn.Sequential(linear(), nn.GELU(), linear())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[2].register_forward_hook(lambda module, args, kwargs, output: output + 1, with_kwargs=True)
    same_steps(model, batch())


@pytest.mark.parametrize("applied", [True, False])
def test_hooks_of_the_model_itself_run_around_the_step(applied: bool) -> None:
    model, x, seen = nn.Sequential(linear(), nn.GELU(), linear()), batch(), []
    model.register_forward_hook(lambda module, args, output: (seen.append(tuple(output.shape)), output * 3)[1])
    plain = model(x)
    chosen = plan(model, x)
    assert len(seen) == 1, "planning runs no hook of the model itself"
    each = chosen.apply(model) if applied else chosen.module
    assert torch.equal(each(x), plain)
    with torch.no_grad():
        assert torch.equal(each(x), plain)
    assert len(seen) == 3
    model._forward_hooks.clear()
    assert torch.equal(each(x) * 3, plain)


def test_with_a_loss_function_the_models_hooks_come_before_it() -> None:
    model, x = linear(), batch()
    model.register_forward_hook(lambda module, args, output: output * 3)
    assert torch.equal(plan(model, x, loss_fn=lambda out: out.sum()).module(x), model(x).sum())


def test_hooks_of_every_module_run_on_the_plain_model_and_are_said() -> None:
    """They were not seen by the plan, which went on without them."""
    model, x = nn.Sequential(linear(), nn.GELU(), linear()), batch()
    chosen, seen = plan(model, x), []
    watching = FlopCounterMode(display=False)
    with watching, warnings.catch_warnings():  # whose hooks change nothing
        warnings.simplefilter("error")
        chosen.module(x).pow(2).sum().backward()
    handle = register_module_forward_hook(lambda module, args, output: (seen.append(module), output * 2)[1])
    try:
        expected = model(x)
        with pytest.warns(UserWarning, match="hooks of every module .* the model's own forward runs"):
            assert torch.equal(chosen.module(x), expected)
        assert len(seen) == 2 * 4
        with pytest.raises(Unsupported, match="hook of every module"):
            plan(model, x)
    finally:
        handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen.module(x).pow(2).sum().backward()


class Mirrored(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


class AsksBetween(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        return self[1](x if float(x.detach().sum()) < 1e9 else -x)


@pytest.mark.parametrize("kind", [nn.Sequential, AsksBetween])
def test_within_a_block_that_keeps_parametrized_weights_the_plain_model_runs(kind: Any) -> None:
    """Its weights were those of a trace, which the next forward failed on."""
    blocks = [nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(2)]
    for block in blocks:
        parametrize.register_parametrization(block[0], "weight", Mirrored())
    (model, plain), x = twins(kind(*blocks)), batch()
    chosen = plan(model, x)
    with parametrize.cached():
        (plain(x) + plain(-x)).pow(2).sum().backward()
    with parametrize.cached(), pytest.warns(UserWarning, match=r"not used within parametrize\.cached"):
        (chosen.module(x) + chosen.module(-x)).pow(2).sum().backward()
    assert_same_gradients(model, plain)
    with parametrize.cached(), pytest.raises(Unsupported, match=r"parametrize\.cached"):
        plan(model, x)


# What outlives the trace ----------------------------------------------------------------------------------------------


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


KEPT: dict[str, Callable[[list[Any], torch.Tensor], Any]] = {
    "a list of a closure": lambda kept, h: kept.append(h),
    "a set": lambda kept, h: kept.append({h}),
    "slots": lambda kept, h: kept.append(Slots(h)),
    "a closure": lambda kept, h: kept.append(lambda: h),
    "a generator": lambda kept, h: kept.append(i for i in (h,)),
    "a view": lambda kept, h: kept.append(h[0]),
    "its grad_fn's input": lambda kept, h: kept.append((h * 2).detach()),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_tensor_kept_elsewhere_is_refused(name: str) -> None:
    kept: list[Any] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        KEPT[name](kept, hidden)
        return hidden.sum()

    with pytest.raises(Unsupported, match="tensor (kept outside|in an object)|state that forward changes"):
        plan(Wrap(forward, layer=linear()), batch())


@pytest.mark.parametrize("hide", [lambda h: {h}, Slots, lambda h: (lambda: h), lambda h: (i for i in (h,))])
def test_a_tensor_hidden_in_the_output_is_refused(hide: Callable[[torch.Tensor], Any]) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        hidden = self.layer(x)
        return hidden.sum(), hide(hidden)

    with pytest.raises(Unsupported, match="tensor (kept outside|in an object)|state that forward changes"):
        plan(Wrap(forward, layer=linear()), batch())


# Parameters that the forward changes ----------------------------------------------------------------------------------


def clamp(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.layer.weight.clamp_(-0.1, 0.1)
    return self.head(F.gelu(self.layer(x)))


def clamp_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.layer.weight.data.clamp_(-0.1, 0.1)
    return self.head(F.gelu(self.layer(x)))


def renormalize(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.layer.weight.div_(self.layer.weight.norm(dim=1, keepdim=True))
        self.head.bias.zero_()
    return self.head(F.gelu(self.layer(x)))


@pytest.mark.parametrize("forward", [clamp, clamp_data, renormalize], ids=lambda f: f.__name__)
def test_parameters_changed_under_no_grad(forward: Callable[..., Any]) -> None:
    same_steps(Wrap(forward, layer=linear(), head=linear()), batch())


def test_an_embedding_with_a_largest_norm() -> None:
    same_steps(nn.Sequential(nn.Embedding(10, 8, max_norm=1.0), linear(), nn.GELU()), torch.randint(10, (4, 5)))


# Containers, wrappers, signatures -------------------------------------------------------------------------------------


def test_a_user_dict_in_and_out() -> None:
    def forward(self: Any, x: Any) -> Any:
        return collections.UserDict(loss=self.layer(x["x"]).sum(), inner=[{"h": x["x"]}])

    model, x = Wrap(forward, layer=linear()), collections.UserDict(x=batch())
    found = plan(model, (x,)).module(x)
    assert isinstance(found, collections.UserDict) and torch.equal(found["loss"], model(x)["loss"])


def test_a_wrapped_or_planned_model_is_refused_in_a_sentence() -> None:
    model, x = linear(), batch()
    chosen = plan(model, x)
    with pytest.raises(Unsupported, match="pass the model instead of plan.module"):
        plan(chosen.module, x)
    with pytest.raises(Unsupported, match="pass the model instead of plan.module"):
        plan(nn.Sequential(chosen.module, linear()), x)
    data_parallel: Any = type("DistributedDataParallel", (nn.Module,), {"forward": lambda self, x: x})()
    with pytest.raises(Unsupported, match="Plan the module inside it"):
        plan(data_parallel, x)


def test_the_module_has_the_models_signature() -> None:
    def forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(input_ids).sum()

    model = Wrap(forward, layer=linear())
    module = plan(model, batch()).module
    assert inspect.signature(module.forward) == inspect.signature(model.forward)
    module.recompile()
    assert list(inspect.signature(module.forward).parameters) == list(inspect.signature(model.forward).parameters)


def test_a_step_without_anything_to_train_runs_plain() -> None:
    model, x = nn.Sequential(linear(), linear()), batch()
    chosen = plan(model, x)
    model.requires_grad_(False)
    assert torch.equal(chosen.module(x), model(x))
    model.requires_grad_(True)
    chosen.module(x).sum().backward()
    assert model[0].weight.grad is not None


def test_transforms_are_refused_in_a_sentence() -> None:
    model, x = linear(), batch()
    module = plan(model, x).module

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"weight": weight, "bias": model.bias}, (x,)).sum()

    def tangents(t: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(module(forward_ad.make_dual(t, t))).tangent

    def batched(t: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(module(t), model.bias, torch.ones(2, 4, 8), is_grads_batched=True)[0]

    def planning(t: torch.Tensor) -> torch.Tensor:
        plan(model, x)
        return t.sum()

    other = torch.randn(3, *x.shape[1:])  # which would be planned anew
    given = {loss: model.weight, planning: x, lambda t: module(other * t).sum(): torch.tensor(2.0)}
    calls = [(torch.func.grad(f), t) for f, t in given.items()]
    for call, t in [*calls, (torch.func.vmap(module), torch.randn(5, *other.shape)), (tangents, x), (batched, x)]:
        with pytest.raises(PlannerError, match="Give them the original model"):
            call(t)
