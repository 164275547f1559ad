"""What the proof takes as given, and that damage to it or to the rules that rest on it does not go unnoticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from passes.errors import VerificationError
from passes.fuse import match, records
from passes.fuse.fused import Fused, Split
from passes.fuse.normal_form import COMMUTES, DIMENSION, SAME, SCATTERS, is_copied_over
from passes.memory import measure_peak
from passes.ops import ignored_by
from passes.run import kernels
from passes.run._torch import below_autograd
from planner import auto_checkpoint
from tests.passes import damaged_rules
from tests.passes.registry import CASES, DTYPES, NORMED, draw, small_blocks, wrong, wrong_split
from tests.zoo.compare import same_bits

aten = torch.ops.aten
MEANT = [fused for fused in records.FUSED if fused.meaning]
BLOCKS = [(64, 512), (1, 1), (5000, 5000), (kernels.SMALLEST_BLOCK, kernels.NORM_BLOCK)]


@pytest.mark.every(3)  # each kernel with some of the blocks
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("fused", MEANT, ids=lambda fused: fused.name)
def test_a_kernel_has_the_bits_of_its_meaning(fused: Fused, blocks: tuple[int, int]) -> None:
    torch.manual_seed(0)
    with small_blocks(*blocks):
        assert wrong(fused) == ""


@pytest.mark.parametrize("blocks", BLOCKS[:2], ids=str)
@pytest.mark.parametrize("split", records.SPLITS, ids=lambda split: str(split.op))
def test_parts_have_the_bits_of_the_whole(split: Split, blocks: tuple[int, int]) -> None:
    torch.manual_seed(0)
    with small_blocks(*blocks):
        assert wrong_split(split) == ""


LARGE: dict[str, tuple[Any, ...]] = {
    "mul_mask": (torch.randn(40, 300, 77), torch.rand(40, 300, 77) > 0.1),
    "add_relu": (torch.randn(4, 64, 57, 59), torch.randn(4, 64, 57, 59)),
    "dropout": (torch.randn(40, 300, 77), 0.1),
    "embedding_backward_add": (torch.randn(4, 60, 64), torch.randint(0, 40000, (4, 60)), 7, torch.randn(40000, 64)),
    "cross_entropy": (torch.randn(33, 32001), torch.randint(0, 32001, (33,)), 1, -100),
}


@pytest.mark.parametrize("fused", [f for f in MEANT if f.name in LARGE], ids=lambda fused: fused.name)
def test_so_it_has_at_the_size_of_its_blocks(fused: Fused) -> None:
    bare = Fused(**{**fused.__dict__, "donates": ()})
    assert wrong(bare, [LARGE[fused.name]]) == ""


@pytest.mark.parametrize("fused", records.FUSED, ids=lambda fused: fused.name)
def test_an_op_runs_its_own_kernel(fused: Fused) -> None:
    """In both its forms; what `exports` call is the kernel itself."""
    assert fused.kernel is getattr(kernels, fused.name)
    if not fused.meaning:
        return
    arguments = next(a for a in CASES[fused.name]() if fused.takes(*a))
    with below_autograd():
        torch.manual_seed(1)
        expected = fused.kernel(*arguments)
        torch.manual_seed(1)
        found = fused.op(*arguments)
        pairs = zip(expected, found, strict=True) if isinstance(found, tuple) else [(expected, found)]
        assert all(same_bits(a, b) for a, b in pairs)
        for overload in fused.overloads[1:]:
            given = arguments[fused.donates[0]].clone()
            assert same_bits(expected, overload(*arguments, **{str(fused.written): given}))


@pytest.mark.parametrize("shape", NORMED, ids=str)
@pytest.mark.parametrize("target", [records.WITH_RUNNING, records.BATCH_NORM_STATISTICS.op], ids=str)
def test_results_do_not_depend_on_what_they_ignore(target: Any, shape: tuple[int, ...]) -> None:
    values, running = draw(shape, torch.float32), [torch.rand(shape[1]) for _ in range(2)]
    given: tuple[Any, ...] = (values, *running, 0.3, 1e-3)
    if target is records.WITH_RUNNING:
        given = (values, None, None, *running, True, 0.3, 1e-3)
    rule = ignored_by(target, given)
    assert rule is not None and rule.results is not None
    other = [torch.full_like(a, float("nan")) if i in rule.positions else a for i, a in enumerate(given)]
    expected, found = target(*given), target(*other)
    assert all(same_bits(a, b) == (i in rule.results) for i, (a, b) in enumerate(zip(expected, found, strict=True)))


def test_a_backward_in_training_ignores_the_running_statistics() -> None:
    values, gradient = (draw((4, 3, 5, 5), torch.float32) for _ in range(2))
    _, mean, invstd = aten._native_batch_norm_legit.no_stats(values, None, None, True, 0.1, 1e-5)
    target, found = aten.native_batch_norm_backward.default, []
    for running in (torch.zeros(3), torch.full((3,), float("nan"))):
        given = (gradient, values, torch.ones(3), running, running, mean, invstd, True, 1e-5, [True] * 3)
        assert ignored_by(target, given) is not None
        found.append(target(*given))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    assert ignored_by(target, (*given[:7], False, *given[8:])) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", sorted(COMMUTES, key=str), ids=str)
def test_operands_may_change_places(target: Any, dtype: torch.dtype) -> None:
    for shape in ((3,), (9, 16), (4, 33)):
        first, second = draw(shape, dtype, special=True), draw(shape, dtype)
        assert same_bits(target(first, second), target(second, first))
    bits = torch.rand(4, 33) > 0.5
    assert same_bits(target(second, bits), target(bits, second))


def test_a_dimension_may_be_counted_from_the_end() -> None:
    values = draw((5, 7), torch.float32)
    rows = aten._log_softmax.default(values, 1, False)
    given = {aten._log_softmax.default: (values, 1, False), aten._log_softmax_backward_data.default:
             (values, rows, 1, torch.float32)}  # fmt: skip
    for target, place in DIMENSION.items():
        arguments = list(given[target])
        expected = target(*arguments)
        arguments[place] -= 2
        assert same_bits(expected, target(*arguments))


def test_the_same_value_is_the_same_memory() -> None:
    values = draw((5, 7), torch.float32, "gaps")
    for target in SAME:
        found = target(values)
        assert found.data_ptr() == values.data_ptr() and found.stride() == values.stride()


PARTS: dict[Any, tuple[Any, ...]] = {
    aten.select_scatter.default: (1, 3), aten.slice_scatter.default: (0, 2, 7, 2),
    aten.diagonal_scatter.default: (1, 0, 1), aten.as_strided_scatter.default: ((3, 4), (7, 2), 5),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", sorted(SCATTERS, key=str), ids=str)
def test_a_scatter_takes_the_values_of_what_was_copied_over_its_part(target: Any, dtype: torch.dtype) -> None:
    whole = draw((9, 7), dtype, special=True)
    part = getattr(aten, target.overloadpacket.__name__.removesuffix("_scatter"))(whole, *PARTS[target])
    for kind in ("contiguous", "gaps"):
        given = draw(tuple(part.shape), dtype, kind, special=True)
        assert is_copied_over(part, given)
        copied = aten.copy.default(part, given)
        assert same_bits(target(whole, copied, *PARTS[target]), target(whole, given, *PARTS[target]))
    other = torch.float16 if dtype is not torch.float16 else torch.float32
    assert not is_copied_over(part, given[..., :1]) and not is_copied_over(part, given.to(other))


class WritesParts(nn.Module):
    """Stacks by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        stacked = torch.zeros(8, *hidden.shape)
        for i in range(3):
            stacked[i] = hidden.sin() * i
            stacked[:, i] += hidden[i]
            stacked[3:4, ..., i] = hidden[None, ..., 0]
        return stacked.square().mean()


