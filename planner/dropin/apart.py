"""apart: what a step's backward asks of the plain model, without keeping that alive.

Where forward leaves an output in an attribute of the model, the output's node would lead back to the model. The garbage
collector does not look into autograd's nodes: neither would ever be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from passes.run.listeners import Taken
from planner.errors import PlannerError

from .fallback import Fallback


class Apart:
    """A `Fallback` that lives as long as this and the model do, as the state of the model's plans holds it."""

    def __init__(self, fallback: Fallback) -> None:
        self._fallback = weakref.ref(fallback)
        fallback.state.apart[self] = fallback

    def __call__(
        self, primals: Sequence[torch.Tensor], generators: dict[str, torch.Generator | None],
        gradients: dict[int, torch.Tensor], taken: dict[int, Taken],
    ) -> list[Any]:  # fmt: skip
        """See `passes.run.step.Fallback`."""
        if (fallback := self._fallback()) is None:
            raise PlannerError(
                "this backward is another one than planned, which runs the plain model, and that was freed since its "
                "forward: keep the model until backward() is over."
            )
        return fallback(primals, generators, gradients, taken)

    def changed(self) -> str:
        """See `passes.run.step.Fallback`."""
        return "" if (fallback := self._fallback()) is None else fallback.changed()

    def compare(self, results: Sequence[torch.Tensor]) -> None:
        """See `passes.run.step.Fallback`."""
        if (fallback := self._fallback()) is not None:
            fallback.compare(results)

    def compared(
        self, gradients: Mapping[int, torch.Tensor], planned: Callable[[], list[Any]] | None
    ) -> list[Any] | None:
        """See `passes.run.step.Fallback`."""
        return None if (fallback := self._fallback()) is None else fallback.compared(gradients, planned)

    def learn(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """See `passes.run.step.Fallback`."""
        if (fallback := self._fallback()) is not None:
            fallback.learn(gradients)

    def not_needed(self) -> None:
        """See `passes.run.step.Fallback`."""
        if (fallback := self._fallback()) is not None:
            fallback.not_needed()

    def failed(self, error: Exception) -> None:
        """See `passes.run.step.Fallback`."""
        if (fallback := self._fallback()) is not None:
            fallback.failed(error)

    @property
    def path(self) -> str:
        """See `passes.run.step.Fallback`."""
        return "" if (fallback := self._fallback()) is None else fallback.path


def apart(fallback: Fallback) -> Fallback | Apart:
    """What the step's nodes may hold."""
    left = any(leaf.stays and leaf.requires_grad for leaf in fallback.traced.outputs)
    return Apart(fallback) if left else fallback
