"""Rooflines of named devices, and of the user's own numbers: what an op costs in picoseconds.

An op takes `max(FLOPs / peak FLOP per second, bytes read + written / bytes per second)`: the roofline model (Williams,
Waterman, Patterson 2009). FLOPs are counted for matrix products, convolutions and attention alone, so the peaks are
those of the units that run these; dense, by dtype, from the vendors' data sheets:

h100      NVIDIA H100 Tensor Core GPU data sheet and white paper, SXM5: FP64 tensor 67, FP32 67, TF32 494.7, BF16 and
          FP16 989.4 TFLOPS (the data sheet prints twice the last three, for sparse operands), HBM3 3.35 TB/s
h200      NVIDIA H200 Tensor Core GPU data sheet, SXM: computes as H100, HBM3e 4.8 TB/s
a100      NVIDIA A100 Tensor Core GPU data sheet, SXM 80GB: FP64 tensor 19.5, FP32 19.5, TF32 156, BF16 and FP16 312
          TFLOPS, HBM2e 2,039 GB/s
rtx4090   NVIDIA Ada GPU architecture white paper, appendix A: FP32 82.6, TF32 82.6, BF16 and FP16 with FP32
          accumulation 165.2 TFLOPS, FP64 a 64th of FP32, GDDR6X 1,008 GB/s
cpu       one socket of an Intel Xeon Platinum 8480+ (ARK): 56 cores at the base clock of 2.0 GHz, per core and cycle
          32 FP64, 64 FP32, 128 FP16 FLOP (two AVX-512 units) and 1,024 BF16 FLOP (AMX), 8 channels of DDR5-4800

float32 means float32: torch multiplies in TF32 only where it is told to, and so does `roofline:h100:tf32`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from solvers.errors import PlannerError

from .profile import COSTS, OpProfile

TERA, GIGA = 10**12, 10**9
PICOSECONDS = 10**12
PREFIX = "roofline:"
TF32 = "tf32"

Rates = tuple[tuple[str, int], ...]

_HOPPER = {
    "float64": 67 * TERA, "float32": 67 * TERA, TF32: 494_700 * GIGA, "bfloat16": 989_400 * GIGA,
    "float16": 989_400 * GIGA,
}  # fmt: skip
_CORES = 56 * 2 * GIGA

# FLOP per second by dtype, then bytes per second under "bytes".
DEVICES: dict[str, dict[str, int]] = {
    "h100": {**_HOPPER, "bytes": 3_350 * GIGA},
    "h200": {**_HOPPER, "bytes": 4_800 * GIGA},
    "a100": {
        "float64": 19_500 * GIGA, "float32": 19_500 * GIGA, TF32: 156 * TERA, "bfloat16": 312 * TERA,
        "float16": 312 * TERA, "bytes": 2_039 * GIGA,
    },
    "rtx4090": {
        "float64": 82_600 * GIGA // 64, "float32": 82_600 * GIGA, TF32: 82_600 * GIGA, "bfloat16": 165_200 * GIGA,
        "float16": 165_200 * GIGA, "bytes": 1_008 * GIGA,
    },
    "cpu": {
        "float64": 32 * _CORES, "float32": 64 * _CORES, "bfloat16": 1024 * _CORES, "float16": 128 * _CORES,
        "bytes": 8 * 38_400 * 10**6,
    },
}  # fmt: skip


@dataclass(frozen=True, init=False)
class Roofline:
    """Picoseconds an op takes on a device of these peak rates, rounded up; pass it as `cost=`.

    Args:
        flops_per_second: one rate, or one per dtype (`{"bfloat16": 989e12, "float32": 67e12}`). A dtype that is not
            named, integers and complex numbers among them, goes by float32's, or else by the slowest named.
        bytes_per_second: memory bandwidth.

    Raises:
        PlannerError: a rate is no positive, finite number.
    """

    flops_per_second: Rates
    bytes_per_second: int
    device: str

    def __init__(
        self, flops_per_second: float | Mapping[str, float], bytes_per_second: float, *, device: str = ""
    ) -> None:
        by_dtype = flops_per_second if isinstance(flops_per_second, Mapping) else {"flops": flops_per_second}
        if not by_dtype:
            raise PlannerError("Roofline: flops_per_second is empty; it takes a rate, or one per dtype.")
        rates = tuple((name, _rate(f"flops_per_second[{name!r}]", rate)) for name, rate in sorted(by_dtype.items()))
        object.__setattr__(self, "flops_per_second", rates)
        object.__setattr__(self, "bytes_per_second", _rate("bytes_per_second", bytes_per_second))
        object.__setattr__(self, "device", device)

    def __call__(self, op: OpProfile) -> int:
        compute = -(-op.work * PICOSECONDS // self.rate(op.dtype))
        memory = -(-(op.bytes_read + op.bytes_written) * PICOSECONDS // self.bytes_per_second)
        return max(compute, memory)

    def rate(self, dtype: str) -> int:
        """FLOP per second in that dtype."""
        rates = dict(self.flops_per_second)
        return rates.get(dtype) or rates.get("float32") or min(rates.values())

    @property
    def __name__(self) -> str:
        """The text that makes this roofline again, through `cost_function`: it is what plan files keep."""
        if self.device:
            return PREFIX + self.device
        return PREFIX + ",".join(f"{k}={v}" for k, v in (*self.flops_per_second, ("bytes", self.bytes_per_second)))


def device_roofline(device: str) -> Roofline:
    """The roofline of a named device, `h100`, or with float32 matrix products in TF32, `h100:tf32`.

    Raises:
        PlannerError: no device has that name, or it has no TF32.
    """
    name, colon, mode = device.partition(":")
    rates = dict(DEVICES.get(name, {}))
    if not rates or (colon and (mode != TF32 or TF32 not in rates)):
        with_tf32 = ", ".join(f"{n}:{TF32}" for n, r in DEVICES.items() if TF32 in r)
        raise PlannerError(
            f"cost={PREFIX + device!r} names no device: it takes {PREFIX}NAME with one of {', '.join(DEVICES)}, "
            f"{with_tf32}, or your own rates as {PREFIX}flops=9.9e14,bytes=3.3e12 or Roofline(...)."
        )
    bytes_per_second, tf32 = rates.pop("bytes"), rates.pop(TF32, 0)
    if mode:
        rates["float32"] = tf32
    return Roofline(rates, bytes_per_second, device=device)


def cost_function(cost: str) -> Callable[[OpProfile], float]:
    """The cost of that name: one of `COSTS`, `roofline:DEVICE`, or `roofline:flops=RATE,bytes=RATE`.

    Raises:
        PlannerError: there is none; lists those there are.
    """
    if isinstance(cost, str) and cost in COSTS:
        return COSTS[cost]
    if not isinstance(cost, str) or not cost.startswith(PREFIX):
        raise PlannerError(
            f"cost={cost!r} is unknown: it takes one of {', '.join(COSTS)}, {PREFIX}DEVICE with one of "
            f"{', '.join(DEVICES)}, a Roofline, or a callable."
        )
    text = cost.removeprefix(PREFIX)
    return _own_rates(cost, text) if "=" in text else device_roofline(text)


def is_cost(name: Any) -> bool:
    """Whether `cost_function` knows the name."""
    try:
        return isinstance(name, str) and cost_function(name) is not None
    except PlannerError:
        return False


def _own_rates(cost: str, text: str) -> Roofline:
    rates: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            rates[name.strip()] = _number(value.strip())
        except ValueError as error:
            raise PlannerError(f"cost={cost!r}: {item!r} is no NAME=RATE, a number per second.") from error
    if "bytes" not in rates:
        raise PlannerError(f"cost={cost!r} lacks bytes=RATE, the memory's bytes per second.")
    bytes_per_second = rates.pop("bytes")
    return Roofline(rates, bytes_per_second)


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def _rate(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 1:
        raise PlannerError(f"Roofline: {name}={value!r} is no rate: it takes a number per second of at least 1.")
    return int(value)
