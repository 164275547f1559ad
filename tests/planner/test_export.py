"""Exported folders: they run without this library, train with the same numbers, and say what they cannot do."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import json
import math
import re
import subprocess
import sys
import venv
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from passes.memory import measure_peak
from passes.run.tensors import laid_out
from passes.trace.arguments import split_sample
from planner import Plan, PlannerError, auto_checkpoint
from planner.ship.source import function_name, identifier, literal
from tests.planner.small import ROOT, conv_net, mlp, plan_at, python, structured
from tests.zoo.compare import measured_peak_bytes, run_step
from tests.zoo.hazards import Wrap
from tests.zoo.models import build

SCRIPT = Path(__file__).with_name("train_exported.py")


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names whose tensors are not bitwise equal; None equals None alone."""
    pairs = ((name, found[name], value) for name, value in expected.items())
    return [n for n, a, b in pairs if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))]


def assert_trains_alike(plan: Plan, model: nn.Module, sample: Any, folder: Path, interpreter: str) -> None:
    """The folder's gradients, buffers, generator state and peak, from another process, are the planned module's."""
    torch.save(split_sample(sample), folder.parent / "given.pt")
    files = [str(folder.parent / name) for name in ("given.pt", "result.pt")]
    command = [interpreter, "-I", str(SCRIPT), str(folder), *files]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = torch.load(files[1])
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    expected = run_step(plan.module, model, sample)
    assert list(found["gradients"]) == list(expected.gradients)
    assert differing(found["gradients"], expected.gradients) == []
    assert list(found["buffers"]) == list(expected.buffers)
    assert all(torch.equal(found["buffers"][n], b) for n, b in expected.buffers.items())
    assert found["keys"] == list(model.state_dict())
    assert torch.equal(found["random"], expected.rng)
    assert found["peak"] == measured_peak_bytes(plan.module, model, sample, 0)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def no_dropout() -> tuple[nn.Module, Any]:
    return mlp(dropout=0.0)


@pytest.mark.parametrize("built", [mlp, no_dropout, conv_net, structured])
def test_exported_folder_trains_alike_without_the_library(built: Callable[[], Any], tmp_path: Path) -> None:
    model, sample = built()
    plan = plan_at((model, sample), 0.3)
    assert_trains_alike(plan, model, sample, plan.export(tmp_path / "exported"), sys.executable)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose environment holds torch and safetensors, at the versions of constraints.txt, and no more."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    venv.create(folder, with_pip=True)
    interpreter = str(folder / "bin" / "python")
    pip = [interpreter, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), "torch", "safetensors"], check=True)
    return interpreter


