"""Roofline: an op's cost in picoseconds, from rates of FLOPs, of bytes and of calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from solvers.errors import PlannerError

from .profile import OpProfile

PICOSECONDS = 10**12
PREFIX = "roofline:"
BYTES, CALLS = "bytes", "calls"

Rates = tuple[tuple[str, int], ...]


@dataclass(frozen=True, init=False)
class Roofline:
    """Picoseconds an op takes on a device of these rates, rounded up; pass it as `cost=`.

    Args:
        flops_per_second: one rate, or one per dtype (`{"bfloat16": 989e12, "float32": 67e12}`), which
            `{"convolution.float32": 4e13}` overrides for a class of op (`passes.op_class`). A dtype that is not named,
            integers and complex numbers among them, goes by float32's, or else by the slowest named.
        bytes_per_second: memory bandwidth, which `{"bytes": 3e12, "random.bytes": 5e11, "tanh.bytes": 2e12}`
            overrides for a class, or for one op.
        calls_per_second: how many ops that do next to nothing can run; None: any number.

    Raises:
        PlannerError: a rate is not a positive, finite number.
    """

    flops_per_second: Rates
    bytes_per_second: Rates
    calls_per_second: int | None
    device: str

    def __init__(
        self, flops_per_second: float | Mapping[str, float], bytes_per_second: float | Mapping[str, float], *,
        calls_per_second: float | None = None, device: str = "",
    ) -> None:  # fmt: skip
        flops, moved = _by_name(flops_per_second, "flops"), _by_name(bytes_per_second, BYTES)
        for argument, rates in (("flops_per_second", flops), ("bytes_per_second", moved)):
            if not rates:
                raise PlannerError(f"Roofline: {argument} is empty; it takes a rate, or one per name.")
        object.__setattr__(self, "flops_per_second", _rates("flops_per_second", flops))
        object.__setattr__(self, "bytes_per_second", _rates("bytes_per_second", moved))
        calls = None if calls_per_second is None else _rate("calls_per_second", calls_per_second)
        object.__setattr__(self, "calls_per_second", calls)
        object.__setattr__(self, "device", device)

    def __call__(self, op: OpProfile) -> int:
        compute = -(-op.work * PICOSECONDS // self.rate(op.dtype, op.kind))
        memory = -(-(op.bytes_read + op.bytes_written) * PICOSECONDS // self.bandwidth(op.kind, op.op))
        call = PICOSECONDS // self.calls_per_second if self.calls_per_second else 0
        return max(compute, memory) + call

    def rate(self, dtype: str, kind: str = "") -> int:
        """FLOP per second in that dtype, by ops of that class."""
        rates = dict(self.flops_per_second)
        names = (f"{kind}.{dtype}", dtype, f"{kind}.float32", "float32")
        return next((rates[name] for name in names if name in rates), None) or min(rates.values())

    def bandwidth(self, kind: str = "", op: str = "") -> int:
        """Bytes per second that an op of that class, or that op, reads and writes."""
        rates = dict(self.bytes_per_second)
        names = (f"{op}.{BYTES}", f"{kind}.{BYTES}", BYTES)
        return next((rates[name] for name in names if name in rates), None) or min(rates.values())

    @property
    def __name__(self) -> str:
        """The text that makes this roofline again, through `cost_function`: it is what plan files keep."""
        return PREFIX + (self.device or self.text)

    @property
    def text(self) -> str:
        """All rates as NAME=RATE."""
        calls = () if self.calls_per_second is None else ((CALLS, self.calls_per_second),)
        return ",".join(f"{k}={v}" for k, v in (*self.flops_per_second, *self.bytes_per_second, *calls))


def roofline_of(rates: Mapping[str, float], device: str = "") -> Roofline:
    """From rates of all sorts under their names: those of FLOPs, of bytes (`bytes`, `random.bytes`), of calls."""
    moved = {name: rate for name, rate in rates.items() if name.rpartition(".")[2] == BYTES}
    flops = {name: rate for name, rate in rates.items() if name not in moved and name != CALLS}
    return Roofline(flops, moved, calls_per_second=rates.get(CALLS), device=device)


def _by_name(rates: float | Mapping[str, float], name: str) -> Mapping[str, float]:
    return rates if isinstance(rates, Mapping) else {name: rates}


def _rates(argument: str, rates: Mapping[str, float]) -> Rates:
    return tuple((name, _rate(f"{argument}[{name!r}]", rate)) for name, rate in sorted(rates.items()))


def _rate(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 1:
        raise PlannerError(f"Roofline: {name}={value!r} is not a rate: it takes a number per second of at least 1.")
    return int(value)
