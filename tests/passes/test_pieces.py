"""Ops whose results share memory although their schemas do not say so: what a change in place of one shows in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.alias import HIDDEN_VIEWS
from passes.errors import Unsupported
from planner import auto_checkpoint
from tests.passes.program_ops import FAMILIES, Builder
from tests.zoo.compare import differences, run_step
from tests.zoo.hazards import Wrap

aten = torch.ops.aten
SAMPLE = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def base_read(h: Tensor) -> Tensor:
    h.unsafe_chunk(2, 1)[0].mul_(2)
    return h * h


def view_of_a_piece(h: Tensor) -> Tensor:
    h.unsafe_split_with_sizes([40, 24], 1)[1][:, 3].mul_(2)
    return h.exp()


def piece_read(h: Tensor) -> Tensor:
    a, b = h.unsafe_chunk(2, 1)
    h.mul_(2)
    return a * b


def piece_of_a_piece(h: Tensor) -> Tensor:
    a, b = h.unsafe_chunk(2, 1)
    a.unsafe_chunk(2, 1)[1].mul_(2)
    return b * a.sum()


def twice_in_pieces(h: Tensor) -> Tensor:
    (a, _), (_, c, _, _) = h.unsafe_chunk(2, 1), h.unsafe_chunk(4, 1)
    c.mul_(2)
    return a.exp()


def read_by_the_backward(h: Tensor) -> Tensor:
    h = h.tanh()  # its backward reads its result
    a, b = h.unsafe_chunk(2, 1)
    a.mul_(2)
    return a * b


def used_by_an_earlier_op(h: Tensor) -> Tensor:
    y = h * h
    a, b = h.unsafe_chunk(2, 1)
    a.mul_(2)
    return a * b + y.sum()


def returned(h: Tensor) -> tuple[Tensor, Tensor]:
    a, b = h.unsafe_chunk(2, 1)
    a.mul_(2)
    return (a * b).sum(), h.detach()


def of_an_unsafe_view(h: Tensor) -> Tensor:
    torch.ops.aten._unsafe_view(h, [64, 32]).mul_(2)
    return h.exp()


WRONG = (base_read, view_of_a_piece, piece_read, piece_of_a_piece, twice_in_pieces, read_by_the_backward,
         used_by_an_earlier_op, returned, of_an_unsafe_view)  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_a_change_that_shows_elsewhere_is_refused(change: Callable[[Tensor], Any]) -> None:
    """Functionalization takes pieces for memory of their own: the step had the numbers from before the change."""

    def forward(self: Any, x: Tensor) -> Any:
        made = change(self.linear(x).sin())
        return made if isinstance(made, tuple) else made.sum()

    with pytest.raises(Unsupported, match=r"(unsafe_split|unsafe_split_with_sizes|_unsafe_view).*Use split or chunk"):
        auto_checkpoint(Wrap(forward, linear=nn.Linear(64, 64)), SAMPLE)


def test_a_change_of_a_piece_of_a_buffer_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x).sin()
        self.norm.running_mean.unsafe_chunk(2)[0].add_(h.detach().mean())
        return h.sum()

    with pytest.raises(Unsupported, match="a piece of unsafe_split"):
        auto_checkpoint(Wrap(forward, linear=nn.Linear(64, 64), norm=nn.BatchNorm1d(64)), SAMPLE)


def gates(self: Any, h: Tensor) -> Tensor:
    a, b = h.unsafe_chunk(2, 1)
    a.relu_()
    b.sigmoid_()
    return a * b


def whole_alone(self: Any, h: Tensor) -> Tensor:
    a, _ = h.unsafe_chunk(2, 1)
    y = a.exp().sum()
    h.mul_(2)
    return h + y


def other_piece(self: Any, h: Tensor) -> Tensor:
    a, b = h.unsafe_chunk(2, 1)
    a.unsafe_chunk(2, 1)[0].mul_(2)
    return b.exp()


def cells(self: Any, h: Tensor) -> Tensor:
    return self.lstm(h[None])[0] + self.gru(h)[None] + self.cell(h)[0]


@pytest.mark.parametrize("change", [gates, whole_alone, other_piece, cells])
def test_a_change_that_nothing_else_reads_is_planned(change: Callable[[Any, Tensor], Tensor]) -> None:
    """Torch's own recurrent cells change such pieces in place."""
    torch.manual_seed(0)
    parts = {"lstm": nn.LSTM(64, 64), "gru": nn.GRUCell(64, 64), "cell": nn.LSTMCell(64, 64)}
    model = Wrap(lambda self, x: change(self, self.linear(x).sin()).sum(), linear=nn.Linear(64, 64), **parts)
    plan = auto_checkpoint(model, SAMPLE, check=False)
    assert differences(run_step(model, model, SAMPLE), run_step(plan.module, model, SAMPLE)) == []


