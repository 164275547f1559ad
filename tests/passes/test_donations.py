"""Every op that may write over an argument gives the bits of its functional form, in that argument's own memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes.fuse.fused import LIBRARY
from passes.memory import measure_peak
from passes.ops import DONATIONS, ROWWISE
from passes.run._torch import below_autograd

SHAPES = ((3,), (7, 33), (4, 5, 129), (2, 8, 9, 64))
CASES = [
    (op, position) for op, twins in DONATIONS.items() for position in twins
    if op.namespace != LIBRARY.ns  # tests/passes/test_fused.py
]  # fmt: skip


def arguments(op: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    """Valid arguments for `op`, tensors first drawn and in range for every kernel of the table."""
    generator = torch.Generator().manual_seed(sum(shape))
    values: list[Any] = []
    for argument in op._schema.arguments:
        kind, name = str(argument.type), argument.name
        if kind == "Tensor":
            drawn = (torch.rand(shape, generator=generator) * 1.5 + 0.25).to(dtype)
            values.append(drawn > 1 if name in ("condition", "mask") else drawn)
        elif name == "dim":
            values.append(-1)
        elif name == "input_dtype":
            values.append(dtype)
        elif argument.has_default_value():
            if argument.kwarg_only:
                continue
            values.append(argument.default_value if name != "min" else 0.5)
        else:
            values.append(False if kind == "bool" else 0.75)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "position"), CASES, ids=[f"{op}-{position}" for op, position in CASES])
def test_the_twin_writes_the_same_bits_into_the_argument(op: Any, position: int, dtype: torch.dtype) -> None:
    twin = DONATIONS[op][position]
    for shape in SHAPES:
        for layout in ("rows", "channels_last"):
            values = arguments(op, shape, dtype)
            if layout == "channels_last":
                if len(shape) != 4 or op in ROWWISE:
                    continue
                last = torch.channels_last
                values = [v.to(memory_format=last) if isinstance(v, torch.Tensor) else v for v in values]
            with below_autograd():
                expected = op(*values)
                assert expected.dtype is dtype
                if layout != "rows" and expected.stride() != values[position].stride():
                    continue  # the planner lets only a result of the same layout take over (masked_fill has another)
                memory = values[position].data_ptr()
                result = twin.target(*values, **({twin.out: values[position]} if twin.out else {}))
            assert result.data_ptr() == memory
            assert torch.equal(result, expected)


@pytest.mark.parametrize(("op", "position"), CASES, ids=[f"{op}-{position}" for op, position in CASES])
def test_the_twin_allocates_nothing(op: Any, position: int) -> None:
    """Workspace is measured on the functional form, so the twin must do without its result and need no more besides."""
    twin = DONATIONS[op][position]
    values = arguments(op, (64, 1024), torch.float32)
    keywords = {twin.out: values[position]} if twin.out else {}
    with below_autograd():
        functional = measure_peak(lambda: op(*values))
        in_place = measure_peak(lambda: twin.target(*values, **keywords))
    assert in_place <= functional - 64 * 1024 * 4
