"""The axiom that the proof rests on, record by record: a kernel has the bits of what its op means.

Arguments are drawn from a wider range than the kernels are for (types, layouts, sizes around the borders of blocks,
values that are not finite); a record's own guard picks those that it promises. Blocks are made small for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from passes.fuse import records
from passes.fuse.fused import Fused, Split
from passes.fuse.meaning import run
from passes.run import kernels
from passes.run._torch import below_autograd
from passes.run.tensors import alone
from tests.zoo.compare import same_bits

aten = torch.ops.aten
Arguments = tuple[Any, ...]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "gaps", "offset", "expanded")
SHAPES = ((3,), (8, 8), (5, 7, 11), (), (0,), (3, 0))
SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 1e-42, 3e38)


@contextmanager
def small_blocks(smallest: int = 64, norm: int = 512) -> Iterator[None]:
    """Make blocks of a few elements, so that small tensors have several."""
    before = kernels.SMALLEST_BLOCK, kernels.NORM_BLOCK
    kernels.SMALLEST_BLOCK, kernels.NORM_BLOCK = smallest, norm
    try:
        yield
    finally:
        kernels.SMALLEST_BLOCK, kernels.NORM_BLOCK = before


def draw(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous", special: bool = False) -> torch.Tensor:
    """A tensor in one of `LAYOUTS` (or channels last), drawn from torch's generator."""
    values = (3 * torch.randn(shape)).to(dtype)
    if special and values.numel():
        for place, value in enumerate(SPECIAL):
            values.view(-1)[(7 * place) % values.numel()] = value
    return laid_out(values, layout)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout."""
    if layout == "channels_last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "gaps" and values.dim():
        wide = values.new_empty((*values.shape[:-1], 2 * values.shape[-1]))
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "offset":
        return torch.cat([values.new_empty(3), values.flatten()])[3:].view(values.shape)
    if layout == "expanded" and values.dim() and values.shape[0]:
        return values[:1].expand(values.shape)
    return values.contiguous()


# Arguments, by the op that they are for -------------------------------------------------------------------------------


def _targets(rows: int, classes: int, ignored: int) -> torch.Tensor:
    target = torch.randint(0, classes, (rows,))
    target[1::3] = ignored
    return laid_out(target, "gaps" if rows == 33 else "contiguous")


def _logits() -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    sizes = ((1, 3), (7, 2), (7, 1), (33, 17), (16, 16), (40, 5), (0, 3))
    for (rows, classes), dtype, layout in itertools.product(sizes, DTYPES, LAYOUTS):
        for reduction, ignored in ((0, -100), (1, 1), (2, 10**6)):
            if ignored != 1 or classes > 1:
                logits = draw((rows, classes), dtype, layout, special=rows == 40)
                yield logits, _targets(rows, classes, ignored), reduction, ignored


def _cross_entropy_backward() -> Iterator[Arguments]:
    for logits, target, reduction, ignored in _logits():
        rows = laid_out(aten._log_softmax.default(logits, 1, False), "transposed" if reduction == 2 else "contiguous")
        weight = torch.rand(rows.shape[1]).to(rows.dtype) if ignored != 1 else None
        loss, total = aten.nll_loss_forward.default(rows, target, weight, reduction, ignored)
        gradient = laid_out(torch.randn_like(loss), "contiguous" if rows.shape[0] == 33 else "expanded")
        yield gradient, rows, target, weight, reduction, ignored, total


def _cross_entropy_logits_backward() -> Iterator[Arguments]:
    for logits, target, reduction, ignored in _logits():
        rows = aten._log_softmax.default(logits, 1, False)
        loss, total = aten.nll_loss_forward.default(rows, target, None, reduction, ignored)
        gradient = laid_out(torch.randn_like(loss), "expanded" if logits.shape[0] == 33 else "contiguous")
        yield gradient, logits, target, reduction, ignored, total


def _embeddings() -> Iterator[Arguments]:
    sizes = ((5, 3), (33, 8), (64, 1), (6, 0))
    for (rows, width), layout, padding in itertools.product(sizes, LAYOUTS, (-1, 0, 1, 2, 4)):
        for dtype, other in (*zip(DTYPES, DTYPES, strict=True), (torch.float64, torch.float32)):
            indices = torch.randint(0, rows, (rows,), dtype=torch.int32 if padding == 0 else torch.int64)
            indices[::2] = indices[0].clone()
            table = draw((rows, width), other, layout, special=width == 8)
            gradient = draw((rows, width), dtype, LAYOUTS[padding], special=padding == 4)
            yield gradient, laid_out(indices, LAYOUTS[padding]), padding, table


def _dropouts() -> Iterator[Arguments]:
    for shape, dtype, layout in itertools.product(SHAPES, DTYPES, LAYOUTS):
        for p in (0.1, 0.5, 1 / 3, 0.9, 0.0, 1.0):
            yield draw(shape, dtype, layout, special=p == 0.5), p


def _masks() -> Iterator[Arguments]:
    kinds = (*DTYPES, torch.int64, torch.bool)
    for shape, dtype, layout, other in itertools.product(SHAPES, kinds, LAYOUTS, LAYOUTS):
        mask = torch.rand(shape) > 0.3
        for bits in (mask, mask.to(torch.float32), mask.to(torch.uint8)):
            yield draw(shape, dtype, layout, special=dtype.is_floating_point), laid_out(bits, other)
    yield draw((8, 8), torch.float32), torch.rand(8) > 0.3


def _sums() -> Iterator[Arguments]:
    layouts = (*LAYOUTS, "channels_last")
    for shape, layout, other in itertools.product((*SHAPES, (2, 3, 4, 5)), layouts, layouts):
        for first, second in (*zip(DTYPES, DTYPES, strict=True), (torch.float32, torch.float64),
                              (torch.bfloat16, torch.float32)):  # fmt: skip
            yield draw(shape, first, layout, special=True), draw(shape, second, other)
    yield draw((8, 8), torch.float32), draw((8,), torch.float32)
    yield draw((8,), torch.float32), draw((8, 8), torch.float32)


NORMED = ((4, 3, 5, 5), (3, 7, 9), (2, 3, 4, 5, 3), (16, 10), (1, 5, 6, 7))


def _normed() -> Iterator[Arguments]:
    """What a batch norm's parts are handed: it is split only where everything is contiguous."""
    for shape, dtype, affine in itertools.product(NORMED, DTYPES[:2], (True, False)):
        values = draw(shape, dtype, special=shape[0] == 1)
        weight, bias = (torch.randn(shape[1], dtype=dtype) if affine else None for _ in range(2))
        _, mean, invstd = aten._native_batch_norm_legit.no_stats(values, weight, bias, True, 0.1, 1e-5)
        yield values, weight, bias, mean, invstd


