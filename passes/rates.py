"""Rates of named devices, and the costs that `cost=` names: what an op costs in picoseconds.

An op takes `max(FLOPs / FLOP per second, bytes read + written / bytes per second)`: the roofline model (Williams,
Waterman, Patterson 2009), with rates of their own for classes of ops (`passes.op_class`) and for single ops that are
far from their class. FLOPs are counted for matrix products, convolutions and attention alone, so the GPUs' peaks are
those of the units that run these; dense, by dtype, from the vendors' data sheets:

h100      NVIDIA H100 Tensor Core GPU data sheet and white paper, SXM5: FP64 tensor 67, FP32 67, TF32 494.7, BF16 and
          FP16 989.4 TFLOPS (the data sheet prints twice the last three, for sparse operands), HBM3 3.35 TB/s
h200      NVIDIA H200 Tensor Core GPU data sheet, SXM: computes as H100, HBM3e 4.8 TB/s
a100      NVIDIA A100 Tensor Core GPU data sheet, SXM 80GB: FP64 tensor 19.5, FP32 19.5, TF32 156, BF16 and FP16 312
          TFLOPS, HBM2e 2,039 GB/s
rtx4090   NVIDIA Ada GPU architecture white paper, appendix A: FP32 82.6, TF32 82.6, BF16 and FP16 with FP32
          accumulation 165.2 TFLOPS, FP64 a 64th of FP32, GDDR6X 1,008 GB/s
cpu       as `passes.calibrate` measures it on one core of an AMD EPYC (Zen 5) with torch 2.13: products of float32 are
          cheap beside memory traffic, and a random number costs fifty times what adding one does

float32 means float32: torch multiplies in TF32 only where it is told to, and so does `roofline:h100:tf32`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from solvers.errors import PlannerError

from .calibrate import calibrated
from .profile import COSTS, OpProfile
from .roofline import BYTES, PREFIX, Roofline, roofline_of

__all__ = ["DEVICES", "Roofline", "check_cost", "cost_function", "device_name", "device_roofline", "is_cost"]

TERA, GIGA, MEGA = 10**12, 10**9, 10**6
TF32 = "tf32"
CPU = torch.device("cpu")
NAMES = ("flops", "roofline", "measured", "device")
SIMILAR = "a100"  # for a GPU that has no built-in rates

_HOPPER = {
    "float64": 67 * TERA, "float32": 67 * TERA, TF32: 494_700 * GIGA, "bfloat16": 989_400 * GIGA,
    "float16": 989_400 * GIGA,
}  # fmt: skip

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
        "float64": 57 * GIGA, "float32": 120 * GIGA, "bfloat16": 450 * GIGA, "float16": 1_200 * MEGA,
        "convolution.float64": 55 * GIGA, "convolution.float32": 220 * GIGA, "convolution.bfloat16": 350 * GIGA,
        "convolution.float16": 1_400 * MEGA, "attention.float64": 43 * GIGA, "attention.float32": 97 * GIGA,
        "attention.bfloat16": 91 * GIGA, "attention.float16": 44 * GIGA,
        "bytes": 100 * GIGA, "copy.bytes": 36 * GIGA, "reduction.bytes": 21 * GIGA, "transcendental.bytes": 14 * GIGA,
        "random.bytes": 1_900 * MEGA, "gelu.bytes": 41 * GIGA, "silu.bytes": 39 * GIGA, "sigmoid.bytes": 40 * GIGA,
        "tanh.bytes": 4_100 * MEGA, "_safe_softmax.bytes": 5_800 * MEGA, "batch_norm_statistics.bytes": 3_400 * MEGA,
        "_native_batch_norm_legit_functional.bytes": 6_700 * MEGA, "max_pool2d_with_indices.bytes": 1_300 * MEGA,
        "avg_pool2d.bytes": 3_900 * MEGA, "calls": 640_000,
    },
}  # fmt: skip


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
    tf32 = rates.pop(TF32, 0)
    if mode:
        rates["float32"] = tf32
    return roofline_of(rates, device)


def device_name(device: torch.device) -> str | None:
    """The name of a device's built-in rates, `h100:tf32` where float32 is multiplied in TF32; None if it has none."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    told = torch.cuda.get_device_name(device).lower().replace(" ", "")
    name = next((name for name in DEVICES if name in told), None)
    fast = torch.get_float32_matmul_precision() != "highest"
    return f"{name}:{TF32}" if name and fast and TF32 in DEVICES[name] else name


def cost_function(cost: str, device: torch.device = CPU) -> Callable[[OpProfile], float]:
    """The cost of that name on a device: one of `NAMES`, `roofline:DEVICE`, or `roofline:flops=RATE,bytes=RATE`.

    Raises:
        PlannerError: there is none; lists those there are.
    """
    if cost == "roofline":
        return device_roofline(device_name(device) or SIMILAR)
    if cost == "device":
        return calibrated(device, device_roofline("cpu") if device.type == "cpu" else None)
    if isinstance(cost, str) and cost in COSTS:
        return COSTS[cost]
    if not isinstance(cost, str) or not cost.startswith(PREFIX):
        raise PlannerError(
            f"cost={cost!r} is unknown: it takes one of {', '.join(NAMES)}, {PREFIX}DEVICE with one of "
            f"{', '.join(DEVICES)}, a Roofline, or a callable."
        )
    text = cost.removeprefix(PREFIX)
    return _own_rates(cost, text) if "=" in text else device_roofline(text)


def check_cost(cost: Any) -> None:
    """Refuse what is not a cost, before anything is measured.

    Raises:
        PlannerError: lists those there are.
    """
    if cost is not None and not callable(cost) and cost != "device":
        cost_function(cost)


def is_cost(name: Any) -> bool:
    """Whether `cost_function` knows the name."""
    try:
        check_cost(name)
    except PlannerError:
        return False
    return isinstance(name, str)


def _own_rates(cost: str, text: str) -> Roofline:
    rates: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            rates[name.strip()] = _number(value.strip())
        except ValueError as error:
            raise PlannerError(f"cost={cost!r}: {item!r} is not a NAME=RATE, a number per second.") from error
    if BYTES not in rates:
        raise PlannerError(f"cost={cost!r} lacks bytes=RATE, the memory's bytes per second.")
    return roofline_of(rates)


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)
