"""Gradients that autograd copies because their layout is not the parameter's: the original is let go."""

from __future__ import annotations

import torch
from torch import nn

from planner import auto_checkpoint
from tests.zoo.compare import measured_peak_bytes


class ChannelsLastInside(nn.Module):
    """The weights are laid out as usual, the activations are not, so the weights' gradients are not either."""

    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(128, 128, kernel, padding=kernel // 2) for _ in range(4))

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


def test_strides_of_dimensions_of_one_element_ask_for_no_copy() -> None:
    """Predictions for 1x1 convolutions of channels-last images were a weight too high."""
    model, image = ChannelsLastInside(kernel=1), torch.randn(2, 128, 2, 3)
    plan = auto_checkpoint(model, (image,), progress=False)
    gradients = [g.meta["val"].stride() for g in plan.prepared.traced.gradients if g is not None]
    assert (128, 1, 128, 128) in gradients
    assert not [op for op in plan.problem.ops if op.name.endswith("_grad")]
    assert measured_peak_bytes(plan.module, model, (image,), plan.static_bytes) == plan.peak_bytes
