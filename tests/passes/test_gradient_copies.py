"""Gradients that autograd copies because their layout is not the parameter's: the original is let go."""

from __future__ import annotations

import torch
from torch import nn

from planner import auto_checkpoint
from tests.zoo.compare import measured_peak_bytes


class ChannelsLastInside(nn.Module):
    """The weights are laid out as usual, the activations are not, so the weights' gradients are not either."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(128, 128, 3, padding=1) for _ in range(4))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = image.contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden.mean()


def test_a_copied_gradient_does_not_stay_beside_its_copy() -> None:
    model, image = ChannelsLastInside(), torch.randn(1, 128, 6, 6)
    plan = auto_checkpoint(model, (image,), progress=False)
    copies = [op for op in plan.problem.ops if op.name.endswith("_grad")]
    assert len(copies) == 4  # autograd copies each weight's gradient: 0.56 MiB
    assert not {t for op in copies for t in op.inputs} & set(plan.problem.outputs)
    measured = measured_peak_bytes(plan.module, model, (image,), plan.static_bytes)
    assert measured <= plan.peak_bytes <= 1.01 * measured
