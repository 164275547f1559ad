"""A model's own `torch.utils.checkpoint`, whose part of the forward the plain step runs again in the backward."""

from __future__ import annotations

from collections.abc import Sequence

from passes.printable import few

from ..errors import Unsupported
from .given import ARGUMENT
from .places import say
from .watch import Watch


def refuse_checkpoints(watch: Watch, carried: Sequence[str]) -> None:
    """Refuse what that run would find otherwise than the first one, or change again.

    Args:
        carried: the attributes of the model that are arguments of the step.
    """
    for where, names in watch.checkpoints:
        if given := [name for name in names if name.startswith(ARGUMENT)]:
            raise Unsupported(
                f"{given[0]} changed within torch.utils.checkpoint", where, "the plain step changes it again when it "
                "recomputes in the backward", "Leave the checkpoint out: the plan decides what is recomputed.",
            )  # fmt: skip
    if carried and watch.has_checkpoints:
        raise Unsupported(
            f"torch.utils.checkpoint beside state that forward carries in self.{carried[0]}", "the forward",
            "the plain step, as it recomputes in the backward, reads what forward has left there since",
            "Leave the checkpoint out: the plan decides what is recomputed.",
        )  # fmt: skip


def say_repeated(repeated: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    """Say what the plain step updates again, and the planned step does not; see `Traced.repeated`."""
    places = list(dict.fromkeys(where for where, _ in repeated))
    updated = [name for _, names in repeated for name in names]
    if places:
        say(
            f"torch.utils.checkpoint at {few(places)} contains an update of {few(updated)}: the plain step makes it "
            "again when it recomputes in the backward. The planned step runs the forward once, and makes it once, as "
            "the model does without the checkpoint. Leave the checkpoint out: the plan decides what is recomputed."
        )
