"""`python -m tests.bench`: the short measurements behind the README (about ten minutes)."""

from __future__ import annotations

import subprocess
import sys

COMMANDS = (
    ["tests.bench.step_time"],
    ["tests.bench.solver", "gpt2", "resnet50", "vit", "--shares", "80,60,50"],
)


def main() -> int:
    """Run each; the first failure's exit code is ours."""
    for command in COMMANDS:
        print("==", "python -m", *command, flush=True)
        code = subprocess.run([sys.executable, "-m", *command], check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
