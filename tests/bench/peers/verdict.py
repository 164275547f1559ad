"""Peer against plan, point by point: who needs less memory, fewer FLOPs, less time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .point import Point

TIME_NOISE = 0.02  # a ratio of medians on a shared machine is not known better than this


@dataclass(frozen=True)
class Duel:
    """A peer's point and our plan under that point's own peak.

    Attributes:
        added, peer_added: FLOPs beyond plain eager's, as a share of it.
        losses: in what the peer is ahead; empty when we are at least as good in all.
    """

    peer: Point
    ours: Point
    plain: Point

    @property
    def added(self) -> float:
        return self.ours.flops / self.plain.flops - 1

    @property
    def peer_added(self) -> float:
        return self.peer.flops / self.plain.flops - 1

    @property
    def share_of_added(self) -> float | None:
        """Our added FLOPs over the peer's; None where the peer adds none."""
        return self.added / self.peer_added if self.peer_added > 0 else None

    @property
    def losses(self) -> tuple[str, ...]:
        if not self.ours.ok:
            return ("does not fit",)
        found = []
        if self.ours.peak_bytes > self.peer.peak_bytes:
            found.append("peak")
        if self.ours.flops > self.peer.flops:
            found.append("FLOPs")
        if (self.ours.ratio or 0) > (self.peer.ratio or 0) + TIME_NOISE:
            found.append("time")
        return tuple(found)

    @property
    def dominated(self) -> bool:
        """The peer is at least as good in memory, FLOPs and time, and better in one beyond noise."""
        if not self.ours.ok:
            return True
        ahead = self.losses
        behind = (
            self.ours.peak_bytes < self.peer.peak_bytes or self.ours.flops < self.peer.flops
            or (self.ours.ratio or 0) < (self.peer.ratio or 0) - TIME_NOISE
        )  # fmt: skip
        return bool(ahead) and not behind


def duels(points: Sequence[Point]) -> Iterator[Duel]:
    """Every peer point that ran, with ours at its peak."""
    for model in dict.fromkeys(p.model for p in points):
        mine = [p for p in points if p.model == model]
        plain = next((p for p in mine if p.method == "plain" and p.ok), None)
        by_budget = {p.budget_bytes: p for p in mine if p.method == "ours" and p.setting.startswith("at ")}
        for peer in mine:
            if plain is not None and peer.ok and peer.method != "ours" and peer.peak_bytes in by_budget:
                yield Duel(peer, by_budget[peer.peak_bytes], plain)


@dataclass(frozen=True)
class Lowest:
    """The lowest total peak of per-block checkpointing and of ours on one model, in bytes, and our proved floor."""

    model: str
    block: int
    ours: int
    floor: int | None


def lowest(points: Sequence[Point]) -> list[Lowest]:
    """Models on which both ran."""
    found = []
    for model in dict.fromkeys(p.model for p in points):
        block = [p.peak_bytes for p in points if (p.model, p.method, p.ok) == (model, "block", True)]
        ours = [p.peak_bytes for p in points if (p.model, p.method, p.ok) == (model, "ours", True)]
        floors = [p.floor_bytes for p in points if p.model == model and p.floor_bytes is not None]
        if block and ours:
            found.append(Lowest(model, min(block), min(ours), max(floors, default=None)))
    return found


def summary(points: Sequence[Point]) -> list[str]:
    """What the issue of this benchmark asks, as lines of text."""
    fought = [d for d in duels(points) if d.peer.method != "plain"]
    fair = [d for d in fought if d.peer.correct]
    shares = [d.share_of_added for d in fair if d.ours.ok and d.share_of_added is not None]
    low = lowest(points)
    lines = [
        f"{len(fought)} peer points, {len(fair)} with the plain step's numbers; of the latter "
        f"{sum(d.dominated for d in fair)} dominate ours, {sum(not d.losses for d in fair)} are matched or beaten in "
        "memory, FLOPs and time alike",
    ]
    if shares:
        lines.append(
            f"our added FLOPs at a correct peer's own peak: {statistics.median(shares):.2f} of its, in the median"
        )
    if low:
        ratios = [x.ours / x.block for x in low]
        lines.append(
            f"lowest total peak: below per-block checkpointing's on {sum(r < 1 for r in ratios)} of {len(low)} models, "
            f"at most 0.9 of it on {sum(r <= 0.9 for r in ratios)}"
        )
    return lines