def _normed_and_added() -> Iterator[Arguments]:
    for arguments in _normed():
        values = arguments[0]
        for dtype, layout in itertools.product(DTYPES[:3], (*LAYOUTS, "channels_last")):
            yield *arguments, draw(tuple(values.shape), dtype, layout)
        yield *arguments, draw((1, *values.shape[1:]), values.dtype)


def _affine() -> Iterator[Arguments]:
    layouts = (*LAYOUTS, "channels_last")
    for shape, dtype, layout, other in itertools.product(NORMED, DTYPES[:3], layouts, (None, "contiguous", "gaps")):
        values = draw(shape, dtype, layout, special=shape[0] == 1)
        weight, bias = (None if other is None else draw((shape[1],), dtype, other) for _ in range(2))
        yield values, weight, bias


def _whole_norms() -> Iterator[Arguments]:
    for values, weight, bias in _affine():
        for training, kind in itertools.product((True, False), (values.dtype, torch.float32)):
            running = torch.randn(values.shape[1], dtype=kind), torch.rand(values.shape[1], dtype=kind)
            yield values, weight, bias, *running, training, 0.3, 1e-3


def _whole_norms_alone() -> Iterator[Arguments]:
    return ((*arguments, True, 0.1, 1e-5) for arguments in _affine())


