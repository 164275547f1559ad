"""Faults from outside: a solver process that crashes or hangs, kills while files are written, full disks, Ctrl-C."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import solvers
from planner import BudgetError, CaptureError, Plan, PlanFileError, PlannerError
from planner.files.planfile import read
from planner.integrations import plan_on_first_batch
from solvers import mip
from solvers.exact import Found
from solvers.problem import Op, Problem, Tensor
from solvers.schedule import plain_order, with_frees
from solvers.simulate import simulate
from solvers.solution import Solution, Status
from tests.planner.residue import OWN, ROOT, children, interrupted, left_behind, state
from tests.planner.steps import MIB, Wrap, batch, linear, mlp, plan, squares, tight
from tests.solvers.oracles import replay

# The solver's process --------------------------------------------------------------------------------------------


def chain(length: int = 33) -> Problem:
    """A chain whose layers differ in size and cost, too long for the exact search."""
    ops, tensors = [], []
    for i in range(length):
        tensors.append(Tensor(f"x{i}", 64 * (1 + i * 7 % 5)))
        ops.append(Op(f"f{i}", (i - 1,) if i else (), (i,), 10 + i * 11 % 7))
    for i in reversed(range(length)):
        tensors.append(Tensor(f"g{i}", 64))
        read = (i, len(tensors) - 2) if i < length - 1 else (i,)
        ops.append(Op(f"b{i}", read, (len(tensors) - 1,), 20, recomputable=False))
    return Problem(tuple(ops), tuple(tensors), length, outputs=(len(tensors) - 1,), static_bytes=0)


CHAIN = chain()
BUDGET = 3 * simulate(CHAIN, with_frees(CHAIN, plain_order(CHAIN))).peak_bytes // 5
PROGRAMS = {
    "exit 1": ("exit 1", "the process ended|Broken pipe"),
    "exit 0": ("exit 0", "the process ended|Broken pipe"),
    "segfault": ("kill -SEGV $$", "the process ended|Broken pipe"),
    "hang": ("exec sleep 600", "time limit"),
    "hang that reads": ("cat > /dev/null\nexit", "time limit"),
    "bytes": ("printf 'Optimal \\377\\376\\n\\200 1 2 3'", "the process ended|Broken pipe"),
    "words": ("echo 'Fertig - alles gut'", "the process ended|Broken pipe"),
    "half a line": ("head -c 40 {real}", "the process ended|Broken pipe"),
    "half an answer": ("cat {real}", "the process ended|Broken pipe"),
    "another architecture": (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xf3\x00" + bytes(60), "Exec format error"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files, which must be empty again at the end."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture
def earlier() -> set[int]:
    """Processes from before, such as a compiler's."""
    return set(children())


