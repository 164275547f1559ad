"""Guards know of all that changes what they ask about, and of nothing but what is there."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner import auto_checkpoint
from tests.zoo.compare import differences, run_step

Ask = Callable[["Asks", torch.Tensor, torch.Tensor], torch.Tensor]


class Asks(nn.Module):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ask, self.first, self.last = ask, nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.register_buffer("flag", torch.zeros(3, dtype=torch.long))
        self.register_buffer("level", torch.zeros(1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last(self.ask(self, self.first(x), mask)).square().mean()


def added(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(3, dtype=torch.long)
    found.add_(self.flag)
    return h * 2 if found.any() else h


def copied(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(3, dtype=torch.long)
    found[:] = self.flag
    return h * (1 + found.max().item())


def out(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(3, dtype=torch.long)
    torch.mul(self.flag, 2, out=found)
    return h * 2 if found.any() else h


def unknown(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(3, dtype=torch.bool)
    found[self.flag] = h.max() > 1e3
    return h * 2 if found.any() else h


def both(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(4, 6, dtype=torch.bool)
    found.logical_or_(mask & self.flag.bool().any())
    return F.pad(h[found], (0, 0, 1, 0))


def by_a_slice(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = mask.clone()
    found[:, torch.tensor(2) :].zero_()
    return h * 2 if found.any() else h


def by_a_copy(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = mask.clone()
    copy.copy(found)[:, 2:] = False
    return h * 2 if found.any() else h


def in_a_map(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = mask.clone()
    torch.vmap(lambda row: row[2:].logical_and_(torch.tensor(False)))(found)
    return h * 2 if found.any() else h


def sign(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h + torch.copysign(torch.ones(()), torch.tensor(self.level.item()))


def not_a_number(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h if self.level.item() != self.level.item() else 2 * h


def of_garbage(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h * 2 if int(torch.arange(3)[(h[..., 0] > 1e3).long()].sum()) > 0 else h


def of_a_table(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h * 2 if float(F.embedding((h[..., 0] > 1e3).long(), torch.arange(2.0)[:, None]).sum()) > 0 else h


def out_of_range(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = mask.sum()
    return h * 2 if (count < 5).all() and (torch.arange(5)[count] > 2).any() else h


def tensor_in_a_slice(self: Asks, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[:, : mask.sum(1).max() + 1]


ASKS = [
    added, copied, out, unknown, both, by_a_slice, by_a_copy, in_a_map, sign, not_a_number, of_garbage, of_a_table,
    out_of_range, tensor_in_a_slice,
]  # fmt: skip


def _batch(large: bool, places: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(24, dtype=torch.bool)
    mask[list(places)] = True
    return torch.randn(4, 6, 8) * (1e6 if large else 1), mask.reshape(4, 6)


@pytest.mark.every(2)
@pytest.mark.parametrize("ask", ASKS)
def test_what_is_asked_is_of_this_call(ask: Ask) -> None:
    model = Asks(ask)
    if ask is not_a_number:
        model.level.fill_(torch.nan)
    plain, steps = copy.deepcopy(model), 0
    dirty = [torch.full((24,), 7) for _ in range(99)]  # what the allocator hands out again
    del dirty
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = auto_checkpoint(model, _batch(ask in (of_garbage, of_a_table), [3, 9]), progress=False, time_limit=1)
        for large, places, flag, level in (
            (False, [3, 9], 0, 0.0), (True, [6, 7], 1, -0.0), (False, range(24), 2, 0.0), (True, [5, 11], 0, -0.0),
            (False, [], 1, 0.0), (False, [0, 1, 2, 3, 4, 5], 0, 0.0),
        ):  # fmt: skip
            given = _batch(large, places)
            for each in (model, plain):
                each.flag[0] = flag
                if ask is not not_a_number:
                    each.level.fill_(level)
            steps += 1
            assert not differences(run_step(plain, plain, given, steps), run_step(plan.module, model, given, steps))
    if ask is not_a_number:
        assert not said


def test_an_exported_guard_tells_numbers_by_their_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    given = _batch(False, [3])
    for name, ask, level in (("nan", not_a_number, torch.nan), ("sign", sign, 0.0)):
        model = Asks(ask)
        model.level.fill_(level)
        auto_checkpoint(model, given, progress=False, regions="whole").export(tmp_path / f"exported_{name}")
        exported: Any = importlib.import_module(f"exported_{name}").load()
        assert torch.equal(exported(*given), model(*given))
    dict(exported.named_buffers())["level"].neg_()
    with pytest.raises(Exception, match=r"answer the model's questions \[-0.0\]"):
        exported(*given)


def test_an_exported_guard_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    auto_checkpoint(Asks(out_of_range), _batch(False, [3]), progress=False, regions="whole").export(tmp_path / "fails")
    exported: Any = importlib.import_module("fails").load()
    with pytest.raises(Exception, match="the model's questions .* fail on these"):
        exported(*_batch(False, range(24)))
