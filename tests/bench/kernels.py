"""`python -m tests.bench.kernels`: the kernels of `passes.run.kernels` against what they stand for, taking turns.

Time is a ratio of medians, each run after 8 MiB of other memory was written, with the allocator told to keep what is
freed; memory is the highest point above the arguments.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from passes.memory import measure_peak
from passes.one_op import OTHERS_BYTES
from passes.run import kernels
from tests.bench.predicted import keep_freed_memory

aten = torch.ops.aten
MIB = 1 << 20
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """What a kernel of ours stands for, and the kernel."""

    name: str
    shape: tuple[int, ...]
    theirs: Run
    ours: Run


def loss_backward(rows: int, classes: int) -> Case:
    scores = aten._log_softmax.default(torch.randn(rows, classes), 1, False)
    target, weight = torch.randint(0, classes, (rows,)), torch.tensor(float(rows))
    arguments: Any = (torch.ones(()), scores, target, None, 1, -100, weight)

    def theirs() -> torch.Tensor:
        return aten._log_softmax_backward_data.default(
            aten.nll_loss_backward.default(*arguments), scores, 1, torch.float32
        )

    return Case("cross-entropy's backward", (rows, classes), theirs, lambda: kernels.cross_entropy_backward(*arguments))


def tied_embedding(vocabulary: int, width: int, tokens: int) -> Case:
    other, gradient = torch.randn(vocabulary, width), torch.randn(tokens, width)
    indices = torch.randint(0, vocabulary, (tokens,))
    return Case(
        "tied embedding's gradient", (vocabulary, width),
        lambda: other + aten.embedding_dense_backward.default(gradient, indices, vocabulary, -1, False),
        lambda: kernels.embedding_backward_add(gradient, indices, -1, other),
    )  # fmt: skip


def dropout(*shape: int) -> Case:
    values = torch.randn(shape)
    return Case(
        "dropout", shape, lambda: aten.native_dropout.default(values, 0.1, True), lambda: kernels.dropout(values, 0.1)
    )


def sum_and_relu(*shape: int) -> Case:
    a, b = torch.randn(shape), torch.randn(shape)
    return Case("sum and relu", shape, lambda: (a + b).relu_(), lambda: kernels.add_relu(a, b))


def batch_norm_again(*shape: int) -> Case:
    values, weight, bias = torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])
    _, mean, invstd = aten._native_batch_norm_legit.no_stats(values, weight, bias, True, 0.1, 1e-5)
    return Case(
        "batch norm and relu, again", shape,
        lambda: aten._native_batch_norm_legit.no_stats(values, weight, bias, True, 0.1, 1e-5)[0].relu_(),
        lambda: kernels.batch_norm_relu(values, weight, bias, mean, invstd),
    )  # fmt: skip


def cases() -> list[Case]:
    torch.manual_seed(0)
    return [
        loss_backward(1024, 5000), loss_backward(512, 32000), tied_embedding(8192, 384, 512), dropout(512, 1536),
        sum_and_relu(4, 256, 56, 56), batch_norm_again(4, 64, 112, 112), batch_norm_again(4, 256, 56, 56),
        batch_norm_again(1, 32, 64, 64, 64),
    ]  # fmt: skip


def seconds(case: Case, rounds: int) -> tuple[float, float]:
    """Medians, `(theirs, ours)`."""
    others = torch.empty(OTHERS_BYTES, dtype=torch.uint8)
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for run, times in zip((case.theirs, case.ours), taken, strict=True):
            others.zero_()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    theirs, ours = (statistics.median(t[1:]) for t in taken)
    return theirs, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    keep_freed_memory()
    table = Table("kernel", "shape", "ms, ATen", "ms, ours", "ratio", "MiB, ATen", "MiB, ours")
    for case in cases():
        theirs, ours = seconds(case, options.rounds)
        peaks = (f"{measure_peak(run) / MIB:.1f}" for run in (case.theirs, case.ours))
        times = f"{theirs * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{ours / theirs:.2f}"
        table.add_row(case.name, str(case.shape), *times, *peaks)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
