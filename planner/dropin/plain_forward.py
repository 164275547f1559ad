"""The plain forward of a call that was planned, run again: for another backward than planned, and to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from passes._torch import as_distributed, keep_gradient_spread, swapped_state
from passes.run._torch import Autocast, under_autocast
from passes.run.random import set_rng_state
from passes.trace.arguments import state_tensors
from passes.trace.capture import Traced
from passes.trace.carried import state_aside
from passes.trace.given import all_outputs, held_before, left_alone, put_back, targets_of
from passes.trace.settings import set_aside, tensors_set
from passes.trace.structure import Bound, unflatten
from planner.check.twins import stand_in
from solvers.errors import PlannerError

from .plans import Plans


class PlainForward:
    """A forward from where the call's own began, on stand-ins: it leaves the model and the arguments as they are.

    Args:
        bound: the call's arguments, before forward has changed them.
    """

    def __init__(self, state: Plans, traced: Traced, autocast: Autocast, bound: Mapping[str, Any]) -> None:
        self.state, self.traced, self.autocast = state, traced, autocast
        self.before = held_before(traced.changes, bound)

    @contextmanager
    def given(self, inputs: Sequence[torch.Tensor]) -> Iterator[Bound]:
        """The call's arguments as forward was given them, with other tensors."""
        bound = Bound(unflatten(self.traced.input_template, inputs), self.traced.by_name)
        with left_alone(bound):
            put_back(self.before, bound)
            yield bound

    @torch.enable_grad()
    def _named(self, leaves: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that a replay has in the places of the model's own."""
        named: dict[str, torch.Tensor] = {}
        for i, (entry, leaf, like) in enumerate(zip(self.traced.state, leaves, given, strict=False)):
            made = named[entry.name] = as_distributed(leaf, like)
            keep_gradient_spread(made, like, partial(self._check_spread, i, like))
        return named

    def _check_spread(self, i: int, like: Any, placements: Any) -> None:
        """What takes the gradient was told at the forward how it is spread over the ranks."""
        if placements != self.traced.spread.get(i, like.placements):
            raise PlannerError(
                f"the gradient of {self.traced.primal_names[i]}, a DTensor, comes in the placements {placements} from "
                "a backward that was not planned for, and in others from the planned one. Call the model again, which "
                "is then planned for such a backward."
            )

    def leaves(self, primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What forward can run on in the place of these, which it leaves as they are."""
        own = [p.detach().clone() if i in self.traced.mutated else p.detach() for i, p in enumerate(primals)]
        return list(map(stand_in, primals, own))

    def run(
        self, primals: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor],
        generators: Mapping[str, torch.Generator], saving: AbstractContextManager[Any],
        look: Callable[[], None] = lambda: None,
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        """The plain forward's outputs, by their numbers in the trace; what it changes and sets is undone.

        Args:
            look: called before that.
        """
        state, traced, count = self.state, self.traced, len(self.traced.state)
        given = state_tensors(state.model, traced.state)
        named = self._named(leaves, given)
        devices = [d for d in generators if d != "cpu"]
        with (
            torch.inference_mode(False), torch.random.fork_rng(devices=devices), torch.enable_grad(),
            swapped_state(state.model, named),
        ):  # fmt: skip
            for device, generator in generators.items():
                set_rng_state(generator.get_state(), device)
            # Autocast casts a leaf once for all its uses and adds up their gradients in that dtype; others each time.
            pairs = zip(leaves[count:], primals[count:], strict=True)
            arguments = [t if p.is_leaf else t.view_as(t) for t, p in pairs]
            aside = set_aside(traced.settings, state.model)
            with (
                under_autocast(self.autocast), aside, self.given(arguments) as bound, saving,
                state_aside(state.model, bound),
            ):  # fmt: skip
                targets = targets_of(traced.changes, bound)
                value, own = self.state.plain(bound), tensors_set(traced.settings, state.model)
                outputs = all_outputs(value, traced.output_template, traced.changes, targets, own)
                look()
        return {leaf.index: output for leaf, output in zip(traced.outputs, outputs, strict=False)}
