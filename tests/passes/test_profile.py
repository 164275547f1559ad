"""Ops are measured on made-up data that costs what real data does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from passes.profile import _even_groups

GROUPED = torch.ops.aten._grouped_mm.default


@pytest.mark.parametrize(
    ("left", "right", "rows"), [((12, 4), (3, 4, 5), 12), ((5, 12), (12, 4), 12), ((3, 5, 4), (4, 12), 12)]
)
def test_groups_share_the_rows_evenly(left: tuple[int, ...], right: tuple[int, ...], rows: int) -> None:
    node: Any = SimpleNamespace(target=GROUPED)
    ends = torch.zeros(3, dtype=torch.int32)
    spread = _even_groups(node, (torch.ones(left), torch.ones(right), ends))[2]
    assert spread.tolist() == [rows // 3, 2 * rows // 3, rows] and spread.dtype == ends.dtype


def test_other_ops_keep_what_was_made_up() -> None:
    node: Any = SimpleNamespace(target=torch.ops.aten.addmm.default)
    arguments = torch.ones(3), torch.ones(2, 4), torch.zeros(4, 3)
    assert _even_groups(node, arguments) is arguments
