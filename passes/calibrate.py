"""calibrate: a device's own rates by class of op, measured once and kept in a file, so that plans stay the same.

The file lies in `$CHECKPOINT_PLANNER_CACHE`, or else in `checkpoint-planner` of the user's cache folder: one for each
device, number of threads and release of torch. Delete it to measure anew.
"""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from passes._torch import TORCH_VERSION
from solvers.errors import PlannerError

from .device import kind_of
from .exclusive import exclusive, interrupt_point
from .op_class import ATTENTION, CONVOLUTION, COPY, POINTWISE, RANDOM, REDUCTION, TRANSCENDENTAL
from .roofline import BYTES, CALLS, Roofline, roofline_of
from .run import kernels

aten = torch.ops.aten
FOLDER = "CHECKPOINT_PLANNER_CACHE"
SECONDS, LEAST_RUNS = 0.15, 5  # for each rate
ROUNDS = 3  # of all rates, while other programs disturb them
FAR = 8
DTYPES = ("float32", "bfloat16", "float16", "float64")
Case = tuple[str, int, Callable[[], Any]]  # the rate's name, FLOPs or bytes or calls of a run, and the run


def calibrated(device: torch.device, built_in: Roofline | None = None) -> Roofline:
    """The device's rates from its file; measured and stored if there is none yet.

    Args:
        device: whose rates.
        built_in: rates of such a device. Where other programs disturb the measuring (`was_disturbed`), they are
            returned with a warning, and nothing is stored.

    Raises:
        PlannerError: the file holds something else.
    """
    path = rates_path(device)
    if not path.exists():
        found = measure_rates(device, built_in)
        if built_in is not None and was_disturbed(found, built_in):
            warnings.warn(
                f'other programs kept the processor too busy to measure its rates for cost="device": this plan is made '
                f"with those of {built_in.__name__!r}, and the next one measures again.",
                stacklevel=2,
            )
            return built_in
        try:
            _store(path, found)
        except OSError as error:
            warnings.warn(
                f"the measured rates of this device could not be kept in {path} ({error}): other processes measure "
                f"their own, and may plan otherwise. Set {FOLDER} to a folder that can be written.",
                stacklevel=2,
            )
            return roofline_of(found)
    try:
        return roofline_of(json.loads(path.read_text())["rates"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, PlannerError) as error:
        raise PlannerError(
            f"{path} does not hold a device's rates ({error}): delete it to measure them anew."
        ) from error


def rates_path(device: torch.device) -> Path:
    """Where the device's rates are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.environ.get(FOLDER) or os.path.join(cache, "checkpoint-planner")
    threads = f"-{torch.get_num_threads()}-threads" if device.type == "cpu" else ""
    text = f"{_name(device)}{threads}-torch-{TORCH_VERSION}"
    return Path(folder, re.sub(r"[^a-z0-9.]+", "-", text.lower()) + ".json")


def measure_rates(device: torch.device, built_in: Roofline | None = None) -> dict[str, int]:
    """Work per second by name, as `roofline_of` takes it, to two digits; the highest of a few rounds if disturbed."""
    found: dict[str, int] = {}
    with exclusive(), torch.no_grad():
        for _ in range(ROUNDS):
            for name, work, run in _cases(device):
                interrupt_point()
                found[name] = max(found.get(name, 0), _two_digits(work / _shortest(run, device)))
            if built_in is None or not was_disturbed(found, built_in):
                break
    return found


def was_disturbed(rates: Mapping[str, int], built_in: Roofline) -> bool:
    """Whether some rate is far lower than on the built-in device, beside that of random numbers.

    These are drawn by one thread, which has the processor to itself now and then. The threads of another op wait for
    each other, so that on a busy processor each of its runs may take hundreds of times as long. Half precision does not
    count: it is as fast as a processor's instructions for it.
    """
    suffix = f".{BYTES}"
    random = RANDOM + suffix
    usual = {
        name: built_in.bandwidth(name.removesuffix(suffix)) if name.endswith(suffix) else built_in.rate(name)
        for name in rates
        if name != CALLS and not name.endswith("float16")
    }
    return any(FAR * rates[name] * usual[random] < rate * rates[random] for name, rate in usual.items())


def _cases(device: torch.device) -> Iterator[Case]:
    """Products and streams. On a CPU they take well below a millisecond each, so that some run undisturbed."""
    large, generator = device.type != "cpu", torch.Generator(device)
    random = partial(torch.rand, device=device, generator=generator)
    for dtype in DTYPES:
        yield from _products(dtype, large, random)
    rows = 1 << (17 if large else 9)
    x, y, image = random(rows, 512), random(rows, 512), random(32 if large else 1, 64, 56, 56)
    few, weight = x[: rows // 8], torch.ones(64, device=device)
    passed, dropped = 2 * x.nbytes, 9 * few.nbytes // 4  # values in and out; and a mask of a byte for each
    streams: dict[str, tuple[int, Callable[[], Any]]] = {
        COPY: (2 * passed, lambda: (x.clone(), aten.clone.default(y.t(), memory_format=torch.contiguous_format))),
        POINTWISE: (3 * x.nbytes, lambda: aten.mul.Tensor(x, y)),
        REDUCTION: (passed, lambda: aten._softmax.default(x, 1, False)),
        TRANSCENDENTAL: (passed, lambda: aten.exp.default(x)),
        RANDOM: (dropped, lambda: kernels.dropout(few, 0.1, generator)),
        **{name: (passed, partial(getattr(aten, name).default, x)) for name in ("gelu", "silu", "sigmoid", "tanh")},
        "_safe_softmax": (passed, lambda: aten._safe_softmax.default(x, 1)),
        "batch_norm_statistics": (image.nbytes, lambda: kernels.batch_norm_moments(image, 1e-5)),
        "max_pool2d_with_indices": (
            image.nbytes * 7 // 4, lambda: aten.max_pool2d_with_indices.default(image, [3, 3], [2, 2], [1, 1])
        ),
        "avg_pool2d": (image.nbytes * 5 // 4, lambda: aten.avg_pool2d.default(image, [2, 2])),
        "_native_batch_norm_legit_functional": (
            2 * image.nbytes, lambda: aten.native_batch_norm.default(image, weight, weight, None, None, True, 0.1, 1e-5)
        ),
    }  # fmt: skip
    yield from ((f"{name}.{BYTES}", work, run) for name, (work, run) in streams.items())
    yield CALLS, 1, partial(aten.mul.Tensor, weight, weight)


def _products(dtype: str, large: bool, uniform: Callable[..., torch.Tensor]) -> Iterator[Case]:
    def random(*sizes: int) -> torch.Tensor:
        return uniform(*sizes).to(getattr(torch, dtype))

    n, batch, channels, side, length = (8192, 32, 256, 56, 2048) if large else (256, 1, 64, 28, 256)
    a, b, q = random(n, n), random(n, n), random(batch, 4, length, 64)
    image, kernel = random(batch, channels, side, side), random(channels, channels, 3, 3)
    attention = torch.nn.functional.scaled_dot_product_attention
    yield dtype, 2 * n**3, lambda: aten.mm.default(a, b)
    yield f"{ATTENTION}.{dtype}", 2 * 2 * batch * 4 * length**2 * 64, lambda: attention(q, q, q)
    taps = 2 * 9 * channels**2
    yield f"{CONVOLUTION}.{dtype}", taps * batch * side**2, lambda: torch.conv2d(image, kernel, padding=1)


def _shortest(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the shortest of many runs: whatever else the machine does can only add to it."""
    run()
    best, count, end = float("inf"), 0, time.perf_counter() + SECONDS
    while True:
        kind_of(device).synchronize(device)
        start = time.perf_counter()
        run()
        kind_of(device).synchronize(device)
        now = time.perf_counter()
        best = min(best, now - start)
        count += 1
        if now > end and count >= LEAST_RUNS:
            return best


def _two_digits(rate: float) -> int:
    return int(float(f"{rate:.1e}"))


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _store(path: Path, rates: dict[str, int]) -> None:
    """The first of several processes wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"rates": rates}, file, indent=1)
        os.link(name, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(name)
