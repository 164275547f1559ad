"""How Inductor treats an op, and what running it again then costs."""

from __future__ import annotations

import torch
from torch import fx

from passes._torch import OpOverload
from passes.lower import Lowered
from passes.ops import is_random
from passes.profile import OpProfile, roofline

from .fusion import Kind

# Code that Inductor generates for each element by itself, without the tag that says so.
_BY_ELEMENT = frozenset(
    {"convert_element_type", "iota", "full", "full_like", "where", "inductor_random", "inductor_lookup_seed", "clone",
     "constant_pad_nd", "ones_like", "zeros_like", "scalar_tensor", "_to_copy"}
)  # fmt: skip
POINTWISE_SHARE = 8
# Random numbers from a seed: one by one on the CPU, 8 ns each where a pointwise op takes 0.2; next to nothing on CUDA.
# To draw those of a dropout again takes no longer there than to write its mask, whose bytes are stored one by one, too.
DRAWS = "prims.inductor_random.default"
DRAW_ON_CPU = 16
LIBRARY = Kind(False, False)


def kinds(lowered: Lowered, profiles: dict[fx.Node, OpProfile]) -> list[Kind]:
    """For each op of the Problem how Inductor treats it."""
    return [LIBRARY if n is None else _kind(n, profiles[n]) for n in lowered.nodes]


def _kind(node: fx.Node, profile: OpProfile) -> Kind:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims") or profile.work:
        return LIBRARY
    return Kind(True, is_pointwise(target) and not is_random(node))


def is_pointwise(target: OpOverload) -> bool:
    """Whether each element of the result is computed by itself."""
    return torch.Tag.pointwise in target.tags or target.overloadpacket.__name__ in _BY_ELEMENT


def compiled_cost(op: OpProfile) -> float:
    """`roofline` in compiled code: a pointwise op is computed where it is read, and costs no traffic of its own."""
    if op.target == DRAWS and op.tape is None:  # the CPU, which keeps no tape of allocations
        return roofline(op) * DRAW_ON_CPU
    return roofline(op) / (POINTWISE_SHARE if _named(op.target) else 1)


def _named(target: str) -> bool:
    namespace, _, rest = target.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
    return isinstance(found, OpOverload) and is_pointwise(found)
