"""Two steps of an exported folder, for an interpreter that has torch and safetensors only.

`python train_exported.py FOLDER GIVEN.pt RESULT.pt`: reads the sample as `(args, kwargs)`, writes gradients, buffers,
state_dict keys, the generator's state after the first step, and the second step's peak in bytes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GRANULE = 64
LIBRARY = ("planner", "passes", "solvers", "tests", "transformers", "monai")


class Blocked:
    """Fails the import of anything that an exported folder must do without."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in LIBRARY:
            raise ImportError(f"{name} is not to be imported")


def loss_of(out: Any) -> torch.Tensor:
    if isinstance(out, dict):
        return out["loss"]
    return out[0] if isinstance(out, tuple) else out if out.dim() == 0 else out.float().pow(2).mean()


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes of the highest point above the start, each allocation rounded as the library predicts it."""
    config = torch.autograd.ProfilerConfig(
        torch.autograd.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    torch.autograd._enable_profiler_legacy(config)
    run()
    level = peak = 0
    for event in (e for thread in torch.autograd._disable_profiler_legacy() for e in thread):
        if event.kind() == "memory_alloc":
            change = event.cpu_memory_usage()
            level += -(-abs(change) // GRANULE) * GRANULE * (1 if change > 0 else -1)
            peak = max(peak, level)
    return peak


def main(folder: str, given: str, result: str) -> None:
    sys.meta_path.insert(0, Blocked())
    sys.path.insert(0, str(Path(folder).parent))
    args, kwargs = torch.load(given)
    module = importlib.import_module(Path(folder).name).load()
    kept: list[Any] = []

    def step() -> None:
        kept.append(module(*args, **kwargs))
        loss_of(kept[-1]).backward()

    torch.manual_seed(1)
    step()
    found = {
        "gradients": {n: p.grad for n, p in module.named_parameters()},
        "buffers": {n: b.clone() for n, b in module.named_buffers()},
        "keys": list(module.state_dict()),
        "random": torch.get_rng_state(),
    }
    kept.clear()
    module.zero_grad(set_to_none=True)
    torch.save({**found, "peak": peak_of(step), "imported": sorted(sys.modules)}, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