RELOAD = """
import sys, torch
from planner import Plan
from tests.planner.steps import gradients
from tests.zoo.compare import forward_backward
from tests.zoo.models import build
name, path, again, result = sys.argv[1:]
model, sample = build(name)
plan = Plan.load(path, model, sample, progress=False)
plan.save(again)
plan.apply(model)
torch.manual_seed(1)
forward_backward(model, sample)
torch.save((list(map(tuple, plan.schedule)), gradients(model)), result)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-sdpa", "llama", "bert", "vit", "mixtral", "resnet50"])
def test_zoo_is_kept_and_shipped(name: str, bare_python: str, tmp_path: Path) -> None:
    """Saved, loaded and applied in a process with another hash seed, exported, trained in a bare environment."""
    model, sample = build(name)
    plan = plan_at((model, sample), 0.4)
    paths = [str(tmp_path / file) for file in ("plan.json", "again.json", "reloaded.pt")]
    plan.save(paths[0])
    done = python(RELOAD, name, *paths, seed="77")
    assert done.returncode == 0, done.stderr
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()
    assert Path(paths[0]).stat().st_size < 1 << 20
    schedule, gradients = torch.load(paths[2])
    assert schedule == list(map(tuple, plan.schedule))
    folder = plan.export(tmp_path / "exported")
    assert_trains_alike(plan, model, sample, folder, bare_python)
    expected = run_step(plan.module, model, sample).gradients
    assert differing(gradients, expected) == []


def load(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    plan.export(tmp_path / name)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(name).load()


def test_outputs_keep_their_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = structured()
    module = load(plan_at((model, sample)), tmp_path, monkeypatch, "structured_out")
    loss, (x, nested) = module(*sample)
    expected, (y, more) = model(*sample)
    assert torch.equal(loss, expected) and torch.equal(x, y) and torch.equal(nested["again"], more["again"])
    assert loss.requires_grad


def test_dict_outputs_and_tied_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = conv_net()
    module = load(plan_at((model, sample)), tmp_path, monkeypatch, "conv_out")
    output = module(**sample)
    assert list(output) == ["loss", "logits", "note"] and output["note"] == "fine"
    assert module.tail.weight is module.head.weight
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]
    module.load_state_dict(model.state_dict())


def test_wrong_calls_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = conv_net()
    module = load(plan_at((model, sample)), tmp_path, monkeypatch, "conv_calls")
    image, target = sample["image"], sample["target"]
    with pytest.raises(RuntimeError, match=r"argument \['image'\]: shape is \[2, 3, 16, 16\], .*\[4, 3, 16, 16\]"):
        module(image=image[:2], target=target)
    with pytest.raises(RuntimeError, match="dtype"):
        module(image=image.double(), target=target)
    with pytest.raises(RuntimeError, match="planned for"):
        module(image=image, target=target, extra=3)
    with pytest.raises(TypeError):
        module(image)
    with pytest.raises(RuntimeError, match="training step only"), torch.no_grad():
        module(**sample)
    with pytest.raises(RuntimeError, match="training step only"):
        module.eval()(**sample)
    module.train()
    module.head.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"head\.weight: requires_grad"):
        module(**sample)


def test_an_input_that_gets_a_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8, requires_grad=True)
    module = load(plan_at((model, x)), tmp_path, monkeypatch, "with_input")
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (found,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="requires_grad is False, the step was planned for True"):
        module(x.detach())


def test_gradients_in_other_strides_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), torch.randn(4, 8)
    module = load(plan_at((model, x)), tmp_path, monkeypatch, "turned")
    with pytest.warns(UserWarning, match="a gradient of the output comes in other strides than planned for"):
        module(x).backward(torch.ones(6, 4).t())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x).backward(torch.ones(4, 6))


def test_backward_twice_and_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = conv_net()
    module = load(plan_at((model, sample)), tmp_path, monkeypatch, "conv_back")
    output = module(**sample)
    output["loss"].backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        output["loss"].backward()
    with pytest.raises(RuntimeError, match=r"must start from \['loss'\]"):
        module(**sample)["logits"].sum().backward()


def test_a_refused_start_leaves_the_right_one_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = conv_net()
    output = load(plan_at((model, sample)), tmp_path, monkeypatch, "conv_again")(**sample)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"must start from \['loss'\]"):
            output["logits"].sum().backward(retain_graph=True)
    output["loss"].backward()


def test_an_output_changed_in_place_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = structured()
    plan = plan_at((model, sample))
    shipped = load(plan, tmp_path, monkeypatch, "structured_changed")
    for module in (plan.module, shipped):
        loss, (hidden, _) = module(*sample)
        hidden.detach().add_(1)
        with pytest.raises(RuntimeError, match="output of the planned step was changed in place"):
            loss.backward()


def test_logits_that_are_let_go_are_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's peak is the module's, whether the caller holds the logits, which stay, or the loss alone."""
    model, sample = language_model()
    plan = auto_checkpoint(model, sample, progress=False, keep_outputs=False)
    shipped = load(plan, tmp_path, monkeypatch, "let_go")
    peaks: dict[str, list[int]] = {"loss": [], "logits": []}
    for module in (plan.module, shipped):
        for held, measured in peaks.items():
            module.zero_grad()
            measured.append(measure_peak(lambda module=module, held=held: backward_holding(module, sample, held)))
    size = sample["tokens"].numel() * 2000 * 4
    assert peaks["loss"][0] == peaks["loss"][1] <= plan.peak_bytes - plan.static_bytes
    assert peaks["logits"][0] == peaks["logits"][1] >= peaks["loss"][0] + size // 2
    gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (shipped, model)]
    assert differing(*gradients) == [] and all(g is not None for g in gradients[0].values())


def language_model() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return TiedLanguageModel(), {"tokens": torch.randint(0, 2000, (4, 64))}


