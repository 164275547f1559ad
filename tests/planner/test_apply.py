"""`plan.apply` and `plan.remove`: the user's own object runs the plan, and nothing stays behind."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from passes.memory import measure_peak
from planner import InputMismatch, ModelMismatch, Plan, PlannerError, Unsupported, auto_checkpoint
from tests.planner.small import plan_at
from tests.planner.steps import SmallGPT, assert_same_gradients, assert_same_state, conv_net, linear, mlp, twins


def tight(model: nn.Module, sample: Any, share: float = 0.3, **options: Any) -> Plan:
    return plan_at((model, sample), share, **options)


def gpt(**options: Any) -> SmallGPT:
    return SmallGPT(layers=1, **options)


def tokens(rows: int = 4, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length))


def applied(model: nn.Module, sample: Any, **options: Any) -> tuple[Plan, nn.Module]:
    """A tight plan, applied, and an independent copy of the model."""
    plain = copy.deepcopy(model)
    plan = tight(model, sample, **options)
    assert plan.apply(model) is model
    return plan, plain


def step(model: nn.Module, *inputs: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """One seeded step; without a loss inside, from the sum of squares."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    out = model(*inputs)
    loss = out if out.dim() == 0 else out.pow(2).mean()
    loss.backward()
    return loss.detach()


def peak(model: nn.Module, *inputs: torch.Tensor) -> int:
    step(model, *inputs)
    model.zero_grad(set_to_none=True)
    return measure_peak(lambda: model(*inputs).pow(2).mean().backward())


def test_the_object_itself_runs_the_plan() -> None:
    model = mlp(width=64)
    x = torch.randn(512, 64)
    kind, names = type(model), list(model.state_dict())
    before = dict(model.__dict__)
    plan, plain = applied(model, x)
    assert type(model) is kind and list(model.state_dict()) == names
    assert torch.equal(step(model, x), step(plain, x))
    assert_same_gradients(model, plain)
    assert plan.recomputed
    assert peak(model, x) == peak(plan.module, x) < peak(plain, x)
    assert plan.remove(model) is model
    assert model.__dict__.keys() == before.keys() and "forward" not in vars(type(model)).keys() - vars(kind).keys()
    assert all(model.__dict__[key] is value for key, value in before.items())
    assert peak(model, x) == peak(plain, x)


def test_default_is_the_planned_model() -> None:
    model = mlp()
    plan = tight(model, torch.randn(8, 32))
    assert plan.apply() is model and model.forward.module is plan.module
    assert plan.remove() is model and "forward" not in model.__dict__


def test_signature_and_name_are_the_models_own() -> None:
    model = gpt()
    expected = inspect.signature(model.forward)
    plan, _ = applied(model, tokens())
    assert inspect.signature(model.forward) == expected
    assert model.forward.__name__ == "forward"
    plan.remove(model)
    assert inspect.ismethod(model.forward)


def test_eval_and_no_grad_run_the_original() -> None:
    model = mlp()
    x = torch.randn(8, 32)
    _, plain = applied(model, x)
    other = torch.randn(3, 32)  # no plan is made for it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.eval()(other), plain.eval()(other))
        model.train()
        plain.train()
        with torch.no_grad():
            torch.manual_seed(0)
            found = model(other)
            torch.manual_seed(0)
            assert torch.equal(found, plain(other)) and not found.requires_grad


def test_applying_twice_changes_nothing() -> None:
    model = mlp()
    plan, _ = applied(model, torch.randn(8, 32))
    forward = model.forward
    plan.apply(model)
    assert model.forward is forward
    plan.remove(model)
    with pytest.raises(PlannerError, match="does not run this plan: .* not called, or was undone"):
        plan.remove(model)


def test_one_plan_at_a_time() -> None:
    model, x = mlp(), torch.randn(8, 32)
    first, second = tight(model, x), tight(model, x, 0.9)
    first.apply(model)
    with pytest.raises(PlannerError, match="runs another plan"):
        second.apply(model)
    with pytest.raises(PlannerError, match="it runs another one"):
        second.remove(model)
    with pytest.raises(Unsupported, match=r"plan\.remove"):
        tight(model, x)
    with pytest.raises(Unsupported, match="at 0: its planned step"):
        tight(nn.Sequential(model), x)
    first.remove(model)
    second.apply(model)
    assert model.forward.module is second.module


