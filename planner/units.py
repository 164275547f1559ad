"""Sizes as people write them on a command line: `512MiB`, `4GB`, `1.5 GiB`, `80%`."""

from __future__ import annotations

import numbers
import re
from typing import Any

from solvers.errors import MIB, BudgetError

UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z%]+)\s*", re.IGNORECASE | re.ASCII)
SIZE = "write a size with its unit, such as 512MiB, 4GB or 1.5GiB"
SHARE = ", or a share of the plain peak, such as 80%"


def parse_size(text: str, whole_bytes: int | None = None) -> int:
    """Bytes of a size, rounded down; a percentage is of `whole_bytes`.

    Raises:
        BudgetError: `text` is not a size, or a percentage where there is nothing to take it of.
    """
    accepted = SIZE if whole_bytes is None else SIZE + SHARE
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or not (unit == "%" or unit in UNITS):
        meant = f" (did you mean {text.strip()}MiB?)" if text.strip().isdecimal() else ""
        raise BudgetError(f"{text!r} is not a size{meant}: {accepted}.")
    if unit == "%" and whole_bytes is None:
        raise BudgetError(f"{text!r} needs a whole to be a share of, which is not known here: {accepted}.")
    scale = UNITS[unit] if unit != "%" else whole_bytes or 0
    number, _, decimals = match[1].partition(".")
    exact = int(number + decimals) * scale // 10 ** len(decimals)
    size = exact // 100 if unit == "%" else exact
    if size <= 0:
        raise BudgetError(f"{text!r} is not above zero: {accepted}.")
    return size


def show_bytes(size: int) -> str:
    """A size for people: MiB, with two decimals below ten, KiB below a twentieth of one."""
    if size and abs(size) < MIB / 20:
        return f"{size / 1024:,.1f} KiB"
    return f"{size / MIB:,.2f} MiB" if abs(size) < 10 * MIB else f"{size / MIB:,.1f} MiB"


def is_number(value: Any) -> bool:
    """Whether it is a real number, NumPy's included, and not a truth value."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
