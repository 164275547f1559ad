"""Real SIGINTs at random moments of planning, in a child process: `python -m tests.planner.interrupts --count 300`.

After each the child compares torch's state, the model's and the plain step's loss with what they were before. `--of
backend` interrupts the first compiled step of torch.compile's backend, `--of inductor` the same under Inductor, and
`--of compile` `plan.compile()`; what was interrupted is then done again to its end, and its gradients compared too.
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

STAGES = {
    "capture": "capture", "profile": "profile", "solve_step": "solve", "emit": "rewrite and verify", "decide": "solve",
    "deliver": "torch's part, at an interrupt point",
}  # fmt: skip
OPTIONS: Any = {"solver": "ilp", "gap": 0.0, "cost": "measured"}


class Planned:
    """`auto_checkpoint` at a budget near its minimum."""

    def __init__(self, of: str) -> None:
        from tests.planner.small import conv_net
        from tests.planner.steps import tight

        self.model, self.sample = conv_net()
        self.plan = tight(self.model, self.sample, 0.3 if of == "plan" else 1.0, **OPTIONS)
        self.model.eval()  # its statistics stay
        self.first, self.of = self.loss(), of

    def loss(self) -> float:
        import torch

        with torch.random.fork_rng():
            return float(self.model(**self.sample)["loss"])

    def attempt(self) -> None:
        """What is interrupted."""
        from tests.planner.steps import MIB, plan

        plan(self.model, self.sample, (self.plan.budget_bytes or 0) / MIB, **OPTIONS)

    def wrong(self) -> list[str]:
        """What else is not as before."""
        return ["loss"] if self.loss() != self.first else []


class Compiled(Planned):
    """The first step of a model that is compiled, or a plan that is."""

    def __init__(self, of: str) -> None:
        super().__init__(of)
        self.run: Any = None
        self.gradients = self._gradients(lambda: self.model(**self.sample)["loss"])
        for _ in range(2):
            self.attempt()
        self.model.zero_grad()

    def attempt(self) -> None:
        import torch

        from planner.integrations.compile import checkpoint_planner

        torch._dynamo.reset()
        self.run = None
        if self.of == "compile":
            module = self.plan.compile().module
        else:
            inner = {"backend": "eager"}.get(self.of, self.of)
            options = {"budget_mb": "90%", "inner": inner}
            module = torch.compile(self.model, backend=checkpoint_planner, options=options)
        self.run = lambda: module(**self.sample)["loss"]
        self.run().backward()

    def wrong(self) -> list[str]:
        import torch

        if self.run is None:
            self.attempt()
        self.model.zero_grad()
        found = self._gradients(self.run)
        same = all(torch.allclose(f, w, rtol=1e-4, atol=1e-5) for f, w in zip(found, self.gradients, strict=True))
        return super().wrong() + ([] if same else ["gradients"])

    def _gradients(self, run: Any) -> list[Any]:
        run().backward()
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return found


def child(of: str) -> None:
    """Do it again and again; tell the parent when each begins, and how each interrupt ended."""
    from tests.planner.residue import left_behind, state

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    case = (Planned if of == "plan" else Compiled)(of)
    before = state(case.model)
    while True:
        stage = "elsewhere"
        try:
            tell("begin")
            began = time.monotonic()
            case.attempt()
            tell(f"planned {time.monotonic() - began}")
            time.sleep(60 if of == "plan" else 20)
            stage = "never interrupted"
        except KeyboardInterrupt as error:
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            stage = next((STAGES[n] for n in names if n in STAGES), stage)
        wrong = case.wrong() + left_behind(case.model, before)
        tell(f"bad {stage}: {', '.join(wrong)}" if wrong else f"ok {stage}")


def tell(line: str) -> None:
    print(line, flush=True)


def send(count: int, seed: int = 0, of: str = "plan") -> tuple[Counter[str], list[str]]:
    """Interrupt a child `count` times; how many came in which stage, and what went wrong."""
    command = [sys.executable, "-m", "tests.planner.interrupts", "--child", "--of", of]
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
        lost = stages["never interrupted"] and of == "plan"  # Dynamo's own part, before the backend's, can lose one
        return stages, [*wrong, _end_of(errors)] if lost else wrong


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
    parser.add_argument("--of", choices=("plan", "backend", "inductor", "compile"), default="plan")
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.of)
        return
    stages, wrong = send(arguments.count, arguments.seed, arguments.of)
    print("\n".join(wrong), end="\n" * bool(wrong))
    print(f"{sum(stages.values())} interrupts, {len(wrong)} left something behind:", dict(sorted(stages.items())))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
