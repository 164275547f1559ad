"""Real SIGINTs at random moments of planning, in a child process: `python -m tests.planner.interrupts --count 300`.

After each the child compares torch's state, the model's and the plain step's loss with what they were before.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from typing import IO, Any

STAGES = {"capture": "capture", "profile": "profile", "solve_step": "solve", "emit": "rewrite and verify"}


def child() -> None:
    """Plan again and again; tell the parent when each plan begins, and how each interrupt ended."""
    import torch

    from tests.planner.residue import left_behind, state
    from tests.planner.small import conv_net
    from tests.planner.steps import MIB, plan, tight

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    model, sample = conv_net()
    options: Any = {"solver": "ilp", "gap": 0.0, "cost": "measured"}
    chosen = tight(model, sample, 0.3, **options)

    def loss() -> float:
        with torch.random.fork_rng():
            return float(model(**sample)["loss"])

    model.eval()  # its statistics stay
    first, budget = loss(), (chosen.budget_bytes or 0) / MIB
    before = state(model)
    while True:
        stage = "after planning"
        try:
            tell("begin")
            began = time.monotonic()
            plan(model, sample, budget, **options)
            tell(f"planned {time.monotonic() - began}")
            time.sleep(60)
            stage = "never interrupted"
        except KeyboardInterrupt as error:
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            stage = next((STAGES[n] for n in names if n in STAGES), stage)
        wrong = left_behind(model, before) + (["loss"] if loss() != first else [])
        tell(f"bad {stage}: {', '.join(wrong)}" if wrong else f"ok {stage}")


def tell(line: str) -> None:
    print(line, flush=True)


def send(count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Interrupt a child `count` times; how many came in which stage, and what went wrong."""
    command = [sys.executable, "-m", "tests.planner.interrupts", "--child"]
    with (
        tempfile.TemporaryDirectory() as folder,  # others' temporary files are not what is left behind
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "TMPDIR": folder}
        ) as process,
    ):
        assert process.stdout is not None
        try:
            stages, wrong = _send(process.pid, process.stdout, count, random.Random(seed))
        except EOFError:
            return Counter(), [f"the process died: {_end_of(errors)}"]
        finally:
            process.kill()
        return stages, [*wrong, _end_of(errors)] if stages["never interrupted"] else wrong


def _end_of(errors: IO[str]) -> str:
    """An exception that Python could only print, or else what the child said last."""
    errors.seek(0)
    text = errors.read()
    ignored = text.find("Exception ignored")
    return text[-4000:] if ignored < 0 else text[ignored : ignored + 4000]


def _send(pid: int, lines: IO[str], count: int, rng: random.Random) -> tuple[Counter[str], list[str]]:
    stages: Counter[str] = Counter()
    wrong: list[str] = []
    shortest, latest = 60.0, 0.0
    _line(lines, "begin")
    for trial in range(-2, count):
        if trial < 0:  # learn how long planning takes
            shortest = min(shortest, float(_line(lines, "planned").split()[1]))
        else:
            time.sleep(rng.uniform(0, shortest))
        os.kill(pid, signal.SIGINT)
        sent = time.monotonic()
        said = _line(lines, "ok", "bad")
        latest = max(latest, time.monotonic() - sent)
        if trial >= 0:
            stages[said.partition(" ")[2].partition(":")[0]] += 1
        wrong += [said] if said.startswith("bad") else []
        _line(lines, "begin")
    tell(f"the longest wait for an interrupt: {latest:.2f} s")
    return stages, wrong


def _line(lines: IO[str], *wanted: str) -> str:
    for line in lines:
        if line.startswith(wanted):
            return line.strip()
    raise EOFError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        child()
        return
    stages, wrong = send(arguments.count, arguments.seed)
    print("\n".join(wrong), end="\n" * bool(wrong))
    print(f"{sum(stages.values())} interrupts, {len(wrong)} left something behind:", dict(sorted(stages.items())))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
