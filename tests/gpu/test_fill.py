"""Without a budget, in a process of its own, on a hollow device that the plain step does not fit on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.device import HOLLOW, MIB, ON_A_GPU

pytestmark = [*ON_A_GPU, pytest.mark.skipif(not HOLLOW, reason="a real device's memory is what it is")]
CODE = """
from tests.gpu.device import measure
from tests.gpu.fill import plan
made, model, sample = plan(batch=8, layers=6, width=256, heads=4, length=256)
found = measure(made, model, sample)
print(len(made.regions), made.baseline_peak_bytes, made.reserved_bytes, found.reserved_bytes, found.retries)
"""


def _on_a_device_of(megabytes: int) -> str:
    environment = {**os.environ, "HOLLOW_MB": str(megabytes)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout.strip() or done.stderr


def test_the_first_attention_of_a_process_is_planned_whole_and_fills_the_device() -> None:
    """Torch decides the order of attention's kernels at its first call on a device."""
    regions, plain, predicted, reserved, retries = map(int, _on_a_device_of(420).split())
    assert regions == 0
    assert plain > 420 * MIB
    assert 0.95 * 420 * MIB <= reserved <= 420 * MIB
    assert reserved == pytest.approx(predicted, rel=0.02)
    assert retries == 0


def test_a_device_that_is_too_small_names_what_would_be_reserved() -> None:
    assert "for which torch's allocator reserves" in _on_a_device_of(170)
