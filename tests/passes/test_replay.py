"""What a step keeps for a replay: the same again when asked for, and no tensor where it needs none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes._torch import allocator_events
from passes.run.replay import as_tensor, copy_generator, old_value

COUNTERS = [torch.tensor(2**62 + 1), torch.tensor([-3], dtype=torch.int8), torch.tensor(True), torch.zeros(1, 1).int()]
OTHERS = [torch.tensor(0.1), torch.arange(3), torch.tensor(2.5, dtype=torch.bfloat16), torch.ones(2, 3).t()]


def test_a_copied_generator_draws_the_same() -> None:
    torch.manual_seed(3)
    torch.randn(5)  # an odd count: half of a pair is kept in the generator's state
    state = torch.get_rng_state()
    copied = copy_generator("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    drawn = torch.randn(7)
    assert torch.equal(copied.get_state(), state)
    torch.set_rng_state(copied.get_state())
    assert torch.equal(torch.randn(7), drawn)


@pytest.mark.parametrize("value", [*COUNTERS, *OTHERS], ids=repr)
def test_an_old_value_outlives_an_overwrite(value: torch.Tensor) -> None:
    buffer = value.clone()
    kept = old_value(buffer)
    buffer.zero_()
    again = as_tensor(kept, buffer)
    assert again.dtype == value.dtype and again.shape == value.shape and torch.equal(again, value)
    assert again.data_ptr() != buffer.data_ptr()


def test_generators_and_counters_are_kept_without_a_tensor() -> None:
    kept: list[Any] = []

    def keep() -> None:
        kept.append(copy_generator("cpu"))
        kept.extend(map(old_value, COUNTERS))

    assert allocator_events(keep) == []
    assert allocator_events(lambda: kept.append(old_value(OTHERS[1]))) != []
