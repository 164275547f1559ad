"""Selective checkpointing with torchtitan's op policy (`torchtitan/distributed/activation_checkpoint.py`).

Within each block the results of expensive ops are saved and every second matrix product is computed again. torchtitan
counts `mm` and `linear`; its models have no biases, so `addmm` stands beside them here, and convolutions beside
attention, so that models with other layers are not left without savings.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear})
EXPENSIVE = (
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math", "convolution", "convolution_overrideable", "_grouped_mm", "max",
)  # fmt: skip
SAVED = PRODUCTS | {getattr(torch.ops.aten, n) for n in EXPENSIVE if hasattr(torch.ops.aten, n)}


def contexts() -> Any:
    """`context_fn` for one call of one checkpointed block."""
    products: dict[bool, int] = defaultdict(int)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        packet = op.overloadpacket
        if packet in PRODUCTS:
            products[ctx.is_recompute] += 1
            if products[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if packet in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
