"""`python -m tests.databases.routes`: ops that eager differentiates along another formula than a trace does.

ATen asks whether any dispatch mode is active (`isTensorSubclassLike`) and then avoids what reads values, so the plain
step under an empty mode shows the formulas that a trace would take. Each sample runs as it is, with zeros among its
values, with its matrices in columns, and with gradients that are not finite. Prints what has other bits, or gradients
in other strides; `passes.trace.routes` lists the ops. With `--autocast bfloat16`: ops whose kernels call others that
autocast casts, which it does in eager and not in a planned step, whose kernels run without it, as under a mode.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.databases.cases import DTYPES, cases
from tests.databases.check import plain_step, run
from tests.zoo.compare import StepResult, same_bits

REPEATS = 3  # kernels that differ from themselves (by where memory lies) are none of ours


class Empty(TorchDispatchMode):
    """Does nothing, and is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def cast_within(cast: torch.dtype, samples: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """`(sample, what differs)` of each sample that autocast to `cast` reaches within a kernel."""
    for case in cases(torch.float32, ("outside",), samples, names, modules=True):
        try:
            step = case.make()
            with Empty():
                _, other_gradients = plain_step(step)
                rerouted_step = run(step, step, other_gradients)
            other = run(step, step, other_gradients)
            with torch.autocast("cpu", dtype=cast):
                _, gradients = plain_step(step)
                plain = [run(step, step, gradients) for _ in range(REPEATS)]
                with Empty():
                    traced = run(step, step, gradients)
        except Exception:  # noqa: BLE001 - not a sample for training under autocast
            continue
        found = _differences(plain[0], traced)
        if found and not _differences(other, rerouted_step) and not any(_differences(plain[0], p) for p in plain[1:]):
            yield case.name, ", ".join(found)


def rerouted(dtype: torch.dtype, samples: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """`(sample, what differs)` of each sample that does."""
    for case in cases(dtype, ("outside",), samples, names, modules=False):
        for variant in ("as it is", "zeros", "columns", "not finite"):
            try:
                step = case.make()
                came: dict[int, Any] = {}
                for i, parameter in enumerate(step.parameter_list):
                    _vary(parameter, variant)
                    parameter.register_hook(partial(_note_strides, came, i))
                _, gradients = plain_step(step)
                if variant == "not finite":
                    gradients = [torch.full_like(g, torch.inf) for g in gradients]
                plain = [run(step, step, gradients) for _ in range(REPEATS)]
            except Exception:  # noqa: BLE001 - not a sample for training
                continue
            strides = dict(came)
            with Empty():
                traced = run(step, step, gradients)
            found = _differences(plain[0], traced) + [f"strides {i}" for i in came if came[i] != strides[i]]
            if found and not any(_differences(plain[0], p) for p in plain[1:]):
                yield case.name, f"{variant}: {', '.join(found)}"


def _vary(parameter: nn.Parameter, variant: str) -> None:
    if variant == "zeros":
        parameter.data.view(-1)[::3] = 0
    elif variant == "columns" and parameter.dim() > 1:
        parameter.data = parameter.data.mT.contiguous().mT


def _note_strides(came: dict[int, Any], position: int, gradient: torch.Tensor) -> None:
    """Those of dimensions that have several indices; an empty gradient has none."""
    pairs = zip(gradient.shape, gradient.stride(), strict=True)
    came[position] = [stride for size, stride in pairs if size > 1] if gradient.numel() else []


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
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="look for kernels that autocast reaches")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.autocast:
        found = list(cast_within(getattr(torch, options.autocast), options.samples, options.names))
    else:
        found = list(rerouted(DTYPES[options.dtype], options.samples, options.names))
    for name, what in found:
        print(f"{name}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