class TiedLanguageModel(nn.Module):
    """Embedding, a layer and the embedding again; returns its loss and, as Hugging Face's do, the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(2000, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = F.linear(self.layer(self.embedding(tokens)).relu(), self.embedding.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten()), "logits": logits}


def backward_holding(module: nn.Module, sample: Any, held: str) -> None:
    value = module(**sample)
    loss, kept = value["loss"], value[held]
    before = kept.detach().clone() if held == "logits" else None
    del value
    loss.backward()
    assert before is None or torch.equal(before, kept)


def test_gradients_are_copied_only_where_their_layout_differs() -> None:
    given = torch.arange(4.0).as_strided((1, 4), (99, 1))
    taken = laid_out(given, [4, 1])
    assert taken.stride() == (4, 1) and taken.data_ptr() == given.data_ptr()
    dense = laid_out(torch.ones(()).expand(2, 3), [3, 1])
    assert dense.stride() == (3, 1) and torch.equal(dense, torch.ones(2, 3))


def test_source_says_what_is_recomputed(tmp_path: Path) -> None:
    plan = plan_at(mlp(), 0.3)
    folder = plan.export(tmp_path / "readable")
    backward = (folder / "backward.py").read_text()
    assert f"It runs {len(plan.recomputed)} ops of the forward again" in backward
    assert backward.count("again: ") >= len(plan.recomputed)
    assert "# 3, recomputed" in backward or "# 4, recomputed" in backward or "# 6, recomputed" in backward
    assert "parameter 3.weight: f32[64, 64]" in (folder / "forward.py").read_text()
    imported = [n for f in folder.glob("*.py") for n in ast.walk(ast.parse(f.read_text())) if isinstance(n, ast.Import)]
    standard = {"contextlib", "hashlib", "inspect", "json", "sys", "warnings", "weakref"}
    assert {a.name.split(".")[0] for n in imported for a in n.names} <= {"torch", *standard}


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    plan = plan_at(mlp(), 0.3)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("keep")
    with pytest.raises(PlannerError, match="not an empty folder"):
        plan.export(tmp_path / "used")
    assert [p.name for p in tmp_path.iterdir()] == ["used"]


class OfAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value: Any) -> torch.Tensor:
        return self.inner(value.x).sum()


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_inputs_of_other_libraries_are_refused(tmp_path: Path) -> None:
    plan = plan_at((OfAnObject(), Holder(torch.randn(2, 4))), 1.0)
    with pytest.raises(PlannerError, match="Holder"):
        plan.export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Scaled:
    x: torch.Tensor
    scale: float = 0.5
    told: Any = None


def test_a_dataclass_is_told_by_its_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Wrap(lambda self, batch: self.layer(batch.x).pow(2).sum() * batch.scale, layer=nn.Linear(4, 4))
    given = Scaled(torch.randn(2, 4))
    loaded = load(plan_at((model, given), 1.0), tmp_path, monkeypatch, "told_by_fields")
    for batch in (given, SimpleNamespace(**vars(given))):
        assert torch.equal(loaded(batch), model(batch))
    for batch, told in (
        (replace(given, scale=0.25), r"argument args\[0\]\.scale: got 0\.25, .* for 0\.5"),
        (replace(given, x=None), r"argument args\[0\]\.x: got NoneType, .* for a tensor"),
        ({"x": given.x}, r"argument args\[0\]: got dict, which has no x; .* for a Scaled"),
    ):
        with pytest.raises(importlib.import_module("told_by_fields").ExportError, match=told):
            loaded(batch)
    with pytest.raises(PlannerError, match="the sample's Scaled holds a list"):
        plan_at((model, replace(given, told=[1])), 1.0).export(tmp_path / "out")


def test_literals() -> None:
    assert literal(complex(float("nan"), -0.0), {}) == "complex(float('nan'), -0.0)"
    assert literal((1, [2.5, None], float("-inf")), {}) == "(1, [2.5, None], float('-inf'))"
    assert literal(torch.float32, {}) == "torch.float32"
    assert literal(torch.channels_last, {}) == "torch.channels_last"
    assert literal(torch.device("cpu"), {}) == "torch.device('cpu')"
    with pytest.raises(PlannerError, match="object"):
        literal(object(), {})
    with pytest.raises(PlannerError, match="not an op of torch"):
        function_name(print)
    taken = {"a_b"}
    assert [identifier(t, taken) for t in ("a.b", "a.b", "0.weight", "class", "torch")] == [
        "a_b_2", "a_b_3", "_0_weight", "_class", "_torch"
    ]  # fmt: skip


class Masked(nn.Module):
    """Asks whether its mask is full, as attention layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        if not mask[:, 1:].eq(0).logical_not().all():
            hidden = hidden * mask
        return hidden.pow(2).mean()


