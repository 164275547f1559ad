"""Budgets: what the user may ask for, and what has to be set aside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from passes.printable import shown
from solvers.errors import MIB, BudgetError

from .units import is_number, parse_size

LARGEST_MB = float(1 << 43)  # above any machine's, and exact in a float
ACCEPTED = 'budget_mb takes MiB as an int or a float, a size ("12GB"), a share of the plain peak ("50%"), or None'


@dataclass(frozen=True)
class Budget:
    """A budget as the user wrote it: MiB, a size with its unit, a share of the plain peak, or None.

    Raises:
        BudgetError: the value is none of these.
    """

    value: Any

    def __post_init__(self) -> None:
        self.to_bytes(MIB)

    @property
    def is_share(self) -> bool:
        """Whether it is a share of the plain peak."""
        return isinstance(self.value, str) and "%" in self.value

    def to_bytes(self, plain_peak_bytes: int | None) -> int | None:
        """Bytes, rounded down; None sets no limit but the device's own.

        Raises:
            BudgetError: a share is asked for where `plain_peak_bytes` is not known.
        """
        if self.value is None:
            return None
        if isinstance(self.value, str):
            return parse_size(self.value, plain_peak_bytes)
        if not is_number(self.value):
            raise BudgetError(f"budget_mb={shown(self.value)} is not a number of MiB: {ACCEPTED}.")
        if not 0 < self.value <= LARGEST_MB:
            raise BudgetError(f"budget_mb={self.value!r} is not a usable budget: {ACCEPTED}.")
        return int(float(self.value) * MIB)


def reserve_to_bytes(reserve_mb: Any) -> int:
    """`reserve_mb` in bytes, rounded up."""
    if not is_number(reserve_mb) or not 0 <= reserve_mb <= LARGEST_MB:
        raise BudgetError(f"reserve_mb={shown(reserve_mb)} is not a number of MiB: it takes one that is not negative.")
    return math.ceil(float(reserve_mb) * MIB)
