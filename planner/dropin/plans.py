"""Who keeps the plans of a model, or of a region of one, as what runs them sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn

from passes.run._torch import Autocast
from passes.trace.reads import Matched, Reads

from .entry import Entry, Losses


class Plans(Protocol):
    """What a `Fallback` needs of its plans' keeper.

    Attributes:
        apart: the fallbacks of the calls whose nodes may not hold them.
    """

    model: nn.Module
    cache: list[Entry]
    losses: Losses
    apart: WeakKeyDictionary[Any, Any]

    @property
    def root(self) -> nn.Module:
        """The model."""

    def plain(self, bound: Mapping[str, Any]) -> Any:
        """The plain step's forward."""

    def match(self, reads: Reads) -> Matched:
        """Find in the model, as it is now, what a forward read."""

    def replayed(self, autocast: Autocast) -> None:
        """Note that a backward, under that autocast, was none that was planned for."""

    def strayed(self, entry: Entry) -> None:
        """Note that a call answered the forward's questions otherwise than the sample of that plan."""

    def differed(self, entry: Entry) -> str:
        """Note that a spot check found another result than the plain forward's; what becomes of calls like that."""
