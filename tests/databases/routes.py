"""`python -m tests.databases.routes`: ops that eager differentiates along another formula than a trace does.

ATen asks whether any dispatch mode is active (`isTensorSubclassLike`) and then avoids what reads values, so the plain
step under an empty mode shows the formulas that a trace would take. Each sample runs as it is, with zeros among its
values, and with gradients that are not finite. Exits with 1 where one differs that `passes.trace.routes` does not list.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.databases.cases import DTYPES, cases
from tests.databases.check import plain_step, run
from tests.zoo.compare import StepResult, same_bits

REPEATS = 3  # kernels that differ from themselves (by where memory lies) are none of ours


class Empty(TorchDispatchMode):
    """Does nothing, and is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def rerouted(dtype: torch.dtype, samples: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """`(sample, what differs)` of each sample that does."""
    for case in cases(dtype, ("outside",), samples, names, modules=False):
        for variant in ("as it is", "zeros", "not finite"):
            try:
                step = case.make()
                with torch.no_grad():
                    if variant == "zeros":
                        for parameter in step.parameter_list:
                            parameter.view(-1)[::3] = 0
                _, gradients = plain_step(step)
                if variant == "not finite":
                    gradients = [torch.full_like(g, torch.inf) for g in gradients]
                plain = [run(step, step, gradients) for _ in range(REPEATS)]
            except Exception:  # noqa: BLE001 - not a sample for training
                continue
            with Empty():
                traced = run(step, step, gradients)
            found = _differences(plain[0], traced)
            if found and not any(_differences(plain[0], p) for p in plain[1:]):
                yield case.name, f"{variant}: {', '.join(found)}"


def _differences(plain: StepResult, other: StepResult) -> list[str]:
    pairs = enumerate(zip(plain.outputs, other.outputs, strict=True))
    found = [f"output {i}" for i, (a, b) in pairs if not _same(a, b)]
    return found + [f"gradient {n}" for n, g in plain.gradients.items() if not _same(g, other.gradients[n])]


def _same(a: Any, b: Any) -> bool:
    """Whether two tensors have the same bits, any NaN being like any other."""
    if a is None or b is None or a.is_complex():
        return same_bits(a, b) or (a is not None and b is not None and torch.equal(a.nan_to_num(7), b.nan_to_num(7)))
    return same_bits(a, b) or (a.shape == b.shape and same_bits(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)))


def main() -> int:
    """Print each sample that differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--samples", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = list(rerouted(DTYPES[options.dtype], options.samples, options.names))
    for name, what in found:
        print(f"{name}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
