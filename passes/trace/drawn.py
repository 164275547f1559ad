"""drawn: how often a forward draws random numbers, while it is traced."""

from __future__ import annotations

from typing import Any

from passes._torch import TorchDispatchMode
from passes.ops import draws


class Drawn(TorchDispatchMode):
    """Counts the calls of ops that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
