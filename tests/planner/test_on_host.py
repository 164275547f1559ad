"""A replay whose saved tensors wait in the host's memory, as on a GPU: here both are one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from passes.run.tensors import memory_of
from planner.dropin import fallback
from planner.dropin.on_host import moved_to_host
from tests.planner.steps import Block, batch, plan
from tests.zoo.compare import same_bits
from tests.zoo.hazards import Wrap

TENSORS = (
    torch.randn(3, 5), torch.randn(3, 5).t(), torch.randn(1, 5).expand(3, 5), torch.randn(6, 7)[1:4, 2::3],
    torch.randn(2, 3, 4).bfloat16().permute(2, 0, 1), torch.rand(9) > 0.5, torch.tensor(1.5), torch.randn(4, 0),
    torch.randn(2, 3, dtype=torch.cfloat), torch.randn(2, 3, dtype=torch.cfloat).conj(),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
)  # fmt: skip


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{tuple(t.shape)} {t.dtype}")
def test_a_tensor_comes_back_as_it_was(tensor: torch.Tensor) -> None:
    hooks: Any = moved_to_host(set())
    back = hooks.unpack_hook(hooks.pack_hook(tensor))
    assert torch.equal(back, tensor) and back.dtype == tensor.dtype and back.is_conj() == tensor.is_conj()
    assert back.stride() == tensor.stride() and back.data_ptr() % 64 == tensor.data_ptr() % 64


def test_what_stays_anyway_is_not_moved() -> None:
    tensor = torch.randn(4, 4)
    hooks: Any = moved_to_host({memory_of(tensor)})
    assert hooks.pack_hook(tensor[2:]).data_ptr() == tensor[2:].data_ptr()


def blocks() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block(32, 4, 0.2) for _ in range(2))), torch.randn(2, 16, 32)


def images() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(8, 4, 3)]
    return nn.Sequential(*layers), torch.randn(2, 3, 16, 16)


def without_hooks() -> tuple[nn.Module, torch.Tensor]:
    """Torch's own transforms refuse hooks in such words."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("no saved tensor hooks here"):
            return self.layer(x).tanh()  # type: ignore[no-any-return]

    return Wrap(forward, layer=nn.Linear(8, 8)), batch()


@pytest.mark.parametrize(("build", "fewest"), [(blocks, 10), (images, 4), (without_hooks, 0)])
def test_a_replay_has_the_plain_steps_bits(build: Any, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Tensor] = []

    def on_host(device: torch.device, resident: Sequence[torch.Tensor]) -> Any:
        hooks: Any = moved_to_host(set(map(memory_of, resident)))

        def pack(tensor: torch.Tensor) -> Any:
            packed = hooks.pack_hook(tensor)
            moved.extend([tensor] if packed is not tensor else [])
            return packed

        return torch.autograd.graph.saved_tensors_hooks(pack, hooks.unpack_hook)

    monkeypatch.setattr(fallback, "saved_on_host", on_host)
    torch.manual_seed(0)
    model, x = build()
    plain = copy.deepcopy(model)
    planned = plan(model, x)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="gradient in other strides.*replays the plain forward"):
        planned.module(x).sum().backward()
    torch.manual_seed(1)
    plain(x).sum().backward()
    assert len(moved) >= fewest
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(same_bits(a.grad, b.grad) for a, b in pairs)
    assert all(same_bits(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