def test_another_instance_with_the_same_step() -> None:
    model, x = gpt(), tokens()
    plan = tight(model, x)
    torch.manual_seed(5)
    other, plain = twins(gpt())
    other.note = "attributes that no op depends on may differ"
    state = torch.get_rng_state()
    plan.apply(other)
    assert torch.equal(torch.get_rng_state(), state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "planning anew" would be one
        assert torch.equal(step(other, x), step(plain, x))
    assert_same_gradients(other, plain)
    assert "forward" not in model.__dict__


class Renamed(SmallGPT):
    def __init__(self) -> None:
        super().__init__(layers=1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (lambda: gpt(width=16), r"parameter embedding.weight = head.weight: f32\[64, 16\] grad, the plan has"),
        (SmallGPT, r"parameter blocks.1.norm1.weight: .*, the plan has parameter norm.weight"),
        (lambda: gpt(dropout=0.3), "constants"),
        (lambda: nn.Sequential(nn.Embedding(64, 32)), "parameter 0.weight: .*, the plan has parameter embedding"),
        (Renamed, r"it is called with \(words.*the plan with \(tokens"),
    ],
)
def test_another_model_says_what_differs(other: Any, differs: str) -> None:
    plan = tight(gpt(), tokens())
    model = other()
    with pytest.raises(PlannerError, match=differs) as caught:
        plan.apply(model)
    assert isinstance(caught.value, ModelMismatch) and caught.value.differs
    assert "forward" not in model.__dict__


class Activated(nn.Module):
    """Its op depends on an attribute that is not a plain value."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.inner, self.activation = linear(), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.inner(x)).sum()


def test_another_op_is_named() -> None:
    plan = tight(Activated(F.gelu), torch.randn(4, 8))
    with pytest.raises(ModelMismatch, match=r"/relu = aten.relu.* the plan has /gelu"):
        plan.apply(Activated(F.relu))


class Scaled(nn.Module):
    """Holds a tensor that is not a buffer: a constant of the trace."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = linear(), torch.full((8,), factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.factor).pow(2).sum()


def test_constants_belong_to_the_plan() -> None:
    x = torch.randn(4, 8)
    model = Scaled(2.0)
    plan = tight(model, x)
    with pytest.raises(ModelMismatch, match="constants"):
        plan.apply(Scaled(3.0))
    plan.apply(model)
    copied, plain = copy.deepcopy(model), Scaled(2.0)
    plain.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(step(copied, x), step(plain, x))
        assert torch.equal(step(copy.deepcopy(plan.module), x), step(plain, x))
    copied.factor = plain.factor = torch.full((8,), 5.0)
    with pytest.warns(UserWarning, match="planning anew"):
        assert torch.equal(step(copied, x), step(plain, x))
    model.factor = torch.full((8,), 7.0)
    late = copy.deepcopy(model)
    model.factor = torch.full((8,), 2.0)
    plain.factor = torch.full((8,), 7.0)
    with pytest.warns(UserWarning, match="planning anew"):
        assert torch.equal(step(late, x), step(plain, x))


