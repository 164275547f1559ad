"""reservation: what the caching allocator makes of a schedule, and what it is asked for so that less is reserved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from passes.lower import Lowered
from solvers.schedule import Schedule

from .arena import NOTHING, Reservation, best_arena
from .events import Order, Profiles
from .footprint import Footprint, Start, footprint, larger_of
from .options import Options
from .spacing import spaced


@dataclass(frozen=True)
class Played:
    """A schedule's steps on a device.

    Attributes:
        orders: what may happen.
        start: the allocator as the step finds it.
        aside_bytes: what is set aside on top of what the allocator does.
    """

    orders: Sequence[Order]
    start: Start
    aside_bytes: int = 0

    def footprint(self, starts: Iterable[Start], reservation: Reservation) -> Footprint:
        """The larger figures of all orders, from all starts."""
        asked = [order.asked(reservation.spacing) for order in self.orders]
        return larger_of(
            footprint(steps, start, self.aside_bytes, reservation.arena, before)
            for start in starts for steps, before in asked
        )  # fmt: skip

    def worst(self, reservation: Reservation = NOTHING) -> Footprint:
        """The same, wherever the driver places new segments."""
        return self.footprint([replace(self.start, descending=way) for way in (False, True)], reservation)

    def reservation(self, most_bytes: int, *, may_space: bool) -> Reservation:
        """What reserves least.

        Args:
            most_bytes: what may be allocated.
            may_space: whether ops may have spacers around them.
        """
        length, gradients = sum(order.length for order in self.orders), sum(self.orders[-1].before)
        arena = best_arena(lambda a: self.worst(Reservation(a)), self.start, length, most_bytes, gradients)
        found = Reservation(arena)
        if not may_space:
            return found
        return spaced(self.orders[-1], self.start, self.worst, most_bytes, self.aside_bytes, found)


def played(lowered: Lowered, profiles: Profiles, schedule: Schedule, start: Start, options: Options) -> Played:
    """What may be asked for; accumulated gradients may be there before, or the first step makes them."""
    made = Order(lowered, profiles, schedule, options.update.state_bytes, workspaces=start.workspaces)
    orders = [made]
    if lowered.accumulated_bytes and lowered.gradient_bytes:
        orders.append(replace(made, before=tuple(lowered.gradient_bytes)))
    return Played(orders, start, options.reserve_bytes + options.wrapper_bytes)