def test_answers_about_inputs_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, full = torch.randn(4, 16), torch.ones(4, 16, dtype=torch.int64)
    holes = full.clone()
    holes[1, 3] = 0
    for name, mask, other in (("full", full, holes), ("holes", holes, full)):
        module = load(plan_at((Masked(), (x, mask)), 1.0), tmp_path, monkeypatch, f"masked_{name}")
        module(x, mask).backward()
        with pytest.raises(RuntimeError, match="answer the model's"):
            module(x, other)


def test_gradients_of_gradients_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = conv_net()
    module = load(plan_at((model, sample)), tmp_path, monkeypatch, "conv_double")
    with pytest.raises(RuntimeError, match="create_graph"):
        module(**sample)["loss"].backward(create_graph=True)


class Told(nn.Module):
    """Returns what `tell` makes of its arguments beside a result; some of its tensors are expanded, or of a kind."""

    _version = 2

    def __init__(self, tell: Callable[..., Any] = lambda *_: None) -> None:
        super().__init__()
        self.layer, self.drop, self.tell = nn.Linear(8, 8), nn.Dropout(0.5), tell
        self.register_buffer("scale", torch.full((1,), 0.5).expand(8))

    def forward(self, x: torch.Tensor, by: Any = 1) -> Any:
        return self.drop(torch.tanh(self.layer(x))) * self.scale, self.tell(x, by)


