"""torch's own databases keep the promises: a slice in the default run, all of it behind `-m slow`."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from tests.databases import cases as databases
from tests.databases.cases import DTYPES, FORMS, Case, cases
from tests.databases.check import BAD, check
from tests.databases.routes import rerouted

EVERY = 61  # of the databases' names, in the default run
# One of each class that was once wrong, refused or above its prediction.
ONCE_BAD = (
    "prod", "max.reduction_no_dim", "nanmedian", "masked_fill", "cumprod", "linalg.inv", "linalg.cholesky",
    "linalg.eigvals", "lu_solve", "cov", "combinations", "complex", "nn.functional.rrelu", "nn.functional.ctc_loss",
    "sgn",
)  # fmt: skip


def test_a_slice() -> None:
    names = sorted({op.name for op in databases.op_db} | {info.name for info in databases.module_db})[::EVERY]
    chosen = (case for name in names for case in itertools.islice(cases(torch.float32, names=[name]), 4))
    verdicts = [expect_no_bad(case) for case in chosen]
    assert verdicts.count("equal") > len(verdicts) // 2


@pytest.mark.parametrize("name", ONCE_BAD)
def test_what_was_once_bad(name: str) -> None:
    for case in cases(torch.float32, names=[name]):
        assert expect_no_bad(case) in ("equal", "skipped")


@pytest.mark.parametrize("index", range(4), ids=["padded", "padded, tensors", "joined", "joined, tensors"])
def test_ctc(index: int) -> None:
    """Lengths as numbers or tensors, targets padded or one after another."""
    found = list(cases(torch.float32, names=["nn.CTCLoss"]))
    assert expect_no_bad(found[index]) == "equal"


@pytest.mark.parametrize("name", ["mul", "div.no_rounding_mode", "fft.rfft", "prod", "linalg.cholesky", "linalg.inv"])
def test_complex_numbers(name: str) -> None:
    for case in cases(torch.complex64, names=[name]):
        assert expect_no_bad(case) in ("equal", "skipped")


@pytest.mark.parametrize("index", [60, 215])
def test_a_smoothed_cross_entropy_with_weights_and_ignored_targets(index: int) -> None:
    if not hasattr(torch.nn, "LinearCrossEntropyLoss"):
        pytest.skip("this release of torch does not have it")
    found = cases(torch.float32, ("inside",), names=["nn.LinearCrossEntropyLoss"])
    assert expect_no_bad(next(itertools.islice(found, index, None))) == "equal"


def test_numbers_of_sixteen_bits() -> None:
    """`mul_` rounds a number first, `mul` does not."""
    for case in cases(torch.bfloat16, names=["log2"]):
        assert expect_no_bad(case) == "equal"


def expect_no_bad(case: Case) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = check(case)
    assert result.verdict not in BAD, f"{result.name} is {result.verdict}: {result.detail}"
    return result.verdict


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_all(dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [check(case) for case in cases(DTYPES[dtype], FORMS)]
    bad = BAD if dtype == "float32" else ("wrong",)
    assert [f"{r.verdict} {r.name}: {r.detail}" for r in results if r.verdict in bad] == []
    if dtype == "float32":
        tried = [r for r in results if r.verdict != "skipped"]
        assert sum(r.verdict == "refused" for r in tried) <= 0.02 * len(tried)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_every_op_that_a_mode_reroutes_is_equal_when_planned(dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = sorted({name.partition("[")[0] for name, _ in rerouted(DTYPES[dtype], 6, [])})
        assert {"prod", "masked_fill"} <= set(names)
        results = [check(case) for case in cases(DTYPES[dtype], samples=6, names=names, modules=False)]
    assert [f"{r.verdict} {r.name}: {r.detail}" for r in results if r.verdict in BAD] == []
