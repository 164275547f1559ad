"""`python -m tests.gpu.fill`: a language model planned with no budget on this device, and what four steps then take.

HOLLOW_MB=2048 tests/hollow/run.sh ... gives a hollow device of that size.
"""

from __future__ import annotations

import argparse
from typing import Any

from planner import BudgetError, Plan, auto_checkpoint
from tests.gpu.device import HOLLOW, MIB, measure, on_device
from tests.zoo.models import gpt2


def plan(**sizes: int) -> tuple[Plan, Any, Any]:
    """The plan, its model and its sample."""
    model, sample = on_device(lambda: gpt2(attention="sdpa", **sizes))  # type: ignore[arg-type]
    return auto_checkpoint(model, sample, check=not HOLLOW, progress=False, time_limit=5), model, sample


def main() -> None:
    """One line of figures, or the refusal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("batch", 8), ("layers", 6), ("width", 256), ("heads", 4), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    try:
        made, model, sample = plan(**vars(parser.parse_args()))
    except BudgetError as error:
        print(f"BudgetError: {error}")
        return
    found = measure(made, model, sample)
    figures = {
        "plain_mib": made.baseline_peak_bytes / MIB, "predicted_allocated_mib": made.peak_bytes / MIB,
        "allocated_mib": found.allocated_bytes / MIB, "predicted_reserved_mib": (made.reserved_bytes or 0) / MIB,
        "reserved_mib": found.reserved_bytes / MIB, "overhead_percent": 100 * made.overhead,
    }  # fmt: skip
    print(*(f"{name}={value:.2f}" for name, value in figures.items()), f"retries={found.retries}")


if __name__ == "__main__":
    main()
