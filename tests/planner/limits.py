"""A limit of time for what must not hang."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TookTooLong(BaseException):
    """Not an error that anything catches."""


@contextmanager
def within_seconds(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the main thread when the block takes longer."""

    def over(*_: Any) -> None:
        raise TookTooLong(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