def test_writes_into_parts_copy_no_memory_besides() -> None:
    model, x = WritesParts(), torch.randn(16, 64, 64)
    plan = auto_checkpoint(model, x, progress=False, check=True, time_limit=2)
    assert plan.checked.steps
    code = plan.step.forward.code
    assert "scatter" in code and "copy.default" not in code
    peak = measure_peak(lambda: plan.module(x).backward(), torch.device("cpu"))
    assert peak + sum(t.nbytes for t in (x, *model.parameters())) <= plan.peak_bytes


class Residual(nn.Module):
    """Nothing but a sum and its relu, large enough for blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(600, 600))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.p.tanh()).relu().square().mean()


def test_a_wrong_rule_is_not_proved_right() -> None:
    """`relu(x + x)` put in for `relu(x + y)` used to be planned, and proved against itself."""
    substitute = match.substitute

    def twice(fused: Fused, root: Any, arguments: tuple[Any, ...]) -> Any:
        return substitute(fused, root, (arguments[0], arguments[0]) if fused is records.ADD_RELU else arguments)

    model, x = Residual(), torch.randn(600, 600)
    with damaged_rules.patched((match, "substitute", twice)), pytest.raises(VerificationError, match="add_relu"):
        auto_checkpoint(model, x, progress=False)


def test_damage_to_records_and_rules_is_refused() -> None:
    """`python -m tests.passes.damaged_rules` does 200 of them."""
    tally = damaged_rules.run(8)
    assert tally.missed == []
    assert sum(tally.caught.values()) >= 8
