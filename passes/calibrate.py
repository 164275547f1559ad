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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from solvers.errors import PlannerError

from .device import kind_of
from .exclusive import exclusive, interrupt_point
from .op_class import ATTENTION, CONVOLUTION, COPY, POINTWISE, RANDOM, REDUCTION, TRANSCENDENTAL
from .roofline import BYTES, CALLS, Roofline, roofline_of

aten = torch.ops.aten
FOLDER = "CHECKPOINT_PLANNER_CACHE"
SECONDS = 0.15  # for each rate, after the first runs
DTYPES = ("float32", "bfloat16", "float16", "float64")
Case = tuple[str, int, Callable[[], Any]]  # the rate's name, FLOPs or bytes or calls of a run, and the run


def calibrated(device: torch.device) -> Roofline:
    """The device's rates from its file; measured and stored if there is none yet.

    Raises:
        PlannerError: the file holds something else.
    """
    path = rates_path(device)
    if not path.exists():
        found = measure_rates(device)
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
    text = f"{_name(device)}{threads}-torch-{torch.__version__}"
    return Path(folder, re.sub(r"[^a-z0-9.]+", "-", text.lower()) + ".json")


def measure_rates(device: torch.device) -> dict[str, int]:
    """Work per second by name, as `roofline_of` takes it, to two digits."""
    found = {}
    with exclusive(), torch.no_grad():
        for name, work, run in _cases(device):
            interrupt_point()
            found[name] = _two_digits(work / _shortest(run, device))
    return found


def _cases(device: torch.device) -> Iterator[Case]:
    """Products of some size, and streams through memory that is larger than a core's own cache."""
    large = device.type != "cpu"
    n, elements = (8192, 1 << 26) if large else (512, 1 << 21)
    for dtype in DTYPES:
        yield from _products(dtype, n, large, device)
    x, y = (torch.rand(elements // 512, 512, device=device) for _ in range(2))
    size = x.nbytes
    generator = torch.Generator(device)
    yield f"{COPY}.{BYTES}", 2 * size, lambda: x.clone()
    yield f"{POINTWISE}.{BYTES}", 3 * size, lambda: aten.mul.Tensor(x, y)
    yield f"{REDUCTION}.{BYTES}", 2 * size, lambda: aten.native_layer_norm.default(x, [512], None, None, 1e-5)
    yield f"{TRANSCENDENTAL}.{BYTES}", 2 * size, lambda: aten.gelu.default(x)
    masked = size * 9 // 4  # values in and out, and a mask of a byte for each
    yield f"{RANDOM}.{BYTES}", masked, lambda: (x.gt(0).bernoulli_(0.9, generator=generator), x.clone())
    small = torch.rand(8, device=device)
    yield CALLS, 1, lambda: aten.mul.Tensor(small, small)


def _products(dtype: str, n: int, large: bool, device: torch.device) -> Iterator[Case]:
    def random(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, device=device).to(getattr(torch, dtype))

    a, b = random(n, n), random(n, n)
    yield dtype, 2 * n**3, lambda: aten.mm.default(a, b)
    batch, channels, side, length = (32, 256, 56, 2048) if large else (2, 64, 56, 512)
    image, kernel = random(batch, channels, side, side), random(channels, channels, 3, 3)
    flops = 2 * batch * channels * channels * 9 * side * side
    sizes: Any = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    yield f"{CONVOLUTION}.{dtype}", flops, lambda: aten.convolution.default(image, kernel, None, *sizes)
    q = random(2, 6, length, 64)
    attention = torch.nn.functional.scaled_dot_product_attention
    yield f"{ATTENTION}.{dtype}", 2 * 2 * 6 * length * length * 64 * 2, lambda: attention(q, q, q)


def _shortest(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the shortest of many runs: whatever else the machine does can only add to it."""
    run()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while True:
        kind_of(device).synchronize(device)
        start = time.perf_counter()
        run()
        kind_of(device).synchronize(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
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
