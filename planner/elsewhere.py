"""elsewhere: a step planned here for another device: what of that one is known, and what is assumed.

What counts is the other device's: its rates, how its allocator rounds sizes up, what a generator's state takes, which
ops add in no fixed order, and what products of matrices hold. The graph is that of this machine, with the kernels that
run here; how much memory kernels ask for on the other device is not known and not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.device import KINDS, kind_of
from passes.profile import OpProfile, profile
from passes.rates import DEVICES, SIMILAR, device_name
from solvers.errors import MIB, PlannerError

HERE = ("", None)


def check_device(device: Any, cost: Any) -> str:
    """The device to plan for as text, "" for the model's own.

    Raises:
        PlannerError: it is not known, or the cost is what this machine measures.
    """
    if device in HERE:
        return ""
    text = str(device)
    kind = text.partition(":")[0]
    if not isinstance(device, (str, torch.device)) or (kind not in KINDS and kind not in DEVICES):
        names = ", ".join(dict.fromkeys((*KINDS, *DEVICES)))
        raise PlannerError(f"device={device!r} is unknown: it takes one of {names}, or None for the model's own.")
    if cost in ("measured", "device"):
        raise PlannerError(
            f'cost={cost!r} is measured on this machine, and device={text!r} is another one: leave cost="roofline", '
            "which goes by that device's rates, or give its rates."
        )
    return text


def target_of(name: str, own: torch.device) -> torch.device:
    """The kind of device that is planned for, where the model is on `own`."""
    kind = name.partition(":")[0]
    return own if not name else torch.device(kind if kind in KINDS else "cuda")


def rates_of(name: str, target: torch.device) -> str:
    """The name of the rates that recompute is priced by."""
    named = name if name.partition(":")[0] in DEVICES else device_name(target)
    return f"roofline:{named or SIMILAR}"


def seen_there(
    profiles: dict[fx.Node, OpProfile], graph: fx.Graph, own: torch.device, target: torch.device
) -> dict[fx.Node, OpProfile]:
    """Profiles less what kernels were seen to ask for here, where the other device is of another kind."""
    if own.type == target.type:
        return profiles
    counted = profile(graph, measure=False)
    return {n: replace(p, workspace_bytes=counted[n].workspace_bytes, tape=None) for n, p in profiles.items()}


def held_bytes(profiles: Mapping[fx.Node, OpProfile], own: torch.device, target: torch.device) -> int:
    """What products hold throughout on the other device, set aside because no op of it is run here."""
    products = any(p.flops for p in profiles.values())
    return kind_of(target).product_bytes if products and own.type != target.type else 0


def assumptions(name: str, cost: Any, own: torch.device) -> tuple[str, ...]:
    """What a plan for another device, or at another one's rates, takes as given, in words."""
    target = target_of(name, own)
    found = []
    known = name.partition(":")[0] in DEVICES or device_name(target)
    if cost == "roofline" and target.type != "cpu" and not known:
        found.append(
            f'no rates of this GPU are built in: recompute is priced as on {SIMILAR}; cost="device" measures its own'
        )
    if own.type != target.type:
        held = kind_of(target).product_bytes
        aside = f" {held // MIB} MiB are set aside for what matrix products hold there." if held else ""
        found.append(
            f"planned for {name} on a {own.type.upper()}: sizes are rounded up and recompute is priced as there, and "
            f"the kernels are those that run here. Not counted is what other kernels need there: its choice of "
            f"attention, fused dropout, workspaces of convolutions, segments of its allocator.{aside} "
            f"Plan anew on {name} for its own figures"
        )
    return tuple(found)
