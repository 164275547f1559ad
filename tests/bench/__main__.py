"""`python -m tests.bench [--full]`: the measurements behind the README; short in under fifteen minutes on two cores."""

from __future__ import annotations

import subprocess
import sys

SHORT = (
    ["tests.bench.peers"],
    ["tests.bench.step_time", "gpt2", "resnet50", "lstm", "--rounds", "7"],
    ["tests.bench.solver", "gpt2", "vit", "--shares", "60"],
)
FULL = (
    ["tests.bench.peers", "--full"],
    ["tests.bench.step_time"],
    ["tests.bench.predicted"],
    ["tests.bench.peers.batch", "gpt2-sdpa", "resnet50"],
    ["tests.bench.solver", "gpt2", "resnet50", "vit", "--shares", "80,60,50"],
)


def main() -> int:
    """Run each; the first failure's exit code is ours."""
    unknown = [a for a in sys.argv[1:] if a != "--full"]
    if unknown:
        raise SystemExit(f"unknown argument {unknown[0]!r}: it takes --full or nothing")
    for command in FULL if "--full" in sys.argv[1:] else SHORT:
        print("==", "python -m", *command, flush=True)
        code = subprocess.run([sys.executable, "-m", *command], check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