class Sharing(TorchDispatchMode):
    """Notes the ops whose results lie in the memory of an argument, and whose schemas say nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(argument.alias_info for argument in func._schema.arguments):
            given, made = map(_places, ((args, kwargs), result))
            if given & made:
                self.found.add(func)
        return result


def _places(values: Any) -> set[int]:
    leaves = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided]
    return {t.untyped_storage()._cdata for t in leaves}


x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
OPS: tuple[Callable[[], Any], ...] = (
    lambda: x.unsafe_chunk(2), lambda: x.unsafe_split(2), lambda: aten.unsafe_split_with_sizes(x, [1, 3]),
    lambda: aten._unsafe_view(x, [6, 4]), lambda: x.reshape(24), lambda: x.t().reshape(24), lambda: x.contiguous(),
    lambda: x.to(torch.float32), lambda: aten._to_copy(x), lambda: x.expand(2, 4, 6).sum_to_size(4, 6),
    lambda: aten.native_dropout(x, 0.5, False), lambda: aten.native_dropout(x, 0.0, True), lambda: torch.sum(x, ()),
    lambda: aten.feature_dropout(x, 0.5, False), lambda: torch.alpha_dropout(x, 0.5, False),
    lambda: aten.constant_pad_nd(x, [0, 0]), lambda: torch.conj_physical(x),
    lambda: torch.positive(x), lambda: x.resolve_conj().resolve_neg(), lambda: torch.real(x),
    lambda: torch.flip(x, ()), lambda: x.repeat(1, 1), lambda: torch.cat([x]), lambda: torch.cat([x, x[:0]]),
    lambda: torch.atleast_2d(x), lambda: torch.mean(x[:1], 0), lambda: torch.cumsum(x[0, 0], 0),
    lambda: torch.squeeze(x), lambda: torch.block_diag(x), lambda: torch.nan_to_num(x),
    lambda: aten.slice_scatter(x, x), lambda: F.interpolate(x[None], size=6), lambda: F.adaptive_avg_pool1d(x, 6),
    lambda: F.rrelu(x, training=False), lambda: torch.fft.fftn(x.to(torch.complex64), dim=()).real,
    lambda: torch.cartesian_prod(x[0], x[1]), lambda: torch.einsum("ij,kj->ik", x, x),
    lambda: torch.tensordot(x, x.t(), 1), lambda: torch.linalg.matrix_power(x[:, :4], 1),
    lambda: torch.masked.softmax(x, 1), lambda: nn.utils.rnn.pad_sequence([x, x]),
    lambda: nn.LSTM(6, 3, 2, dropout=0.5)(x[None]), lambda: nn.GRU(6, 3, 2)(x[None]),
    lambda: nn.RNN(6, 3).eval()(x[None]), lambda: nn.MultiheadAttention(6, 2)(x, x, x),
    lambda: nn.TransformerEncoderLayer(6, 2, 8).eval()(x[None]), lambda: nn.BatchNorm1d(6)(x),
    lambda: nn.InstanceNorm1d(4)(x[None]), lambda: nn.Conv1d(4, 4, 3, padding="same")(x[None]),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_no_other_op_shares_memory_without_saying_so() -> None:
    """Of these and of what generated programs are made of; all of torch's own samples (`op_db`) were looked at once."""
    with Sharing() as sharing:
        for grad in (False, True):
            for op in OPS:
                x.requires_grad_(grad)
                made = [t for t in pytree.tree_leaves(op()) if isinstance(t, Tensor) and t.requires_grad]
                torch.autograd.backward(made, list(map(torch.ones_like, made)))
        x.requires_grad_(False)
        for family in FAMILIES:
            for seed in range(4):
                builder = Builder(random.Random(seed).randint)
                builder.call(torch.tanh, builder.module(nn.Linear(4, 6), builder.input(torch.randn(3, 2, 4))))
                family(builder)
    known = {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
    assert sharing.found == known
    assert known <= HIDDEN_VIEWS
