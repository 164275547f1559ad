"""Plan files damaged at random: `python -m tests.planner.mutations --count 2000`.

Each is shown, compared and loaded. It must be refused in a sentence, or give a plan that is right whatever the file
says: valid, within its budget, with the plain model's numbers, and with no proof that was not made here. Most carry a
checksum that fits.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner import Plan, PlannerError
from planner.files import planfile
from planner.files.planfile_view import differences, show_file, summary
from planner.show.console import Console
from solvers.simulate import simulate
from tests.planner.limits import TookTooLong, within_seconds
from tests.planner.steps import mlp, tight

SECONDS = 5.0
DEEP: Any = "x"
for _ in range(40):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**30, -(10**30), 10**400, "", "x", "\0", "\n",
    "\ud800",
    "\x1b[31m", "[/x]", "$x$", "optimal", "feasible", "replan", "auto", "measured", "earliest", "listed",
    "compute 0", "free 0",
    "../x", "x" * 5000, "x" * 200_000, [], [[]], [None], {}, {"": ""}, DEEP, ["x"] * 30_000, {"a": 1, "b": [2]},
]  # fmt: skip


class Case:
    """A plan with recomputes, its file, and what its model computes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.sample = mlp(), torch.randn(16, 32)
        self.plan = tight(self.model, self.sample, 0.5)
        assert self.plan.recomputed
        self.data = planfile.to_data(self.plan)
        self.expected = step(self.model, self.model, self.sample)


