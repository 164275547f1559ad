"""Plan files: the same bytes everywhere, the same training after loading, and every kind of damage named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner import Plan, PlanFileError, PlannerError, auto_checkpoint
from planner.files.atomic import new_folder, write_text
from planner.files.fingerprint import op_lines
from planner.files.planfile import _checksum, decode_schedule, encode_schedule, read, render
from solvers.schedule import Step
from tests.planner.small import conv_net, mlp, plan_at, python, structured
from tests.zoo.compare import differences, run_step


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    plan = plan_at(mlp(), 0.3)
    return plan, plan.save(tmp_path_factory.mktemp("plans") / "plan.json")


@pytest.mark.parametrize("built", [mlp, conv_net, structured])
def test_loaded_plan_is_the_saved_one(built: Callable[[], Any], tmp_path: Path) -> None:
    plan = plan_at(built(), 0.3)
    path = plan.save(tmp_path / "plan.json")
    model, sample = built()
    loaded = Plan.load(path, model, sample, progress=False)
    assert loaded.schedule == plan.schedule
    assert (loaded.peak_bytes, loaded.budget_bytes, loaded.status) == (plan.peak_bytes, plan.budget_bytes, plan.status)
    assert loaded.bound == plan.bound and loaded.solver == plan.solver
    assert loaded.save(tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_loaded_plan_trains_alike(saved: tuple[Plan, Path]) -> None:
    model, sample = mlp()
    loaded = Plan.load(saved[1], model, sample, progress=False)
    plain, _ = mlp()
    assert differences(run_step(plain, plain, sample), run_step(loaded.module, model, sample)) == []


WRITE = """
import sys
from tests.planner.small import mlp, plan_at
print(plan_at(mlp(), 0.3).save(sys.argv[1]))
"""


def test_other_processes_write_the_same_bytes(saved: tuple[Plan, Path], tmp_path: Path) -> None:
    done = python(WRITE, str(tmp_path / "other"), seed="77")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "other").read_bytes() == saved[1].read_bytes()


def test_saving_twice_changes_nothing(saved: tuple[Plan, Path], tmp_path: Path) -> None:
    assert saved[0].save(tmp_path / "twice.json").read_bytes() == saved[1].read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["twice.json"]


def test_file_is_readable(saved: tuple[Plan, Path]) -> None:
    lines = saved[1].read_text().splitlines()
    rows = [line for line in lines if '"op": "3/addmm_1"' in line]
    assert len(rows) == 1 and '"aten": "aten.addmm.default"' in rows[0] and "f32[256, 64]" in rows[0]
    assert any('"parameter 0.weight: f32[64, 64] grad"' in line for line in lines)
    assert max(map(len, lines)) < 1000


def test_listed_frees_survive(saved: tuple[Plan, Path]) -> None:
    plan, lines = saved[0], op_lines(saved[0].prepared)
    late = next(s for s in plan.schedule if s.kind == "free")
    schedule = (*(s for s in plan.schedule if s != late), Step("free", late.index))
    data = encode_schedule(plan.problem, schedule, lines)
    assert data["frees"] == "listed"
    assert decode_schedule(plan.problem, [line.name for line in lines], data) == schedule


# Damage ---------------------------------------------------------------------------------------------------------------


def damaged(path: Path, content: bytes, tmp_path: Path) -> PlanFileError:
    broken = tmp_path / "broken.json"
    broken.write_bytes(content)
    with pytest.raises(PlanFileError) as caught:
        read(broken)
    assert caught.value.field and caught.value.path == str(broken)
    assert "\n" not in str(caught.value).strip()
    return caught.value


def test_every_truncation_is_noticed(saved: tuple[Plan, Path], tmp_path: Path) -> None:
    content = saved[1].read_bytes()
    for end in [*range(600), *range(600, len(content) - 40, 97), *range(len(content) - 40, len(content))]:
        damaged(saved[1], content[:end], tmp_path)


def test_every_bit_flip_is_noticed(saved: tuple[Plan, Path], tmp_path: Path) -> None:
    content = saved[1].read_bytes()
    for place in [*range(400), *range(400, len(content), 61)]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        damaged(saved[1], bytes(flipped), tmp_path)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"", "size"),
        (b"\x80\x04\x95.\n", "json"),
        (b"[" * 100_000 + b"]" * 100_000 + b"\n", "depth"),
        (b'{"a": 1, "a": 2}\n', "json"),
        (b'{"a": NaN}\n', "json"),
        (b'{"a": Infinity}\n', "json"),
        (b'{"a": 1.5}\n', "json"),
        (b"9" * 5000 + b"\n", "json"),
        (b"[]\n", "format"),
        (b'{"format": "something else"}\n', "format"),
        (b"\xff\xfe{}\n", "json"),
    ],
)
def test_what_is_no_plan_file(content: bytes, field: str, tmp_path: Path) -> None:
    assert damaged(tmp_path, content, tmp_path).field == field


def test_a_missing_file_a_folder_and_a_huge_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanFileError):
            read(path)
    monkeypatch.setattr("planner.files.strictjson.MAX_BYTES", 10)
    assert damaged(tmp_path, b" " * 11, tmp_path).field == "size"


def edited(path: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A file changed by someone who knows how to make the checksum fit."""
    data = json.loads(path.read_text())
    change(data)
    data["checksum"] = _checksum(data)
    target = tmp_path / "edited.json"
    target.write_text(render(data))
    return target


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("version", lambda d: d.update(version=2)),
        ("version", lambda d: d.update(version=True)),
        ("ops", lambda d: d.pop("ops")),
        ("more", lambda d: d.update(more=1)),
        ("result.peak_bytes", lambda d: d["result"].update(peak_bytes="1")),
        ("result.peak_bytes", lambda d: d["result"].update(peak_bytes=True)),
        ("result.peak_bytes", lambda d: d["result"].update(peak_bytes=-1)),
        ("schedule", lambda d: d["schedule"].pop("frees")),
        ("schedule.frees", lambda d: d["schedule"].update(frees="never")),
        ("schedule.recompute[0].run", lambda d: d["schedule"]["recompute"][0].update(run=[1])),
        ("ops[3].bytes", lambda d: d["ops"][3].update(bytes=None)),
        ("tensors", lambda d: d["tensors"].append(7)),
    ],
)
def test_wrong_content_is_named(saved: tuple[Plan, Path], tmp_path: Path, field: str, change: Any) -> None:
    with pytest.raises(PlanFileError) as caught:
        read(edited(saved[1], tmp_path, change))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("schedule", lambda d: d["schedule"]["recompute"][0].update(run=["no/such_op"])),
        ("schedule", lambda d: d["schedule"]["recompute"][0].update(before="no/such_op")),
        ("schedule", lambda d: d["schedule"].update(frees="listed", steps=["compute"])),
        ("schedule", lambda d: d["schedule"].update(frees="listed", steps=["free nothing"])),
        ("peak_bytes", lambda d: d["result"].update(peak_bytes=1)),
        ("peak_bytes", lambda d: d["options"].update(budget_bytes=1)),
        ("fingerprint", lambda d: d["model"].update(fingerprint="0" * 64)),
    ],
)
def test_plans_that_cannot_be_applied(saved: tuple[Plan, Path], tmp_path: Path, field: str, change: Any) -> None:
    with pytest.raises(PlanFileError) as caught:
        Plan.load(edited(saved[1], tmp_path, change), *mlp(), progress=False)
    assert caught.value.field == field