def _convolutions() -> Iterator[Arguments]:
    sizes = ((2, 4, 4, (9,), 3, 1, 1, False), (2, 4, 6, (8, 8), 3, 2, 1, False), (2, 4, 4, (7, 7), 3, 1, 4, False),
             (2, 6, 4, (5, 5), 2, 2, 1, True), (1, 2, 4, (5, 5, 5), 2, 1, 1, False))  # fmt: skip
    masks = ([True, True, True], [True, True, False], [True, False, False], [False, True, True])
    for size, dtype, layout, mask in itertools.product(sizes, DTYPES[:3], (*LAYOUTS, "channels_last"), masks):
        batch, inside, outside, space, width, stride, groups, transposed = size
        n, channels = len(space), (inside, outside // groups) if transposed else (outside, inside // groups)
        values = draw((batch, inside, *space), dtype, layout)
        weight = draw((*channels, *[width] * n), dtype)
        settings = ([stride] * n, [0] * n, [1] * n, transposed, [0] * n, groups)
        gradient = torch.randn_like(aten.convolution.default(values, weight, None, *settings))
        yield gradient, values, weight, [outside], *settings, mask


CASES: dict[str, Callable[[], Iterator[Arguments]]] = {
    "cross_entropy": _logits,
    "cross_entropy_backward": _cross_entropy_backward,
    "cross_entropy_logits_backward": _cross_entropy_logits_backward,
    "embedding_backward_add": _embeddings,
    "dropout": _dropouts,
    "mul_mask": _masks,
    "add_relu": _sums,
    "batch_norm_relu": _normed,
    "batch_norm_add_relu": _normed_and_added,
}
SPLIT_CASES: dict[Any, Callable[[], Iterator[Arguments]]] = {
    records.WITH_RUNNING: _whole_norms,
    records.ALONE: _whole_norms_alone,
    records.CONVOLUTION_BACKWARD: _convolutions,
}


# Judging ------------------------------------------------------------------------------------------------------------


def wrong(fused: Fused, cases: list[Arguments] | None = None) -> str:
    """What the record says and its kernel does not do; "" for a record that holds."""
    used: dict[Any, int] = dict.fromkeys((None, *fused.donates), 0)
    for arguments in CASES[fused.name]() if cases is None else cases:
        if not fused.takes(*arguments):
            continue
        try:
            expected = _outcome(lambda a=arguments: run(fused.meaning(*a)))  # type: ignore[misc]
        except Exception:  # noqa: BLE001 - torch refuses such arguments, or a damaged meaning raises
            if _runs(lambda a=arguments: fused.kernel(*a)):  # type: ignore[misc]
                return f"{fused.name}: its meaning does not run on {_described(arguments)}"
            continue
        for position in used:
            found = _found(fused, arguments, position, expected)
            used[position] += found is not None
            if found is False:
                return f"{fused.name}, written over {position}: other bits for {_described(arguments)}"
    return "".join(f"{fused.name}: no case for {position}; " for position, count in used.items() if not count)


def _found(fused: Fused, arguments: Arguments, position: int | None, expected: Any) -> bool | None:
    """Whether the kernel has the expected bits, in the donated memory; None where the argument could not take them."""
    given = [alone(a.clone()) if isinstance(a, torch.Tensor) and i == position else a for i, a in enumerate(arguments)]
    if position is None:
        return _agree(expected, lambda: fused.kernel(*arguments))
    donated, result = given[position], expected[0]
    fits = isinstance(donated, torch.Tensor) and (donated.shape, donated.dtype, donated.stride()) == (
        result.shape, result.dtype, result.stride()
    )  # fmt: skip
    if not fits or fused.written is None:
        return None
    arguments, address = tuple(given), donated.data_ptr()
    given.clear()
    taken: list[torch.Tensor] = []
    held = _agree(expected, lambda: taken.append(fused.kernel(*arguments, **{str(fused.written): donated})) or taken[0])
    return (held and taken[0].data_ptr() == address) or (held and fused.checks_owner)


def _outcome(compute: Callable[[], Any]) -> tuple[Any, ...]:
    """Results, and the generator's state after them."""
    torch.manual_seed(5)
    with below_autograd():
        results = compute()
    return (*(results if isinstance(results, tuple) else (results,)), torch.get_rng_state())


def _runs(compute: Callable[[], Any]) -> bool:
    try:
        _outcome(compute)
    except Exception:  # noqa: BLE001 - whatever a kernel raises
        return False
    return True


def _agree(expected: tuple[Any, ...], compute: Callable[[], Any]) -> bool:
    try:
        got = _outcome(compute)
    except Exception:  # noqa: BLE001 - whatever a damaged kernel raises
        return False
    return len(got) == len(expected) and all(
        a.stride() == b.stride() and _same(a, b) for a, b in zip(expected, got, strict=True)
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, any NaN for any other: which one a kernel writes depends on where its vectors end."""
    return same_bits(*(t.masked_fill(t.isnan(), float("nan")) if t.is_floating_point() else t for t in (a, b)))


def wrong_split(split: Split) -> str:
    """What the record of a split says and the parts do not do; "" for one that holds."""
    used = 0
    for arguments in SPLIT_CASES[split.op]():
        if not split.when(*arguments):
            continue
        used += 1
        with below_autograd():
            whole = split.op(*arguments)
            known: dict[Any, Any] = {}
            try:
                parts = [run(part, known) for part in split.parts(*arguments)]
            except Exception:  # noqa: BLE001 - whatever a damaged split raises
                return f"{split.op} cannot be split for {_described(arguments)}"
        mask = arguments[records.MASK] if split.op is records.CONVOLUTION_BACKWARD else [True] * len(whole)
        for wanted, a, b in zip(mask, whole, parts, strict=True):
            if wanted and not (a.stride() == b.stride() and _same(a, b)):
                return f"{split.op}: other bits for {_described(arguments)}"
    return "" if used else f"{split.op}: no case"


def _described(arguments: Arguments) -> str:
    return ", ".join(
        f"{a.dtype} {tuple(a.shape)} {a.stride()}" if isinstance(a, torch.Tensor) else repr(a) for a in arguments
    )
