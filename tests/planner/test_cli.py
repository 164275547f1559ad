"""The command line as a new user meets it: every verb, every error in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from planner.command.cli import main
from planner.decided import Decided
from planner.units import parse_size
from solvers.errors import MIB, BudgetError
from solvers.interruptible import interruptible
from tests.planner.small import ROOT

FACTORY = '''
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(64, 1)), torch.randn(256, 64)

def batched(batch):
    return smaller()[0], torch.randn(batch, 64)

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        y = self.inner(x)
        if y.sum() > 0:
            y = y * 2
        return y

def branching():
    return Branching(), torch.randn(2, 4)

def failing():
    raise ValueError("first line\\nsecond line")

def nothing():
    return None

def swapped():
    return small()[::-1]

def leaving():
    raise SystemExit(0)

def misfit():
    return small()[0], torch.randn(256, 65)

def smaller():
    model, sample = small()
    return nn.Sequential(*model[:3], model[-1]), sample
'''


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, in this process."""
    before = sys.argv, list(sys.path)
    sys.argv = ["checkpoint-planner", *arguments]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        sys.modules.pop("mine", None)
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_show_and_diff(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--solver", "greedy", "--time-limit", "30")
    code, out, err = run(capsys, "plan", "mine:small", "--budget", "80%", "--out", "a.json", "--report", "a.html",
                         "--export", "folder", *options)  # fmt: skip
    assert (code, err) == (0, "")
    assert "recompute costs" in out and "plan written to a.json" in out
    assert {"a.json", "a.html", "folder", "mine.py"} <= {p.name for p in factory.parent.iterdir()}
    code, out, _ = run(capsys, "plan", "mine.py:small", "--budget", "700KiB", "--out", "b.json", "--json", *options)
    assert code == 0 and json.loads(out)["options"]["budget_bytes"] == 700 * 1024
    code, out, _ = run(capsys, "show", "a.json")
    assert code == 0 and "Sequential on cpu" in out
    code, out, _ = run(capsys, "show", "a.json", "--json")
    assert code == 0 and json.loads(out)["result"]["overhead"] > 0
    assert run(capsys, "diff", "a.json", "a.json")[0] == 0
    code, out, _ = run(capsys, "diff", "a.json", "b.json")
    assert code == 1 and "options.budget_bytes" in out
    code, out, _ = run(capsys, "diff", "a.json", "b.json", "--json")
    assert code == 1 and json.loads(out)[0]["what"] == "options.budget_bytes"


def test_check(factory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("plan", "mine:small", "--budget", "80%", "--solver", "greedy", "--out", "a.json")
    for option, steps in ((), (1, 2)), (("--check",), (2,)), (("--no-check",), (0,)):  # by default, as time allows
        code, out, _ = run(capsys, *options, *option, "--json")
        assert code == 0 and json.loads(out)["checked"]["steps"] in steps
    assert "check by running: 2 steps" in run(capsys, *options, "--check")[1]
    code, out, _ = run(capsys, "check", "a.json", "mine:small")
    assert code == 0 and out.startswith("check by running: 2 steps beside the plain model, equal bit for bit: ")
    code, out, _ = run(capsys, "check", "a.json", "mine:small", "--json")
    assert code == 0 and json.loads(out)["steps"] == 2
    real = Decided.run
    monkeypatch.setattr(Decided, "run", lambda *a: real(*a) * 2)
    for arguments in ((*options, "--check"), ("check", "a.json", "mine.py:small")):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1 and "differs from the plain one: the output" in err


def test_frontier_min_budget_and_max_batch(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--solver", "greedy", "--time-limit", "2")
    code, out, _ = run(capsys, "frontier", "mine:small", "--points", "3", "--plot", "f.png", "--json", *options)
    assert code == 0 and len(json.loads(out)["points"]) == 3 and Path("f.png").exists()
    code, out, _ = run(capsys, "frontier", "mine:small", "--points", "2", *options)
    assert code == 0 and "proved bound" in out
    code, out, _ = run(capsys, "min-budget", "mine:small", "--json")
    sizes = json.loads(out)
    assert code == 0 and sizes["floor_bytes"] <= sizes["minimum_bytes"] <= sizes["plain_peak_bytes"]
    code, out, _ = run(capsys, "max-batch", "mine:batched", "--budget", "600KiB", "--json", *options)
    assert code == 0 and json.loads(out)["batch"] >= json.loads(out)["plain_batch"] > 0
    code, out, _ = run(capsys, "max-batch", "mine:batched", "--budget", "9MiB", "--limit", "4", *options)
    assert code == 0 and "4 (the limit)" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "mine:small", "--budget", "1KiB"), "smallest budget"),
        (("plan", "mine:small", "--budget", "12"), "is not a size (did you mean 12MiB?)"),
        (("plan", "mine:small", "--budget", "0%"), "not above zero"),
        (("plan", "mine:small", "--budget", "80%", "--solver", "magic"), "no solver is named"),
        (("plan", "mine:small", "--budget", "80%", "--cost", "gold"), "cost='gold'"),
        (("plan", "mine:small", "--budget", "80%", "--out", "no/such/folder/p.json"), "cannot write"),
        (("plan", "mine:missing", "--budget", "80%"), "has no function 'missing'"),
        (("plan", "mine", "--budget", "80%"), "names no factory"),
        (("plan", "missing:small", "--budget", "80%"), "No module named"),
        (("plan", "missing.py:small", "--budget", "80%"), "no such file"),
        (("plan", "mine:failing", "--budget", "80%"), "mine.py:27: ValueError: first line second line"),
        (("plan", "mine:leaving", "--budget", "80%"), "leaving() failed at "),
        (("plan", "leaves:small", "--budget", "80%"), "leaves.py:2: SystemExit: 0"),
        (("plan", "mine:misfit", "--budget", "80%", "--regions", "0", "--regions", "3"), "(256x65 and 64x64)"),
        (("plan", "mine:small", "--budget", "80%", "--out", "r", "--report", "./r"), "--out and --report are both r"),
        (("plan", "mine:nothing", "--budget", "80%"), "returned NoneType"),
        (("plan", "mine:branching", "--budget", "80%"), "mine.py:19: `if y.sum() > 0:`"),
        (("plan", "mine:swapped", "--budget", "80%"), "returned (Tensor, Sequential): return a tuple (model, sample)"),
        (("plan", "mine:batched", "--budget", "80%"), "called without arguments, as batched()"),
        (("max-batch", "mine:small", "--budget", "1MiB"), "called with a batch size, as small(1)"),
        (("plan", "mine:small", "--budget", "80%", "--optimizer", "adam"), "no optimizer 'adam': it has "),
        (("plan", "mine:small", "--budget", "80%", "--reserve", "some"), "4GB or 1.5GiB.\n"),
        (("plan", "mine:small"), "Missing option '--budget'. `"),
        (("plan", "mine:small", "--bugdet", "80%"), "No such option: --bugdet"),
        (("frontier", "mine:small", "--points", "1"), "--points"),
        (("plant", "mine:small"), "No such command 'plant'"),
        (("max_batch", "mine:small"), "Did you mean 'max-batch'? `"),
        (("max-batch", "mine:batched", "--budget", "80%"), "needs a whole"),
        (("max-batch", "mine:batched", "--budget", "1KiB"), "not even a batch of one fits into 1.0 KiB"),
        (("show", "none.json"), "none.json"),
        (("show", "mine.py"), "not a valid plan file"),
        (("frontier", "mine:small", "--points", "2", "--plot", "x.no", "--solver", "greedy"), "cannot write x.no"),
    ],
)
def test_errors_are_one_line(
    factory: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("verb", ["demo", "plan", "show", "frontier", "min-budget", "max-batch", "diff"])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0 and f"checkpoint-planner {verb}" in out


@pytest.mark.slow
def test_what_is_set_aside_counts_everywhere(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sizes(*options: str) -> dict[str, int]:
        return dict(json.loads(run(capsys, "min-budget", "mine:smaller", "--json", *options)[1]))

    plain, state = sizes(), 2 * (4 * (64 * 64 + 64) + 4 * 64 + 64) + 4 * 64  # Adam's two moments and counters
    for options, reserved in ((("--reserve", "1MiB"), MIB), (("--optimizer", "AdamW"), state)):
        more = sizes(*options)
        assert {k: more[k] - plain[k] for k in plain} == dict.fromkeys(plain, reserved)
    assert sizes("--drop-outputs")["plain_peak_bytes"] <= plain["plain_peak_bytes"]
    options = ("--solver", "greedy", "--reserve", "1MiB", "--json")
    code, out, _ = run(capsys, "frontier", "mine:smaller", "--points", "2", *options)
    assert code == 0 and json.loads(out)["plain_peak_bytes"] == plain["plain_peak_bytes"] + MIB
    budget = f"{600 * 1024 + MIB}B"
    code, out, _ = run(capsys, "max-batch", "mine:batched", "--budget", budget, *options)
    without = run(capsys, "max-batch", "mine:batched", "--budget", "600KiB", "--solver", "greedy", "--json")
    assert code == 0 and json.loads(out)["batch"] == json.loads(without[1])["batch"]


def test_ctrl_c_is_told_and_has_its_code(
    factory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.session.prepare_step", interrupted)
    code, out, err = run(capsys, "plan", "mine:small", "--budget", "80%", "--out", "p.json")
    assert (code, out, err) == (130, "", "interrupted\n")
    assert not Path("p.json").exists()


class Endless:
    """As an engine that runs until it is told to stop."""

    HandleUserInterrupt = False

    def __init__(self) -> None:
        self.stopped, self.ended = threading.Event(), False

    def run(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.stopped.wait(20)
        self.ended = True

    def cancelSolve(self) -> None:
        self.stopped.set()


def test_ctrl_c_ends_the_engine_first() -> None:
    engine = Endless()
    with pytest.raises(KeyboardInterrupt):
        interruptible(engine, float("inf"))
    assert engine.ended


def test_module_entry_point() -> None:
    done = subprocess.run([sys.executable, "-m", "planner", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "max-batch" in done.stdout


def test_small_demo(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "demo", "--layers", "3", "--steps", "2", "--time-limit", "2")
    assert code == 0
    assert "A 3-layer language model" in out
    for line in ("largest gradient difference", "parameter difference"):
        row = next(text for text in out.splitlines() if line in text)
        assert row.rstrip(" │").endswith(" 0"), row


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 * MIB), ("4GB", 4 * 10**9), ("1.5 GiB", 3 * 2**29), ("80%", 800), ("0.5%", 5), ("7b", 7),
     ("0.1KiB", 102), ("99999999999TiB", 99999999999 << 40)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, 1000) == size


@pytest.mark.parametrize("text", ["", "12", "GB", "-1GB", "nanGB", "1e3MB", "4 G B", "1,5GB", "0GB", "4GiBs", "٣GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BudgetError):
        parse_size(text, 1000)
