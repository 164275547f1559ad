"""`python -m tests.bench.memory_curve [out.png]`: the README's figure."""

from __future__ import annotations

import sys

from planner import auto_checkpoint
from solvers.errors import MIB
from tests.zoo.models import build


def main(path: str = "notebooks/memory_curve.png") -> None:
    """Plan GPT-2 at half of its plain peak and draw the step."""
    model, sample = build("gpt2")
    plain = auto_checkpoint(model, sample, progress=False)
    plan = auto_checkpoint(model, sample, plain.peak_bytes / 2 / MIB, progress=False)
    plan.plot().savefig(path, dpi=110)
    print(plan)


if __name__ == "__main__":
    main(*sys.argv[1:])