def step(module: nn.Module, model: nn.Module, sample: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    output = module(sample)
    output.sum().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


# Damage ---------------------------------------------------------------------------------------------------------------


def places(data: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each key or index of it."""
    found = [] if found is None else found
    for key, value in list(data.items()) if isinstance(data, dict) else list(enumerate(data)):
        found.append((data, key))
        if isinstance(value, (dict, list)):
            places(value, found)
    return found


def damage(data: dict[str, Any], rng: random.Random) -> None:
    """One change somewhere; settings and the schedule as often as the many ops."""
    section = rng.choice([k for k in data if k != "checksum"])
    inside = places(data[section]) if isinstance(data[section], (dict, list)) and rng.random() < 0.9 else []
    container, key = rng.choice(inside) if inside else (data, section)
    rng.choice(CHANGES)(container, key, rng)


def _replace(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = copy.deepcopy(rng.choice(VALUES))


def _remove(container: Any, key: Any, rng: random.Random) -> None:
    del container[key]


def _nudge(container: Any, key: Any, rng: random.Random) -> None:
    value = container[key]
    if isinstance(value, bool):
        container[key] = not value
    elif isinstance(value, int):
        container[key] = value + rng.choice([-1, 1, -value, value, 10**12])
    elif isinstance(value, str) and value:
        i = rng.randrange(len(value))
        container[key] = value[:i] + rng.choice(["", "0", "é", "\0", value[i] * 2]) + value[i + 1 :]
    else:
        _replace(container, key, rng)


def _repeat(container: Any, key: Any, rng: random.Random) -> None:
    if isinstance(container, list):
        container[key:key] = [container[key]] * rng.choice([1, 2, 50, 200_000])
    else:
        container[f"{key}_"] = container[key]


def _swap(container: Any, key: Any, rng: random.Random) -> None:
    other = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
    container[key], container[other] = container[other], container[key]


def _wrap(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = rng.choice([[container[key]], {"x": container[key]}, str(container[key])])


CHANGES: list[Callable[[Any, Any, random.Random], None]] = [
    _replace, _replace, _remove, _nudge, _nudge, _repeat, _swap, _wrap,
]  # fmt: skip


def rewrite(text: str, rng: random.Random) -> bytes:
    """Change the file's text, not its values."""
    raw = text.encode()
    i = rng.randrange(len(raw))
    return rng.choice([
        raw[:i] + b"\n", raw[:i] + bytes([rng.randrange(256)]) + raw[i + 1 :], raw[:i] + raw[i + rng.randrange(60) :],
        raw.replace(b": 0", b": 0.5", 1), raw.replace(b": 0", b": NaN", 1), raw.replace(b": 0", b": 1e999", 1),
        raw.replace(b": 0", b": -0", 1), b"\xef\xbb\xbf" + raw, text.encode("utf-16"), text.encode("utf-32"), raw + raw,
        raw[:i] + b'\\"' * 40_000 + raw[i:], b'{"format": "' + b'\\"' * 40_000 + b"\n", b"[" * 100_000 + b"\n",
        b'{"a":' * 100_000 + b"\n", b"[" + b"[]," * 1_000_000 + b"[]]\n", b'"' + b"\\u0022" * 2_000_000 + b'"\n',
        b"9" * 5_000_000 + b"\n", b'{"a": ' + b"9" * 5000 + b"}\n", b'{"a": 1, "a": 2}\n', b"\0" * 1000 + b"\n",
        b"\n", b"null\n",
        raw[:-3] + b', "note": "' + b"x" * 30_000_000 + b'"}\n', b"{" + b'"a":1,' * 500_000 + b'"b":1}\n',
        b"\x80" * 10 + b"\n",
        b"[" + b"1," * 2_000_000 + b"1]\n", raw.replace(b'"', b"'"), raw.replace(b",", b",,", 1),
        raw.replace(b"\n", b"\0\n"),
    ])  # fmt: skip


def mutated(data: dict[str, Any], rng: random.Random) -> bytes:
    if rng.random() < 0.15:
        return rewrite(planfile.render({**data, "checksum": planfile._checksum(data)}), rng)
    data = copy.deepcopy(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        damage(data, rng)
    if rng.random() < 0.97 and "checksum" in data:
        data["checksum"] = planfile._checksum(data)
    return planfile.render(data).encode()


# Judgement ------------------------------------------------------------------------------------------------------------


def judge(path: Path, case: Case) -> str:
    """"refused", "loaded", or what went wrong; time is the processor's, for other processes may hold it."""
    began = time.process_time()
    try:
        with within_seconds(12 * SECONDS):
            file = planfile.read(path)
            Console(file=io.StringIO()).print(show_file(file))
            json.dumps(summary(file))
            differences(file, file)
            verdict = _loaded(Plan.load(path, case.model, case.sample, progress=False), case)
    except PlannerError as error:
        verdict = "refused" if str(error).isprintable() and len(str(error)) < 2000 else f"said badly: {error!r}"[:300]
    except (Exception, TookTooLong) as error:  # noqa: BLE001 - that is what is looked for
        verdict = f"raw error: {error!r}"[:300]
    taken = time.process_time() - began
    return verdict if taken < SECONDS else f"took {taken:.1f} s ({verdict})"


def _loaded(plan: Plan, case: Case) -> str:
    again = simulate(plan.problem, plan.schedule)
    if plan.peak_bytes != again.peak_bytes or (plan.budget_bytes is not None and again.peak_bytes > plan.budget_bytes):
        return "peak beyond the budget, or not as simulated"
    if again.added_cost and (plan.status == "optimal" or plan.bound):
        return f"claims {plan.status}, a bound of {plan.bound}"
    found = step(plan.module, case.model, case.sample)
    same = len(found) == len(case.expected) and all(map(torch.equal, found, case.expected))
    _ = str(plan), repr(plan)
    return "loaded" if same else "other numbers"


def run(count: int, seed: int = 0) -> tuple[Counter[str], list[str], float]:
    """Judge `count` files: verdicts, what went wrong, and the longest time taken."""
    case, rng = Case(), random.Random(seed)
    verdicts: Counter[str] = Counter()
    wrong: list[str] = []
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        for i in range(count):
            path.write_bytes(mutated(case.data, rng))
            began = time.process_time()
            verdict = judge(path, case)
            longest = max(longest, time.process_time() - began)
            verdicts[verdict if verdict in ("refused", "loaded") else "wrong"] += 1
            wrong += [] if verdict in ("refused", "loaded") else [f"{i}: {verdict}"]
    return verdicts, wrong, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    verdicts, wrong, longest = run(arguments.count, arguments.seed)
    print("\n".join(wrong), end="\n" * bool(wrong))
    print(f"{arguments.count} files: {dict(sorted(verdicts.items()))}; the longest took {longest:.1f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
