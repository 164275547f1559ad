"""Plans inside other people's loops: transformers' Trainer, Accelerate, Lightning, PEFT's adapters.

Ten steps of each are the plain run's bit for bit, in bf16 with gradients accumulated, evaluated and saved on the way.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from planner import BudgetError, Plan, PlannerError, Unsupported, auto_checkpoint
from tests.planner.steps import SmallGPT, assert_same_gradients, assert_same_state

QUICK: dict[str, Any] = {"solver": "greedy", "time_limit": 5, "progress": False}
Ways = Callable[[nn.Module, Any], tuple[nn.Module, Plan]]


@pytest.fixture(autouse=True)
def _no_surprises() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="backward started from")
        yield


def by_module(model: nn.Module, sample: Any) -> tuple[nn.Module, Plan]:
    plan = auto_checkpoint(model, sample, "75%", **QUICK)
    return plan.module, plan


def by_apply(model: nn.Module, sample: Any) -> tuple[nn.Module, Plan]:
    plan = auto_checkpoint(model, sample, "75%", **QUICK)
    return plan.apply(model), plan


def plans_made(plan: Plan | None) -> int:
    assert plan is not None
    return len(plan.module._plan_state.cache)


def test_the_first_batch_is_one_that_can_be_trained_on() -> None:
    from planner.integrations import plan_on_first_batch

    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), torch.randn(4, 8)
    waiting = plan_on_first_batch(model, "120%", **QUICK)
    model.requires_grad_(False)
    model(x)
    model.requires_grad_(True)
    with torch.no_grad():
        model(x)
    torch.func.vmap(model)(x)
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(dict(model.named_parameters()))
    assert waiting.plan is None
    model(x).pow(2).sum().backward()
    assert waiting.plan is not None and plans_made(waiting.plan) == 1


def test_a_first_batch_of_arguments_of_every_kind() -> None:
    from planner.integrations import plan_on_first_batch

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, /, *more: torch.Tensor, scale: float = 1.0, **named: torch.Tensor) -> Any:
            return torch.tanh(self.layer(x)) * scale + sum(more) + sum(named.values())

    model, x = Model(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    waiting = plan_on_first_batch(model, "120%", **QUICK)
    for _ in range(2):
        for each in (model, plain):
            each(x, x, x, scale=2.0, shift=x).pow(2).sum().backward()
    assert_same_gradients(model, plain)
    assert plans_made(waiting.plan) == 1


# transformers ---------------------------------------------------------------------------------------------------------


class Tokens(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(i))
        labels = tokens.clone()
        labels[: i % 5] = -100
        return {"input_ids": tokens, "labels": labels}


SAMPLE = {k: torch.stack([Tokens()[i][k] for i in range(4)]) for k in ("input_ids", "labels")}


def gpt2(layers: int = 1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": layers, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, use_cache=False)).train()


def trainer(model: nn.Module, folder: Path, *callbacks: Any, **given: Any) -> Any:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    options = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 10, "bf16": True,
        "use_cpu": True, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps",
        "save_steps": 5, "report_to": [], "disable_tqdm": True, **given,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **options)
    return Trainer(model=model, args=args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=list(callbacks))


def losses(made: Any) -> list[tuple[str, float]]:
    history: list[dict[str, float]] = made.state.log_history
    return [(k, v) for logs in history for k, v in logs.items() if k in ("loss", "eval_loss", "grad_norm")]


def callback(budget: str = "75%", **options: Any) -> Any:
    pytest.importorskip("accelerate")
    from planner.integrations.transformers import PlanCallback

    return PlanCallback(budget_mb=budget, **QUICK, **options)


@pytest.mark.every(2)
@pytest.mark.filterwarnings("error:planning anew")
@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["", "label smoothing"])
def test_trainer_with_the_callback(tmp_path: Path, smoothing: float) -> None:
    plain = trainer(gpt2(), tmp_path / "plain", label_smoothing_factor=smoothing)
    plain.train()
    planning = callback()
    planned = trainer(gpt2(), tmp_path / "planned", planning, label_smoothing_factor=smoothing)
    planned.train()
    assert losses(planned) == losses(plain)
    assert len(losses(plain)) == 22
    assert_same_state(planned.model, plain.model)
    assert planning.plan.recomputed and plans_made(planning.plan) == 1
    assert not hasattr(planned.model.forward, "runs_plan")
    for made in (plain, planned):
        made.train(resume_from_checkpoint=f"{made.args.output_dir}/checkpoint-5")
    assert losses(planned) == losses(plain)
    assert_same_state(planned.model, plain.model)
    assert plans_made(planning.plan) == 1


@pytest.mark.every(4)
@pytest.mark.parametrize("way", [by_module, by_apply])
@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["", "label smoothing"])
def test_trainer_with_a_plan_made_before(tmp_path: Path, way: Ways, smoothing: float) -> None:
    """The trainer's precision and loss arguments differ from the sample's: one plan more, at the first batch."""
    plain = trainer(gpt2(), tmp_path / "plain", label_smoothing_factor=smoothing)
    plain.train()
    model, plan = way(gpt2(), SAMPLE)
    planned = trainer(model, tmp_path / "planned", label_smoothing_factor=smoothing)
    with pytest.warns(UserWarning, match="planning anew"):
        planned.train()
    assert losses(planned) == losses(plain)
    assert_same_state(planned.model, plain.model)
    assert plans_made(plan) == 2
    saved = type(gpt2()).from_pretrained(tmp_path / "planned/checkpoint-10")
    assert_same_state(saved, plain.model)


def test_trainers_own_checkpoints_make_way(tmp_path: Path) -> None:
    plain = trainer(gpt2(), tmp_path / "plain", max_steps=2, gradient_checkpointing=True)
    plain.train()
    planning, seen = callback(), []
    planned = trainer(gpt2(), tmp_path / "planned", planning, max_steps=2, gradient_checkpointing=True)
    planned.model.lm_head.register_forward_pre_hook(
        lambda *_: seen.append(planned.model.transformer.gradient_checkpointing)
    )
    with pytest.warns(UserWarning, match="gradient_checkpointing=True is switched off while the plan runs"):
        planned.train()
    assert losses(planned) == losses(plain) and not any(seen)
    ours, theirs = ([getattr(m, "gradient_checkpointing", None) for m in t.model.modules()] for t in (planned, plain))
    assert ours == theirs and True in ours


def test_a_budget_that_trainer_cannot_keep(tmp_path: Path) -> None:
    planned = trainer(gpt2(), tmp_path, callback("5%"), max_steps=2)
    with pytest.raises(BudgetError, match="the smallest budget known to work"):
        planned.train()
    assert "runs_plan" not in dir(planned.model.forward)


def test_the_callbacks_budget_is_checked_at_once() -> None:
    with pytest.raises(BudgetError, match="'much' is not a size"):
        callback("much")


def test_the_callback_leaves_the_loss_to_trainer() -> None:
    with pytest.raises(PlannerError, match="PlanCallback takes no loss_fn: .* reserve_mb"):
        callback(loss_fn=lambda output: output.loss)


# Accelerate -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    yield accelerate.Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


def accelerated(accelerator: Any, model: nn.Module, prepared: Callable[[Any, Any], Any]) -> list[float]:
    tokens = torch.randint(0, 64, (80, 24), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=8))
    prepared(model, optimizer)
    torch.manual_seed(0)
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def test_accelerate_on_the_first_batch(accelerator: Any) -> None:
    from planner.integrations import FirstBatch, plan_on_first_batch

    torch.manual_seed(0)
    model = SmallGPT()
    plain, made = copy.deepcopy(model), []

    def prepared(model: nn.Module, optimizer: Any) -> None:
        made.append(plan_on_first_batch(model, "75%", optimizer=optimizer, gradients="accumulated", **QUICK))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="planning anew|.*gradients that the plan did not count")
        found = accelerated(accelerator, model, prepared)
    assert found == accelerated(accelerator, plain, lambda *_: None)
    assert_same_state(model, plain)
    first: FirstBatch = made[0]
    assert first.plan is not None and first.plan.recomputed
    first.stop()
    assert not hasattr(model.forward, "runs_plan")


def test_accelerate_prepares_what_waits_for_its_first_batch(accelerator: Any) -> None:
    from planner.integrations import plan_on_first_batch

    torch.manual_seed(0)
    model = SmallGPT()
    plain = copy.deepcopy(model)
    waiting = plan_on_first_batch(model, "75%", gradients="accumulated", **QUICK)
    assert accelerated(accelerator, model, lambda *_: None) == accelerated(accelerator, plain, lambda *_: None)
    assert_same_state(model, plain)
    assert waiting.plan is not None and waiting.plan.recomputed and plans_made(waiting.plan) == 1
    calls = []
    waiting.plan.module._plan_state.run = lambda *_: calls.append(1)
    waiting.stop()
    model(SAMPLE["input_ids"])
    assert not calls
    waiting.start()
    model(SAMPLE["input_ids"])
    assert calls


def test_where_planning_failed_another_budget_is_waited_with() -> None:
    from planner.integrations import plan_on_first_batch

    model = SmallGPT()
    waiting = plan_on_first_batch(model, "1%", **QUICK)
    with pytest.raises(Unsupported, match=r"module that waits for its first batch.* Run that batch, or call stop\(\)"):
        auto_checkpoint(model, SAMPLE["input_ids"], "75%", **QUICK)
    with pytest.raises(BudgetError):
        model(SAMPLE["input_ids"])
    again = plan_on_first_batch(model, "75%", **QUICK)
    model(SAMPLE["input_ids"])
    assert waiting.plan is None and again.plan is not None
    again.stop()
    assert "forward" not in vars(model)


def test_a_model_waits_once(accelerator: Any) -> None:
    from planner.integrations import plan_on_first_batch

    model = SmallGPT()
    waiting = plan_on_first_batch(model, "75%", **QUICK)
    with pytest.raises(PlannerError, match=r"SmallGPT waits for its first batch already: call stop\(\)"):
        plan_on_first_batch(model, "80%", **QUICK)
    waiting.stop()
    assert "forward" not in vars(model)
    waiting = plan_on_first_batch(model, "1%", **QUICK)
    accelerator.prepare(model)
    for _ in range(2):
        with pytest.raises(BudgetError):
            model(SAMPLE["input_ids"])
    assert not torch.is_autocast_enabled("cpu")
    waiting.stop()
    assert model(SAMPLE["input_ids"]).dim() == 0
    waiting.start()
    with pytest.raises(BudgetError):
        model(SAMPLE["input_ids"])


@pytest.mark.every(3)
@pytest.mark.parametrize("when", ["module", "apply", "apply after prepare"])
def test_accelerate_with_a_plan_made_before(accelerator: Any, when: str) -> None:
    torch.manual_seed(0)
    model = SmallGPT()
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, torch.zeros(8, 24, dtype=torch.long), "75%", **QUICK)
    given = plan.module if when == "module" else plan.apply(model) if when == "apply" else model
    with pytest.warns(UserWarning, match="planning anew") as said:
        found = accelerated(accelerator, given, lambda m, _: plan.apply(m) if "after" in when else None)
    assert found == accelerated(accelerator, plain, lambda *_: None)
    assert sum("planning anew" in str(w.message) for w in said) == 1
    assert_same_state(model, plain)


@pytest.mark.every(3)
@pytest.mark.parametrize("way", ["apply", "wait", "wait after prepare"])
@pytest.mark.parametrize("before", [0, 1], ids=["", "planned"])
def test_accelerates_model_is_unwrapped_and_copied(accelerator: Any, way: str, before: int) -> None:
    """What Accelerate puts around a planned forward is bound to the model that it is called on, and taken off again."""
    from planner.integrations import plan_on_first_batch

    torch.manual_seed(0)
    model, tokens = SmallGPT(layers=1), torch.randint(0, 64, (8, 24))
    plain = copy.deepcopy(model)
    planned = auto_checkpoint(model, tokens, "120%", **QUICK).apply(model) if way == "apply" else model
    waiting = plan_on_first_batch(model, "120%", **QUICK) if way == "wait" else None
    prepared, reference = accelerator.prepare(planned), accelerator.prepare(plain)
    if way == "wait after prepare":
        waiting = plan_on_first_batch(prepared, "120%", **QUICK)
    both = [prepared, reference]
    for _ in range(before):
        same_step(*both, tokens)
    copies = [copy.deepcopy(each) for each in both]
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(2)
    same_step(*copies, tokens)
    bare = [accelerator.unwrap_model(each, keep_fp32_wrapper=False) for each in both]
    assert inspect.signature(bare[0].forward) == inspect.signature(bare[1].forward)
    same_step(*bare, tokens)
    same_step(*map(copy.deepcopy, bare), tokens)
    gone = weakref.ref(copies.pop(0))
    gc.collect()
    assert gone() is None
    if waiting is not None:
        waiting.stop()


def test_a_waiting_model_is_pickled_as_it_was() -> None:
    from planner.integrations import plan_on_first_batch

    model = nn.Linear(2, 2)
    plan_on_first_batch(model, loss_fn=lambda y: y.sum())
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert loaded.forward == nn.Linear.forward.__get__(loaded)


def same_step(ours: nn.Module, plain: nn.Module, tokens: torch.Tensor) -> None:
    losses = []
    for each in (ours, plain):
        each.zero_grad()
        torch.manual_seed(1)
        losses.append(each(tokens))
        losses[-1].backward()
    assert losses[0].dtype == losses[1].dtype and torch.equal(*losses)
    assert_same_gradients(ours, plain)


# Lightning ------------------------------------------------------------------------------------------------------------


def network(width: int = 32) -> nn.Sequential:
    layers = (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4) for layer in layers), nn.Linear(width, 4))


def lit(kind: str) -> Any:
    lightning = pytest.importorskip("pytorch_lightning")

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = network(), []
            if kind == "two networks":
                self.head = nn.Linear(4, 4)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            output = self(batch[0]) if kind == "forward" else self.net(batch[0])
            output = self.head(output) if kind == "two networks" else output
            loss = nn.functional.cross_entropy(output, batch[1], label_smoothing=0.1)
            self.log("loss", loss)
            self.seen.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(nn.functional.cross_entropy(self.net(batch[0]), batch[1]).item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    if kind == "forward":
        Lit.forward = lambda self, x: self.net(x)
    torch.manual_seed(0)
    return Lit()


def fit(model: Any, folder: Path, *callbacks: Any, steps: int = 10, resume: str | None = None) -> str:
    lightning = pytest.importorskip("pytorch_lightning")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(640, 32, generator=generator), torch.randint(0, 4, (640,), generator=generator))
    batches = DataLoader(data, batch_size=64)
    made = lightning.Trainer(
        max_steps=steps, accumulate_grad_batches=2, precision="bf16-mixed", accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), gradient_clip_val=1.0,
        default_root_dir=folder, val_check_interval=6, enable_checkpointing=False,
    )  # fmt: skip
    made.fit(model, batches, batches, ckpt_path=resume)
    made.save_checkpoint(folder / f"{steps}.ckpt", weights_only=False)
    return str(folder / f"{steps}.ckpt")


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:.*(num_workers|weights_only|GPU|TPU|checkpoint directory).*")
@pytest.mark.filterwarnings("error:planning anew")
@pytest.mark.parametrize("kind", ["forward", "submodule"])
def test_lightning_with_the_callback(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("pytorch_lightning")
    from planner.integrations.lightning import PlanCallback

    plain, planned = lit(kind), lit(kind)
    planning = PlanCallback(budget_mb="85%", **QUICK)
    first = fit(plain, tmp_path, steps=5)
    fit(plain, tmp_path, resume=first)
    first = fit(planned, tmp_path, planning, steps=5)
    fit(planned, tmp_path, planning, resume=first)
    assert planned.seen == plain.seen and len(plain.seen) > 30
    assert_same_state(planned, plain)
    assert planning.chosen == ("" if kind == "forward" else "net")
    assert planning.plan is not None and planning.plan.recomputed and plans_made(planning.plan) == 1
    assert "forward" not in {**vars(planned), **vars(planned.net)}


@pytest.mark.filterwarnings("ignore:.*(num_workers|weights_only|GPU|TPU|checkpoint directory).*")
def test_lightning_says_what_it_does_not_plan(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    from planner.integrations.lightning import PlanCallback

    plain, planned = lit("two networks"), lit("two networks")
    fit(plain, tmp_path, steps=2)
    with pytest.warns(UserWarning, match="training_step calls 'net', which is planned, and 'head', which"):
        fit(planned, tmp_path, PlanCallback(budget_mb="85%", **QUICK), steps=2)
    assert planned.seen == plain.seen


# PEFT -----------------------------------------------------------------------------------------------------------------


def with_lora(model: nn.Module, name: str = "default", **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    options = {"r": 4, "lora_dropout": 0.1, "target_modules": ["c_attn", "c_fc"], **options}
    config = peft.LoraConfig(**options, fan_in_fan_out=True)
    model = peft.get_peft_model(model, config) if name == "default" else (model.add_adapter(name, config), model)[1]
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter)
    return model


def equal_step(ours: nn.Module, theirs: nn.Module) -> float:
    found = []
    for each in (ours, theirs):
        each.zero_grad()
        torch.manual_seed(5)
        loss = each(**SAMPLE).loss
        loss.backward()
        found.append(loss.item())
    assert found[0] == found[1]
    named = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, a), (_, b) in named:
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad), name
    return found[0]


@pytest.mark.filterwarnings("ignore:planning anew")
def test_adapters_of_a_planned_model() -> None:
    model = with_lora(gpt2())
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, SAMPLE, "90%", **QUICK)
    both = (plan.apply(model), plain)
    adapted = equal_step(*both)
    with torch.no_grad():
        reference = [each.eval()(**SAMPLE).loss for each in both]
        with model.disable_adapter(), plain.disable_adapter():
            without = [each.train()(**SAMPLE).loss for each in both]
    assert reference[0] == reference[1] and without[0].shape == without[1].shape
    with model.disable_adapter(), plain.disable_adapter():
        torch.manual_seed(5)
        base = model(**SAMPLE).loss
        assert not base.requires_grad and base != adapted
    assert equal_step(*both) == adapted
    for each in both:
        each.merge_adapter()
    assert model(**SAMPLE).loss.shape == ()  # a backward would fail, as in eager
    for each in both:
        each.unmerge_adapter()
    equal_step(*both)
    for each in both:
        with_lora(each, "two", r=2, target_modules=["c_attn"]).set_adapter("two")
    second = equal_step(*both)
    for each in both:
        each.set_adapter("default")
    assert equal_step(*both) != second
    made = plans_made(plan)
    for each in both:
        each.enable_input_require_grads()
    equal_step(*both)
    equal_step(*both)
    assert plans_made(plan) == made + 1


@pytest.mark.filterwarnings("ignore:planning anew")
def test_adapters_put_into_a_planned_model() -> None:
    model = gpt2()
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, SAMPLE, "75%", **QUICK)
    plan.apply(model)
    equal_step(model, plain)
    ours, theirs = with_lora(model), with_lora(plain)
    equal_step(ours, theirs)
    made = plans_made(plan)
    equal_step(ours, theirs)
    assert plans_made(plan) == made == 2
    equal_step(ours.merge_and_unload().requires_grad_(True), theirs.merge_and_unload().requires_grad_(True))


@pytest.mark.filterwarnings("error:planning anew")
def test_lora_in_trainer(tmp_path: Path) -> None:
    """Adapters, a frozen base, the trainer's own checkpoints (which make the embeddings' output require a gradient)."""
    given = {"gradient_checkpointing": True, "learning_rate": 1e-2}
    plain = trainer(with_lora(gpt2()), tmp_path / "plain", **given)
    plain.train()
    planning = callback("90%")
    planned = trainer(with_lora(gpt2()), tmp_path / "planned", planning, **given)
    with pytest.warns(UserWarning, match="switched off"):
        planned.train()
    assert losses(planned) == losses(plain)
    assert_same_state(planned.model, plain.model)
    planned.train(resume_from_checkpoint=True)
    assert planning.plan.recomputed and plans_made(planning.plan) == 1
