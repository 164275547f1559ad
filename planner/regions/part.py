"""A part: what a region looks like once captured; runs of equal regions share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from passes._torch import is_dense
from passes.alias import Aliases, Storage
from passes.leaves import casts, read_views, sums
from passes.profile import OpProfile
from passes.trace.capture import Traced
from passes.trace.layouts import Layouts
from passes.trace.matching import Differs, match, match_arguments
from passes.trace.reads import Matched
from passes.trace.structure import held_objects
from planner.dropin.plan_key import Key, state_key


@dataclass(eq=False)
class Part:
    """A captured region.

    Attributes:
        key, state: what a call of it, and its parameters and buffers, look like.
        asked: the outputs that its backward starts from, as it was captured for, and the strides of their gradients.
        layouts: what was known then of how kernels lay out what they make; `Traced.layouts` may have learned since.
    """

    kind: type
    key: Key
    state: list[Any]
    asked: Asked
    layouts: Layouts
    traced: Traced
    aliases: Aliases
    profiles: dict[fx.Node, OpProfile] | None = None

    @cached_property
    def results(self) -> Any:
        return self.traced.graph_module.graph.output_node().args[0]

    @cached_property
    def output_nodes(self) -> list[fx.Node | None]:
        """For each output its node; None for an output that is an input, a parameter or a buffer itself."""
        first = len(self.traced.mutated)
        return [None if leaf.input is not None else self.results[first + leaf.index] for leaf in self.traced.outputs]

    @cached_property
    def output_values(self) -> list[Any]:
        """For each of them, as far as it was made here, a tensor without data."""
        return [None if n is None else n.meta["val"] for n in self.output_nodes]

    @cached_property
    def output_storages(self) -> list[Storage | None]:
        """For each of them its storage."""
        found: list[Any] = [None if n is None else self.aliases.of[n] for n in self.output_nodes]
        return found

    @cached_property
    def gradients(self) -> list[fx.Node | None]:
        """For each primal its gradient, if it has one."""
        found: list[fx.Node | None] = list(self.results[self.traced.num_forward_outputs :])
        return found

    @cached_property
    def sums(self) -> dict[int, str]:
        """Primals whose gradient may be a sum."""
        return sums(self.traced)

    @cached_property
    def views(self) -> tuple[int, ...]:
        """Outputs that are views in the plain step, which reads them itself."""
        return read_views(self.traced)

    @cached_property
    def casts(self) -> dict[int, str]:
        """Parameters that autocast casts in it."""
        return casts(self.traced) if self.key.autocast else {}

    @cached_property
    def position(self) -> dict[Any, int]:
        """Which placeholder a storage is."""
        return {self.aliases.of[p]: i for i, p in enumerate(self.traced.placeholders)}

    @cached_property
    def dense(self) -> list[bool]:
        """Which placeholders leave no gaps in their memory."""
        return [is_dense(p.meta["val"]) for p in self.traced.placeholders]

    @cached_property
    def returns_primals(self) -> bool:
        """Whether a gradient lies in the memory of a primal."""
        return any(position < self.traced.num_primals for position in self._handed_on)

    @cached_property
    def differentiated(self) -> list[int]:
        """The outputs, by number, whose gradients its backward starts from."""
        return [leaf.index for leaf in self.traced.outputs if leaf.input is None and leaf.differentiated]

    @cached_property
    def returns_tangents(self) -> bool:
        """Whether a gradient lies in the memory of one that the backward starts from."""
        return any(position >= self.traced.num_primals for position in self._handed_on)

    @cached_property
    def _handed_on(self) -> list[int]:
        storages = [self.aliases.of[n] for n in self.gradients if n is not None]
        return [self.position[s] for s in storages if s in self.position]

    def holds(
        self, module: nn.Module, key: Key, asked: Asked, inputs: Sequence[torch.Tensor], bound: Mapping[str, Any]
    ) -> bool:
        """Whether capturing `module` for such a call would give this part again."""
        if type(module) is not self.kind or key != self.key or asked != self.asked:
            return False
        try:
            matched = self.look(module, bound)
        except Differs:
            return False
        guard, state = self.traced.guard, matched.tensors()
        if state is None or list(map(state_key, state)) != self.state:
            return False
        return guard is None or guard.holds([*state, *inputs])

    def look(self, module: nn.Module, bound: Mapping[str, Any]) -> Matched:
        """Find in a module, and in what it is called with, what this part's forward read.

        Raises:
            Differs: something is not what was read.
        """
        matched = match(self.traced.reads, module, None)
        match_arguments(self.traced.reads, matched, module, held_objects(bound))
        return matched


@dataclass(frozen=True)
class Asked:
    """What a run is captured for.

    Attributes:
        starts, strides: what its backward starts from: the outputs' paths (None: all), and strides by `gradient_key`.
        changed: primals that code after it changes in place: nothing in the backward may read them.
    """

    starts: tuple[str, ...] | None = None
    strides: tuple[tuple[Any, tuple[int, ...]], ...] = ()
    changed: tuple[int, ...] = ()
