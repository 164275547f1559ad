"""Errors of the torch side: what could not be captured, what is not supported, what does not match."""

from __future__ import annotations

from solvers.errors import PlannerError


class CaptureError(PlannerError):
    """The model's forward could not be traced into a graph.

    Attributes:
        location: `file:line` of the user's own code, or None when no frame of it was on the stack.
        construct: the source line at that place, or the op that could not be traced.
    """

    def __init__(self, message: str, *, location: str | None = None, construct: str | None = None) -> None:
        super().__init__(message)
        self.location = location
        self.construct = construct


class ForwardFailed(CaptureError):
    """The forward raised an error of its own while it was traced, as far as that can be told."""


class NoBackward(CaptureError):
    """No output of the step depends on anything that requires a gradient."""


class Unsupported(PlannerError):
    """A construct that the rewrite would not keep faithful; refused before any work.

    Attributes:
        construct: what it is.
        place: module path or node name.
        remedy: what to do instead.
    """

    def __init__(self, construct: str, place: str, reason: str, remedy: str) -> None:
        super().__init__(f"{construct} at {place}: {reason}. {remedy}")
        self.construct = construct
        self.place = place
        self.reason = reason
        self.remedy = remedy


class StateChanged(Unsupported):
    """Forward leaves something that a later call reads: a table that grows with the longest batch, or a counter."""


class OnlyInEager(Unsupported):
    """What eager alone runs as it is: a call in training that comes to it does so, with a warning."""


class InputMismatch(PlannerError):
    """A call's inputs do not have the structure, shape, dtype or device the plan was made for.

    Attributes:
        argument: name of the first argument that differs.
        got, expected: what it is and what it was in the sample.
    """

    def __init__(self, argument: str, got: str, expected: str, hint: str = "") -> None:
        super().__init__(f"argument {argument!r}: got {got}, the plan expects {expected}.{' ' + hint if hint else ''}")
        self.argument = argument
        self.got = got
        self.expected = expected


class VerificationError(PlannerError):
    """A rewrite was not proved to compute the traced graph's values. This is a defect of ours: please report it.

    Attributes:
        node: name of the node where the proof broke off.
    """

    def __init__(self, message: str, *, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node