def fake(content: str | bytes, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program in the place of the Python that runs HiGHS."""
    program, answer = place / "python", place / "answer"
    answer.write_text('{"bound": 0.0, "infeasible": false, "done": true, "size": 1000}')
    if isinstance(content, bytes):
        program.write_bytes(content)
    else:
        program.write_text("#!/bin/sh\n" + content.replace("{real}", str(answer)))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def solved(seconds: float = 6.0) -> Solution:
    """The chain's answer, checked by the naive replayer."""
    found = solvers.solve(CHAIN, BUDGET, solver="ilp", time_limit=seconds, gap=0.0)
    again = replay(CHAIN, found.schedule)
    assert (again.peak_bytes, again.added_cost) == (found.peak_bytes, found.added_cost)
    assert found.peak_bytes <= BUDGET
    return found


@pytest.fixture(scope="module")
def optimum() -> int:
    """What HiGHS proves for the chain."""
    found = solved(20.0)
    assert found.status is Status.OPTIMAL and found.notes == () and found.added_cost > 0
    return found.added_cost


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_broken_process_ends_in_a_labelled_fallback(
    name: str, optimum: int, folder: Path, earlier: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, reason = PROGRAMS[name]
    fake(script, tmp_path, monkeypatch)
    found = solved(2.0)
    assert found.bound is not None and found.bound <= optimum <= found.added_cost
    assert any(part in note for note in found.notes for part in reason.split("|")), found.notes
    assert set(children()) <= earlier and not list(folder.iterdir())


@pytest.mark.parametrize("path", ["/nowhere/python", "/etc/passwd", None])
def test_a_missing_python_ends_in_a_labelled_fallback(
    path: str | None, optimum: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", path)
    monkeypatch.setenv("PATH", "")
    found = solved(2.0)
    assert found.bound is not None and found.bound <= optimum <= found.added_cost
    assert any("the integer program was not solved, only its relaxation: " in note for note in found.notes)


def test_the_plan_shows_the_fallback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(solvers.ilp, "exact_schedule", lambda *_, **__: Found(None, False, 0))
    chosen = tight(conv(), torch.randn(8, 3, 8, 8), solver="ilp", gap=0.0, time_limit=2.0)
    assert chosen.peak_bytes <= chosen.budget_bytes  # type: ignore[operator]
    assert "note: the integer program was not solved, only its relaxation: [Errno 2]" in repr(chosen)
    assert "the integer program was not solved" in str(chosen)


def test_an_interrupt_reaps_the_process(
    folder: Path, earlier: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("exec sleep 600", tmp_path, monkeypatch)
    send = mip.Worker._send

    def interrupted_send(self: mip.Worker, job: Any) -> None:
        send(self, job)
        assert self.process is not None and set(children()) - earlier == {self.process.pid}
        raise KeyboardInterrupt

    monkeypatch.setattr(mip.Worker, "_send", interrupted_send)
    with pytest.raises(KeyboardInterrupt):
        solvers.solve(CHAIN, BUDGET, solver="ilp", time_limit=30.0, gap=0.0)
    assert set(children()) <= earlier and not list(folder.iterdir())


# Kills and full disks while files are written -------------------------------------------------------------------


def conv() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(8, 4, 3), nn.Tanh())
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return tight(conv(), x, 0.9), tight(conv(), x, 0.6)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def killed_at(line: int | None, act: Callable[[], Any], among: tuple[str, ...]) -> bool:
    """Run `act` in a child that is killed at its `line`-th line of those files; whether it was."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with interrupted(line, lambda: os.kill(os.getpid(), signal.SIGKILL), among):  # type: ignore[arg-type]
                act()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def kills(act: Callable[[], Any], among: tuple[str, ...], step: int = 1) -> Iterator[int]:
    """Kill `act` at every `step`-th line until one run survives."""
    line = 0
    while killed_at(line, act, among):
        yield line
        line += step


ATOMIC = (str(ROOT / "planner" / "files" / "atomic.py"),)
ENGINES = tuple(str(ROOT / "solvers" / name) for name in ("engine.py", "interruptible.py", "mip.py", "ilp.py"))
EXPORT = (*ATOMIC, *(str(ROOT / "planner" / "ship" / name) for name in ("export.py", "spec.py")))


def clear_parts(folder: Path) -> None:
    """Remove what a kill left there: the next write looks at each, in more lines from kill to kill."""
    for part in folder.glob(".*.part"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def test_a_kill_while_saving_leaves_the_old_plan_or_the_new(plans: tuple[Plan, Plan], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    old, new = (p.save(tmp_path / name).read_bytes() for p, name in zip(plans, "ab", strict=True))
    assert old != new
    seen = []
    for _ in kills(lambda: plans[1].save(path), ATOMIC):
        seen.append(path.read_bytes() if path.exists() else b"")
        assert seen[-1] in (b"", old, new)
        path.write_bytes(old)
        clear_parts(tmp_path)
    assert len(seen) > 8 and old in seen and new in seen
    assert plans[1].save(path).read_bytes() == new
    assert Plan.load(path, conv(), torch.randn(8, 3, 8, 8), progress=False).schedule == plans[1].schedule


def test_kills_at_any_moment_of_saving(plans: tuple[Plan, Plan], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    contents = [p.save(path).read_bytes() for p in plans]
    pause = random.Random(0)
    for _ in range(8):
        child = os.fork()
        if child == 0:
            while True:
                for each in plans:
                    each.save(path)
        time.sleep(pause.uniform(0.002, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert path.read_bytes() in contents
    assert plans[0].save(path).read_bytes() == contents[0]


def test_a_kill_while_exporting_leaves_nothing_or_all(plans: tuple[Plan, Plan], tmp_path: Path) -> None:
    complete = sorted(p.name for p in plans[1].export(tmp_path / "complete").iterdir())
    target, lines = tmp_path / "out", 0
    for line in kills(lambda: plans[1].export(target), EXPORT, step=17):
        lines = line
        if target.exists():
            assert sorted(p.name for p in target.iterdir()) == complete, line
            target.rename(tmp_path / f".out{line}")
        clear_parts(tmp_path)
    assert lines > 100 and sorted(p.name for p in target.iterdir()) == complete
    # Folders that a kill left half filled are hidden, and in nobody's way.
    assert all(p.name.startswith(".out") for p in tmp_path.iterdir() if p.name not in ("complete", "out"))


def test_a_plan_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = plan(linear(), batch()).save(tmp_path / "plan.json").read_bytes()
    assert len(whole) > 1000
    for end in range(len(whole)):
        (tmp_path / "cut.json").write_bytes(whole[:end])
        with pytest.raises(PlanFileError):
            read(tmp_path / "cut.json")


def test_a_full_disk_leaves_the_old_files(plans: tuple[Plan, Plan], tmp_path: Path) -> None:
    path = plans[0].save(tmp_path / "plan.json")
    old = path.read_bytes()
    with largest_file(1000):
        with pytest.raises(PlannerError, match=r"cannot write .*plan.json: File too large"):
            plans[1].save(path)
        with pytest.raises(PlannerError, match=r"cannot write .*out: .*File too large"):
            plans[1].export(tmp_path / "out")
        with pytest.raises(PlannerError, match=r"cannot write .*page.html: File too large"):
            plans[1].report(tmp_path / "page.html")
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_late(
    call: str, plans: tuple[Plan, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plans[0].save(tmp_path / "plan.json")
    old = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(PlannerError, match=r"cannot write .*plan.json: No space left on device"):
        plans[1].save(path)
    if call == "replace":
        with pytest.raises(PlannerError, match=r"cannot write .*out: No space left on device"):
            plans[1].export(tmp_path / "out")
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


# Ctrl-C ---------------------------------------------------------------------------------------------------------


class Stages:
    """One run through every stage: capture, profile, solve, rewrite, verify, save, export."""

    def __init__(self, place: Path) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.place = conv().eval(), torch.randn(8, 3, 8, 8), place
        self.model[1].remember = [1]  # a list of the model's own, which planning must hand back as it was
        self.budget = tight(self.model, self.x, 0.7).budget_bytes
        self.bytes = b""

    def __call__(self) -> None:
        chosen = plan(self.model, self.x, (self.budget or 0) / (1 << 20), solver="greedy")
        self.bytes = chosen.save(self.place / "plan.json").read_bytes()


def interrupt_everywhere(count: int, seed: int, place: Path) -> None:
    run = Stages(place)
    run()
    expected, before = run.bytes, state(run.model)
    with interrupted(None) as lines:
        run()
    assert left_behind(run.model, before) == []
    places = list(lines.places)
    files = sorted({path for path, _ in places})
    stages = ("capture", "profile", "descent", "rewrite", "verify", "planfile", "atomic", "fingerprint")
    assert all(any(f"{name}.py" in path for path in files) for name in stages)
    rng = random.Random(seed)
    chosen = [rng.choice([p for p in places if p[0] == file]) for file in rng.sample(files, min(count, len(files)))]
    chosen += rng.sample(places, count - len(chosen))
    for at in chosen:
        with pytest.raises(KeyboardInterrupt), interrupted(at):
            run()
        assert left_behind(run.model, before) == [], at
        assert [p.name for p in place.iterdir()] == ["plan.json"], at
        assert (place / "plan.json").read_bytes() == expected
    run()
    assert run.bytes == expected


def test_an_interrupt_in_any_stage_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "plans"
    place.mkdir()
    interrupt_everywhere(8, 0, place)


def test_an_interrupt_while_solving_leaves_nothing_behind(optimum: int, folder: Path) -> None:
    model = linear()
    before = state(model)
    with interrupted(None, among=ENGINES) as lines:
        solved(30.0)
    assert len(lines.places) > 50
    for at in random.Random(0).sample(list(lines.places), 12):
        with pytest.raises(KeyboardInterrupt), interrupted(at, among=ENGINES):
            solved(30.0)
        assert left_behind(model, before) == [], at
    assert solved(30.0).added_cost == optimum


@pytest.mark.slow
def test_an_interrupt_in_many_lines_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "plans"
    place.mkdir()
    interrupt_everywhere(400, 1, place)


def test_an_interrupt_in_the_models_own_code() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.armed:
            raise KeyboardInterrupt
        return y.tanh()

    model, x = Wrap(forward, layer=linear()), batch()
    model.armed = True
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        plan(model, x)
    assert left_behind(model, before) == []
    model.armed = False
    plan(model, x).module(x).sum().backward()


def test_errors_leave_nothing_behind() -> None:
    model, x = Wrap(lambda self, x: self.layer(x) * float(x.sum()), layer=linear()).eval(), batch()
    before = state(model)
    with pytest.raises(CaptureError):
        plan(model, x)
    assert left_behind(model, before) == []
    model = conv()
    before = state(model)
    with pytest.raises(BudgetError):
        plan(model, torch.ones(8, 3, 8, 8), 0.001, solver="greedy")
    assert left_behind(model, before) == []


def test_an_interrupt_while_training_leaves_a_module_that_goes_on(plans: tuple[Plan, Plan]) -> None:
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model, module = plans[1].module._plan_model, plans[1].module
    before = {k: v for k, v in state(model).items() if k not in ("generators", "tensors")}
    for at in range(0, 60, 7):
        with pytest.raises(KeyboardInterrupt), interrupted(at, among=OWN):
            module(x).sum().backward()
        assert left_behind(model, before) == []
    model.zero_grad()
    module(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Entries:
    """Raises `KeyboardInterrupt` as a function of ours, or of `contextlib`, is entered: where Python looks for one."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_filename.startswith((*OWN, contextlib.__file__)) and frame.f_code.co_name != "<genexpr>":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_as_any_function_of_a_step_is_entered_leaves_a_model_that_goes_on() -> None:
    """Gradient mode stayed off, the plan was no longer kept, or the model no longer ran it, silently."""
    model = nn.Linear(4, 4)
    chosen = plan(model, torch.ones(2, 4), check=False)
    chosen.apply(model)
    kept = chosen.module._plan_state
    squares(model(torch.ones(2, 4))).backward()
    for at in count():
        sys.settrace(entries := Entries(at))
        try:
            squares(model(torch.ones(2, 4))).backward()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert torch.is_grad_enabled() and len(kept.cache) == 1 and model.forward.runs_plan
        if entries.left >= 0:
            break
    assert at > 100 and not kept.replans


if not sys.platform.startswith("linux"):  # pragma: no cover - /proc, fork and RLIMIT_FSIZE
    pytest.skip("faults are injected by Linux' means", allow_module_level=True)


@pytest.mark.filterwarnings("ignore:planning anew")
def test_what_forward_raises_at_a_call_that_is_planned_anew_is_as_in_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    plain = copy.deepcopy(model)
    chosen = plan(model, torch.randn(4, 8))
    left = []
    for step in (chosen.module, plain):
        torch.manual_seed(1)
        said = nullcontext() if step is plain else pytest.warns(UserWarning, match="not under the budget")
        with said, pytest.raises(ValueError, match="more than 1 value"):
            step(torch.ones(1, 8))  # the last batch of an epoch
        left.append(torch.get_rng_state())
    assert torch.equal(*left) and int(model[2].num_batches_tracked) == int(plain[2].num_batches_tracked) == 1


def test_a_first_batch_that_forward_refuses_is_waited_after() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    waiting = plan_on_first_batch(model)
    with pytest.warns(UserWarning, match="not planned yet"), pytest.raises(ValueError, match="more than 1 value"):
        model(torch.ones(1, 8))
    assert waiting.plan is None and int(model[2].num_batches_tracked) == 1
    model(torch.randn(4, 8)).sum().backward()
    assert waiting.plan is not None and model.forward.runs_plan


def test_what_stops_planning_the_first_batch_is_not_the_end_of_planning() -> None:
    """A budget that a smaller batch keeps, Ctrl-C: the batches after it ran plain for good, silently."""
    model = mlp()
    waiting = plan_on_first_batch(model, plan(mlp(), batch(64, 32)).baseline_peak_bytes / MIB / 2, progress=False)
    for _ in range(2):
        with pytest.raises(BudgetError, match="or for a smaller batch"):
            model(batch(512, 32))
    model[0].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT) if waiting.plan is None else None)
    with pytest.raises(KeyboardInterrupt):
        model(batch(16, 32))
    model[0]._forward_hooks.clear()
    model(batch(16, 32)).sum().backward()
    assert waiting.plan is not None and model.forward.runs_plan
    waiting.stop()
    assert "forward" not in model.__dict__