class Sized(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.a, self.b, self.op = nn.Linear(64, 64), nn.Linear(64, 64), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.op(self.a(x))).pow(2).mean()


def test_another_model_is_told_by_what_differs_first(tmp_path: Path) -> None:
    sample = torch.randn(32, 64)
    path = plan_at((Sized(torch.relu), sample)).save(tmp_path / "plan.json")
    cases = [
        ((Sized(torch.relu), torch.randn(16, 64)), "tensors", "f32[16, 64]"),
        ((Sized(torch.relu).double(), sample.double()), "tensors", "f64[64, 64]"),
        ((Sized(torch.sigmoid), sample), "ops", "aten.sigmoid.default"),
        ((Sized(lambda x: torch.relu(x) * 2), sample), "ops", "aten.mul.Tensor"),
    ]
    for built, field, named in cases:
        with pytest.raises(PlanFileError, match="another model") as caught:
            Plan.load(path, *built, progress=False)
        assert caught.value.field == field
        assert named in str(caught.value)


def test_a_backward_from_elsewhere_is_another_model(tmp_path: Path) -> None:
    class Ending(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.layer, self.name = nn.Linear(4, 4), name

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {self.name: self.layer(x)}

    x = torch.randn(4, 4)
    plan_at((Ending("loss"), x)).save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match=r"another model: its backward does not start from \['loss'\]"):
        Plan.load(tmp_path / "plan.json", Ending("logits"), x)


def test_constants_belong_to_the_fingerprint(tmp_path: Path) -> None:
    sample = torch.randn(32, 64)
    path = plan_at((Sized(lambda x: x * 2), sample)).save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError) as caught:
        Plan.load(path, Sized(lambda x: x * 3), sample, progress=False)
    assert caught.value.field == "ops"


def test_loss_fn_must_be_given_again(tmp_path: Path) -> None:
    model, sample = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(32, 64)
    path = plan_at((model, sample), loss_fn=torch.sum).save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError) as caught:
        Plan.load(path, model, sample, progress=False)
    assert caught.value.field == "loss_fn"
    assert Plan.load(path, model, sample, loss_fn=torch.sum, progress=False).module(sample).dim() == 0


# Writing --------------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="cannot write"):
        write_text(tmp_path / "none" / "plan.json", "x")


def test_a_plan_by_regions_with_a_large_cross_entropy_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = Head(), torch.randint(0, 4096, (2, 64))
    plan = auto_checkpoint(model, tokens, regions="body.*", progress=False)
    assert "cross_entropy()" in [region.path for region in plan.regions]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", model, tokens, progress=False)
    assert loaded.schedule == plan.schedule
    assert [region.path for region in loaded.regions] == [region.path for region in plan.regions]


class Head(nn.Module):
    """Ends with a cross entropy over many words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4096, 16), nn.Linear(16, 4096, bias=False)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for part in self.body:
            x = x + part(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