@pytest.mark.parametrize(("planned", "others"), [(2, (2.0, True, 3)), (1, (True, 1.0)), (0.0, (-0.0, 0)), (True, (1,))])
def test_numbers_are_those_planned_for(
    planned: Any, others: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Told(lambda _, by: torch.arange(3) * by), torch.randn(4, 8)
    module = load(plan_at((model, (x, planned))), tmp_path, monkeypatch, f"numbers_{planned!r}".replace(".", "_"))
    assert module(x, planned)[1].dtype == model(x, planned)[1].dtype
    for other in others:
        with pytest.raises(RuntimeError, match=re.escape(f"argument by: got {other!r}, the step was planned for")):
            module(x, other)


def test_structures_are_kept_or_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, x = namedtuple("pair", "a b"), torch.randn(4, 8)
    model = Told(lambda x, by: {"size": x.shape, 3: by[1] * 2, "nan": math.nan})
    module = load(plan_at((model, (x, pair({1: x}, x)))), tmp_path, monkeypatch, "structures")
    told = module(x, pair({1: x}, x))[1]
    assert list(told) == ["size", 3, "nan"] and told["size"] == x.shape and torch.equal(told[3], x * 2)
    with pytest.warns(UserWarning, match="forward returns a dtype, in whose place an export returns None"):
        plan_at((Told(lambda x, _: x.dtype), x)).export(tmp_path / "dtype")
    with pytest.raises(PlannerError, match=r"a dict has the key \(1, 2\)"):
        plan_at((Told(lambda x, _: {(1, 2): x * 2}), x)).export(tmp_path / "keys")


def test_a_copy_is_the_module_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen parts, hooks and modes included, as is what else is copied with it: its optimizer."""
    model, x = Told(), torch.randn(4, 8)
    module = load(plan_at((model, x)), tmp_path, monkeypatch, "copied")
    optimizer, called = torch.optim.SGD(module.parameters(), 0.1), list[int]()
    module.register_forward_hook(lambda *_: called.append(1))
    module.layer.bias.requires_grad_(False)
    copied, stepped = copy.deepcopy((module.eval(), optimizer))
    assert not copied.training and not copied.layer.bias.requires_grad
    assert [id(p) for p in copied.parameters()] == [id(p) for p in stepped.param_groups[0]["params"]]
    copied.train().layer.bias.requires_grad_(True)
    for run in (copied, model):
        torch.manual_seed(0)
        run(x)[0].sum().backward()
    assert torch.equal(copied.layer.weight.grad, model.layer.weight.grad) and called == [1]


def test_a_state_dict_has_its_versions_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Told(), torch.randn(4, 8)
    module = load(plan_at((model, x)), tmp_path, monkeypatch, "versions")
    assert module.state_dict()._metadata[""] == model.state_dict()._metadata[""]
    monkeypatch.setattr(Told, "get_extra_state", lambda _: 1, raising=False)
    with pytest.warns(UserWarning, match="state_dict\\(\\) has _extra_state, which"):
        plan_at((model, x)).export(tmp_path / "extra")


def test_a_view_of_a_buffer_that_is_kept_is_refused(tmp_path: Path) -> None:
    model = Wrap(lambda self, x: self.inner(x) * self.first, inner=nn.Linear(8, 8))
    model.register_buffer("scales", torch.ones(2, 1))
    model.first = model.scales[0]  # type: ignore[union-attr,operator]
    plan = plan_at((model, torch.randn(4, 8)))
    with pytest.raises(PlannerError, match=r"not registered lies in the memory of scales.*take the view in forward"):
        plan.export(tmp_path / "viewed")


def test_what_a_folder_cannot_keep_is_refused(tmp_path: Path) -> None:
    """Memory that two parameters share, and a model that is another one by now."""

    def changed(change: Callable[[Any], Any], first: bool = False, evaluated: bool = False) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        if first:
            change(model)
        plan = plan_at((model, torch.randn(4, 8)))
        change(model)
        model.train(model.training and not evaluated)
        plan.export(tmp_path / "changed")

    with pytest.raises(PlannerError, match=r"2\.weight shares memory with 0\.weight.*tie them"):
        changed(lambda m: setattr(m[2], "weight", nn.Parameter(m[0].weight.data)), first=True)
    for change in (
        lambda m: setattr(m[1], "p", 0.1), lambda m: setattr(m[2], "weight", m[0].weight),
        lambda m: m.append(nn.ReLU()), lambda m: m.eval() and m.double(),
        lambda m: m[0].register_forward_hook(lambda *_: None),
    ):  # fmt: skip
        for evaluated in (False, True):
            with pytest.raises(PlannerError, match="the model was changed after planning"):
                changed(change, evaluated=evaluated)


def test_a_model_is_exported_after_an_evaluation(tmp_path: Path) -> None:
    """Each part is compared in the mode in which it was planned, and keeps its own."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[1].eval()
    plan = plan_at((model, torch.randn(4, 8)))
    plan.export(tmp_path / "trained")
    model.eval()
    plan.export(tmp_path / "evaluated")
    model[2].p = 0.1
    with pytest.raises(PlannerError, match=r"2 \(Dropout\) with p=0\.1, was p=0\.5"):
        plan.export(tmp_path / "changed")
    assert not any(module.training for module in model.modules())


def test_a_damaged_folder_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(plan_at((Told(), torch.randn(4, 8))), tmp_path, monkeypatch, "damaged")
    package, weights = importlib.import_module("damaged"), tmp_path / "damaged" / "weights.safetensors"
    tensors = load_file(weights)
    del tensors["layer.weight"]
    for changed, told in (({"layer.weight": torch.ones(1, 8)}, r"shape \[1, 8\].*for shape \[8, 8\]"), ({}, "nothing")):
        save_file({**tensors, **changed}, weights)
        with pytest.raises(package.ExportError, match=rf"layer\.weight: the folder's file has {told}"):
            package.load()
    for name in ("weights.safetensors", "spec.json"):
        (tmp_path / "damaged" / name).write_bytes(b"{")
        with pytest.raises(package.ExportError, match="is damaged"):
            package.load()


def test_a_device_that_cannot_be_used_is_said_to_be_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(plan_at((Told(), torch.randn(4, 8))), tmp_path, monkeypatch, "elsewhere")
    package = importlib.import_module("elsewhere")
    devices = {"foo": "cannot be used here: Expected one of cpu", "meta": "has no data"}
    if not torch.cuda.is_available():
        devices["cuda"] = "cannot be used here"
    for device, told in devices.items():
        with pytest.raises(package.ExportError, match=f"device '{device}' {told}"):
            package.load(device)
    with pytest.raises(package.ExportError, match=r"torch.jit.script cannot look into an exported step"):
        torch.jit.script(module)


def test_an_edit_of_the_spec_and_another_torch_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(plan_at((Told(), torch.randn(4, 8))), tmp_path, monkeypatch, "edited")
    package, path = importlib.import_module("edited"), tmp_path / "edited" / "spec.json"
    written = path.read_text()
    spec = json.loads(written)
    for edit in ({**spec, "leaves": [[]]}, {k: v for k, v in spec.items() if k != "outputs"}, [], {}):
        path.write_text(json.dumps(edit))
        with pytest.raises(package.ExportError, match=r"is damaged: spec.json is not what was exported"):
            package.load()
    path.write_text(written)
    monkeypatch.setattr(importlib.import_module("edited.runtime"), "TORCH_VERSION", "2.10.0+cpu")
    with pytest.warns(UserWarning, match=r"and this is torch 2\.10\.0: its kernels may give other bits") as told:
        package.load()
    assert told[0].filename == __file__


class Net(nn.Module):
    """A tied head, a batch norm that is planned in eval mode, a dropout, and an attribute that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.norm = nn.Embedding(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop, self.head, self.scale = nn.Dropout(0.5), nn.Linear(8, 8, bias=False), 2.0
        self.head.weight = self.embed.weight
        self.norm.eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.layer(self.embed(tokens)))))) * self.scale


def assigned(module: Any) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


CHANGES: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (assigned, r"head\.weight is no longer the same tensor as embed\.weight"),
    (lambda m: setattr(m.layer, "weight", m.embed.weight), r"layer\.weight is now the same tensor as embed\.weight"),
    (lambda m: setattr(m, "layer", nn.Linear(8, 8)), "the submodule layer was replaced"),
    (lambda m: setattr(m, "layer", nn.Sequential()), "the submodule layer was replaced"),
    (lambda m: delattr(m, "drop"), "the submodule drop was removed"),
    (lambda m: m.layer.add_module("more", nn.ReLU()), r"the submodule layer\.more was added"),
    (lambda m: setattr(m.layer, "bias", None), r"the parameter layer\.bias was removed"),
    (lambda m: nn.utils.prune.random_unstructured(m.layer, "weight", 0.5), r"parameter layer\.weight was removed"),
    (lambda m: setattr(m.drop, "p", 0.0), r"the attribute drop\.p was added"),
    (lambda m: setattr(m, "scale", 3.0), "the attribute scale was added"),
    (lambda m: m.drop.eval(), "drop is in eval mode, and was planned in training mode"),
    (lambda m: m.train(), "norm is in training mode, and was planned in eval mode"),
    (lambda m: m.layer.register_forward_hook(lambda *_: None), "a forward hook of layer was added"),
    (lambda m: m.norm.register_forward_pre_hook(lambda *_: None), "a forward pre-hook of norm was added"),
    (lambda m: m.layer.register_full_backward_hook(lambda *_: None), "a backward hook of layer was added"),
    (lambda m: m.layer.register_full_backward_pre_hook(lambda *_: None), "a backward pre-hook of layer was added"),
)


def test_a_module_that_is_another_one_since_it_was_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = Net(), torch.randint(0, 8, (4,))
    shipped = load(plan_at((model, tokens)), tmp_path, monkeypatch, "since_loaded")
    for change, told in CHANGES:
        changed = copy.deepcopy(shipped)
        change(changed)
        with pytest.raises(RuntimeError, match=told):
            changed(tokens)
        shipped(tokens)


class Remembers(nn.Module):
    """Updates a buffer before it reads its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("memory", torch.ones(4, 8))
        self.register_buffer("other", torch.ones(4, 8))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        self.memory.mul_(0.5)
        return self.layer(x) + given + self.other


def test_memory_that_is_shared_at_the_call_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    module = load(plan_at((Remembers(), (x, torch.randn(4, 8)))), tmp_path, monkeypatch, "sharing")
    with pytest.raises(RuntimeError, match=r"memory, which the step changes, shares memory with argument \['given'\]"):
        module(x, module.memory[:])
    module.other = module.memory.view(4, 8)
    with pytest.raises(RuntimeError, match="memory, which the step changes, shares memory with other"):
        module(x, x.clone())
    module.other = module.memory.clone()
    module(x, x.clone())


def test_a_buffer_that_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    model = Wrap(lambda self, x: self.layer(x) * self.table.real.float(), layer=nn.Linear(8, 8))
    model.register_buffer("table", torch.ones(8, dtype=torch.complex128))
    with pytest.raises(PlannerError, match=r"cannot hold table, of torch\.complex128"):
        auto_checkpoint(model, torch.randn(4, 8), progress=False).export(tmp_path / "complex")


def test_other_settings_of_torch_than_planned_under_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Wrap(lambda self, x: self.layer(x) * torch.full((8,), 0.1), layer=nn.Linear(8, 8))
    x = torch.randn(4, 8)
    module = load(plan_at((model, x)), tmp_path, monkeypatch, "settings")
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RuntimeError, match=r"torch's default dtype is torch\.float64, .* torch\.float32: set"):
            module(x)
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(RuntimeError, match=r"default device is meta, .* under cpu"), torch.device("meta"):
        module(x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        without_flash = load(plan_at((model, x)), tmp_path, monkeypatch, "without_flash")
        without_flash(x)
    with pytest.raises(RuntimeError, match="flash attention is True, .* under False"):
        without_flash(x)
    module(x)


def test_hooks_on_saved_tensors_are_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    module = load(plan_at((model, x)), tmp_path, monkeypatch, "saving_hooks")
    with pytest.warns(UserWarning, match=r"called under torch\.utils\.checkpoint, which saves no memory there"):
        checkpoint(copy.deepcopy(module), x, use_reentrant=False).square().sum().backward()
    with torch.autograd.graph.save_on_cpu():
        with pytest.warns(UserWarning, match=r"called under torch\.autograd\.graph\.save_on_cpu") as told:
            module(x).square().sum().backward()
        assert told[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(x).square().sum().backward()


def test_what_a_step_reads_anew_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in their places, hooks of them and around the module, modes and attributes that nothing asks for."""
    model, tokens, told = Net(), torch.randint(0, 8, (4,)), list[str]()
    shipped = load(plan_at((model, tokens)), tmp_path, monkeypatch, "read_anew")
    for module in (shipped, model):
        module.name, module.forward = "student", functools.partial(module.forward)
        module.layer.eval()
        module.layer.weight = nn.Parameter(torch.ones(8, 8))
        module.norm.bias.data = torch.ones(8)
        module.double().float()
        module.layer.bias.register_hook(lambda gradient: 2 * gradient)
        module.layer.bias.register_post_accumulate_grad_hook(lambda _: told.append("accumulated"))
        module.register_forward_hook(lambda *given: 3 * given[-1])
        module.register_full_backward_hook(lambda *_: told.append("backward"))
        torch.manual_seed(1)
        module(tokens).sum().backward()
    assert differing(*({n: p.grad for n, p in m.named_parameters()} for m in (shipped, model))) == []
    assert sorted(told) == ["accumulated", "accumulated", "backward", "backward"]


class _Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.layer(x))
        return h, h.sin()


def test_compiled_code_goes_around_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _Several(), torch.randn(4, 8)
    module = load(auto_checkpoint(model, x, budget_mb=8, progress=False), tmp_path, monkeypatch, "compiled_out")
    for each in (model, torch.compile(module, backend="eager")):
        one, other = each(x)
        (one.sum() + other.sum()).backward()
    assert torch.equal(module.layer.weight.grad, model.layer.weight.grad)


def test_transforms_around_an_export_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _Several(), torch.randn(4, 8)
    module = load(auto_checkpoint(model, x, budget_mb=8, progress=False), tmp_path, monkeypatch, "transformed_out")
    for run in (lambda: torch.func.vmap(module)(torch.randn(3, 4, 8)), lambda: torch.func.jvp(module, (x,), (x,))):
        with pytest.raises(Exception, match=r"torch\.func\.grad, vmap, jvp"):
            run()