class Asking(nn.Module):
    """Asks about its inputs' values, as attention layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum() if mask.all() else (self.inner(x) * mask).sum()


def test_inputs_are_asked_for_where_their_values_matter() -> None:
    sample = (torch.randn(4, 8), torch.ones(4, 8, dtype=torch.bool))
    plan = tight(Asking(), sample)
    other, plain = twins(Asking())
    with pytest.raises(PlannerError, match=r"plan\.apply\(model, sample\)"):
        plan.apply(other)
    plan.apply(other, sample)
    assert torch.equal(step(other, *sample), step(plain, *sample))


def test_a_copy_runs_the_plan_on_its_own() -> None:
    model, x = mlp(width=64), torch.randn(512, 64)
    plan, plain = applied(model, x)
    copied = copy.deepcopy(model)
    assert copied.forward is not model.forward
    with torch.no_grad():
        for parameter in (*copied.parameters(), *plain.parameters()):
            parameter.mul_(1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(step(copied, x), step(plain, x))
    assert_same_gradients(copied, plain)
    assert all(p.grad is None for p in model.parameters())
    assert peak(copied, x) < peak(plain, x)
    copied.eval()
    assert model.training
    plan.remove(copied)
    assert "forward" not in copied.__dict__ and "forward" in model.__dict__


def test_a_copy_of_what_wraps_an_applied_forward_is_its_own() -> None:
    """Accelerate's hooks leave a `partial`, with the attributes of what it wraps; it was an AttributeError."""

    def hooked(model: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * model.own(x)

    model, x = linear(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    auto_checkpoint(model, x, progress=False).apply(model)
    for each in (model, plain):
        each.own = each.forward
        each.forward = update_wrapper(partial(hooked, each), each.own)
    copied, reference = map(copy.deepcopy, (model, plain))
    for each in (copied, reference):
        each(x).sum().backward()
    assert_same_gradients(copied, reference)
    assert model.weight.grad is None


def test_a_pickle_holds_the_model_without_its_plan(tmp_path: Path) -> None:
    model, x = gpt(), tokens()
    _, plain = applied(model, x)
    for read in (
        pickle.loads(pickle.dumps(model)),  # noqa: S301
        _saved(model, tmp_path / "model.pt"),
    ):
        assert type(read) is SmallGPT and inspect.ismethod(read.forward)
        assert_same_state(read, plain)
        assert torch.equal(step(read, x), step(plain, x))


def _saved(model: nn.Module, path: Path) -> Any:
    torch.save(model, path)
    return torch.load(path, weights_only=False)


def test_a_forward_of_the_instance_is_kept_and_put_back() -> None:
    model, x = mlp(), torch.randn(8, 32)
    own = model.forward

    def doubled(input: torch.Tensor) -> torch.Tensor:
        return own(input) * 2

    model.forward = doubled
    plan = tight(model, x)
    plan.apply(model)
    torch.manual_seed(1)
    found = model(x)
    torch.manual_seed(1)
    assert torch.equal(found, doubled(x))
    plan.remove(model)
    assert model.forward is doubled


def test_what_is_put_around_an_applied_forward_stays_around_it() -> None:
    """As trainers do for autocast: one plan for the forward inside, whatever is outside."""
    model, x = mlp(), torch.randn(64, 32)
    plan, plain = applied(model, x)
    for each in (model, plain):
        inner = each.forward
        each.forward = torch.autocast("cpu", torch.bfloat16)(lambda x, inner=inner: 2 * inner(x).float())
    with pytest.warns(UserWarning, match="got autocast to bfloat16 on cpu"):
        assert torch.equal(step(model, x), step(plain, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(step(model, x, seed=2), step(plain, x, seed=2))
    assert_same_gradients(model, plain)
    assert len(plan.module._plan_state.cache) == 2


def test_a_plan_is_applied_inside_what_was_put_around_the_forward() -> None:
    model, x = mlp(), torch.randn(64, 32)
    plan, plain = tight(model, x), copy.deepcopy(model)
    for each in (model, plain):
        each.forward = torch.autocast("cpu", torch.bfloat16)(each.forward)
    with pytest.warns(UserWarning, match="with forward=.*the plan expects forward=nothing"):
        assert torch.equal(step(plan.apply(model), x), step(plain, x))
    assert_same_gradients(model, plain)


def test_a_call_without_a_backward_runs_plain() -> None:
    """As with an adapter that is merged: something requires a gradient, and nothing depends on it."""

    class Switched(nn.Linear):
        on = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight if self.on else self.weight.detach(), self.bias if self.on else None)

    model, x = Switched(8, 8), torch.randn(4, 8)
    _, plain = applied(model, x)
    step(model, x)
    model.on = plain.on = False
    with pytest.warns(UserWarning, match="planning anew"):
        found = model(x)
    assert torch.equal(found, plain(x)) and not found.requires_grad


def test_the_module_is_one_of_the_models_class() -> None:
    """Trainers choose by it how to save the model, and which loss is its."""
    model = conv_net()
    module = tight(model, torch.randn(4, 3, 8, 8)).module
    assert isinstance(module, nn.Sequential) and isinstance(module, torch.fx.GraphModule)
    assert module._get_name() == "Sequential" and type(model).__name__ == "Sequential"


def test_a_forward_that_was_replaced_is_noticed() -> None:
    model, x = mlp(), torch.randn(8, 32)
    plan = tight(model, x)
    model.forward = lambda input: input
    with pytest.raises(ModelMismatch, match="replaced after planning"):
        plan.apply(model)
    del model.forward
    plan.apply(model)
    model.forward = lambda input: input
    with pytest.raises(PlannerError, match="replaced by something else"):
        plan.remove(model)


def test_other_shapes_are_planned_anew() -> None:
    model, x = gpt(), tokens()
    _, plain = applied(model, x)
    other = tokens(2, 12)
    with pytest.warns(UserWarning, match="planning anew"):
        assert torch.equal(step(model, other), step(plain, other))
    assert_same_gradients(model, plain)
    assert torch.equal(step(model, x), step(plain, x))


def test_other_shapes_as_the_user_chose() -> None:
    model, x = mlp(), torch.randn(8, 32)
    _, plain = applied(model, x, on_new_shape="eager")
    with pytest.warns(UserWarning, match="planned step not used"):
        assert torch.equal(step(model, x[:3]), step(plain, x[:3]))
    model = mlp()
    applied(model, x, on_new_shape="error")
    with pytest.raises(InputMismatch, match="input"):
        model(x[:3])


def test_backward_from_elsewhere_replays_the_plain_forward() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.inner(x)
            return {"loss": hidden.pow(2).mean(), "hidden": hidden}

    x = torch.randn(8, 32)
    model = Two()
    _, plain = applied(model, x)
    for each in (model, plain):
        torch.manual_seed(3)
        out = each(x)["hidden"].sum()
        if each is model:
            with pytest.warns(UserWarning, match="replays the plain forward"):
                out.backward()
        else:
            out.backward()
    assert_same_gradients(model, plain)


def test_loss_function_and_targets() -> None:
    model, x, y = mlp(), torch.randn(8, 32), torch.randn(8, 32)
    plain = copy.deepcopy(model)
    plan = tight(model, (x, y), loss_fn=nn.MSELoss())
    plan.apply(model)
    assert list(inspect.signature(model.forward).parameters) == ["input", "target"]
    torch.manual_seed(1)
    model(x, y).backward()
    torch.manual_seed(1)
    F.mse_loss(plain(x), y).backward()
    assert_same_gradients(model, plain)
    assert torch.equal(model.eval()(x, y), F.mse_loss(plain.eval()(x), y))
    plan.remove(model)
    assert model(x).shape == x.shape


def test_hooks_keep_their_rules() -> None:
    model, x = mlp(), torch.randn(8, 32)
    _, plain = applied(model, x)
    seen: list[str] = []
    for each in (model, plain):
        next(each.parameters()).register_hook(lambda gradient: seen.append("parameter"))
        step(each, x)
    assert seen == ["parameter", "parameter"]
    assert_same_gradients(model, plain)
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(step(model, x), step(plain, x))
    with torch.no_grad():
        model(x)
    assert calls == [1, 1]
    handle.remove()
    assert torch.equal(step(model, x), step(plain, x))


@pytest.mark.parametrize("late", [False, True])
def test_hooks_that_belong_to_the_step_are_not_run_twice(late: bool) -> None:
    """The loss follows them: they are part of the step, and the model's call runs them, too."""
    model, x = mlp(), torch.randn(8, 32)

    def register() -> Any:
        return model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

    plan = auto_checkpoint(model, x, loss_fn=lambda y: y.pow(2).mean(), progress=False)
    if late:
        plan.apply(model)
    handle = register()
    plan.module(x).backward()
    with pytest.raises(Unsupported, match=r"a forward hook on the planned model.*run a second time.*Use plan\.module"):
        model(x) if late else plan.apply(model)
    handle.remove()
    assert plan.apply(model) is model
    model(x).backward()


class Doubling(nn.Sequential):
    """What runs around its forward is in its own `__call__`."""

    calls = 0

    def __call__(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().__call__(x * 2) + 1


@pytest.mark.filterwarnings("ignore:forward sets self.calls")
def test_a_call_of_the_class_runs_around_the_planned_forward() -> None:
    torch.manual_seed(0)
    model, x = Doubling(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(8, 32)
    plain, seen = copy.deepcopy(model), list[str]()
    for each in (model, plain):
        each.register_forward_hook(lambda *_: seen.append("hook"))
    plan = auto_checkpoint(model, x, progress=False)
    seen.clear()
    for planned, calls in ((plan.module, 1), (plan.apply(model), 2), (copy.deepcopy(plan.module), 1)):
        assert torch.equal(step(planned, x), step(plain, x)) and planned.calls == calls
    assert len(seen) == 6
    assert_same_gradients(model, plain)
    plain._forward_hooks.clear()
    plan = auto_checkpoint(plain, x, loss_fn=torch.sum, progress=False)
    assert torch.equal(plan.module(x), plain(x).sum())
    with pytest.raises(Unsupported, match=r"Doubling.__call__.*run a second time"):
        plan.apply(plain)


@pytest.mark.filterwarnings("ignore:forward sets self.weight", "ignore:.*weight_norm. is deprecated")
def test_weights_that_hooks_of_torch_make() -> None:
    """One that depends on how often it runs is not applied."""
    x = torch.randn(8, 32)
    for make in (nn.utils.weight_norm, partial(prune.l1_unstructured, name="weight", amount=0.3)):
        torch.manual_seed(0)
        model, plain = (make(nn.Linear(32, 8)) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        auto_checkpoint(model, x, progress=False).apply(model)
        for _ in range(2):
            assert torch.equal(step(model, x), step(plain, x))
        assert_same_gradients(model, plain)
    model = nn.utils.spectral_norm(nn.Linear(32, 8))
    plan, plain = auto_checkpoint(model, x, progress=False), copy.deepcopy(model)
    with pytest.raises(Unsupported, match="SpectralNorm"):
        plan.apply(model)
    for _ in range(2):
        assert torch.equal(step(plan.module, x), step(plain, x))
    assert_same_state(model, plain)


def test_moved_cast_and_loaded() -> None:
    model, x = gpt(), tokens()
    plan, plain = applied(model, x)
    fresh = gpt()
    model.load_state_dict(fresh.state_dict())
    plain.load_state_dict(fresh.state_dict())
    assert torch.equal(step(model, x), step(plain, x))
    model.to("cpu")
    with pytest.warns(UserWarning, match="bfloat16"):
        assert torch.equal(step(model.bfloat16(), x), step(plain.bfloat16(), x))
    assert_same_gradients(model, plain)
    plan.remove(model)
    assert torch.equal(step(model, x), step(plain, x))


def test_a_trainers_loop() -> None:
    """Accumulated, clipped, scheduled, evaluated between epochs, averaged: what training loops do with a model."""
    model = gpt()
    _, plain = applied(model, tokens())
    data = [tokens() for _ in range(8)]

    def train(each: nn.Module) -> list[float]:
        accepted = inspect.signature(each.forward).parameters
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        average = torch.optim.swa_utils.AveragedModel(each)
        seen = []
        torch.manual_seed(0)
        for _ in range(2):
            each.train()
            for i, batch in enumerate(data):
                (each(**{k: v for k, v in {"tokens": batch, "idx": 0}.items() if k in accepted}) / 2).backward()
                if i % 2:
                    nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    average.update_parameters(each)
            each.eval()
            with torch.no_grad():
                seen += [each(data[0]).item(), average(data[0]).item()]
        return seen

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="planning anew")
        assert train(model) == train(plain)
    assert_same_state(model, plain)


def test_methods_of_a_library_model(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    config.loss_type = "ForCausalLMLoss"
    model = GPT2LMHeadModel(config).train()
    x = tokens()
    batch = {"input_ids": x, "labels": x}
    signature = inspect.signature(model.forward)
    plan, plain = applied(model, batch)
    assert isinstance(model, GPT2LMHeadModel) and inspect.signature(model.forward) == signature
    for each in (model, plain):
        torch.manual_seed(2)
        each(**batch).loss.backward()
    assert_same_gradients(model, plain)
    model.save_pretrained(tmp_path / "saved")
    assert_same_state(GPT2LMHeadModel.from_pretrained(tmp_path / "saved"), plain)
    generated = [m.eval().generate(x[:1, :4], max_new_tokens=4, do_sample=False) for m in (model, plain)]
    assert torch.equal(*generated)
    plan.remove(model)
    assert "forward" not in model.__dict__


def test_buffers_are_updated_as_ever() -> None:
    model, x = conv_net(), torch.randn(4, 3, 8, 8)
    _, plain = applied(model, x)
    for _ in range(3):
        assert torch.equal(step(model, x), step(plain, x))
    assert_same_state(model, plain)


def test_what_is_no_model_is_refused() -> None:
    plan = tight(mlp(), torch.randn(8, 32))
    for given in ("model", 3, torch.zeros(2), plan.module):
        with pytest.raises(PlannerError, match=r"pass the torch\.nn\.Module"):
            plan.apply(given)
        with pytest.raises(PlannerError, match="does not run this plan"):
            plan.remove(given)
