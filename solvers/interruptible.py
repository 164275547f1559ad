"""What runs in a thread: HiGHS, so that Ctrl-C and the clock end it at once, and work beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

PATIENCE_SECONDS = 0.2

T = TypeVar("T")


def shielded(act: Callable[[], None]) -> None:
    """Act in a thread: HiGHS's bindings take what Ctrl-C raises while they look at an argument for a wrong one."""
    done, errors = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - raised again
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        done.wait()
    except BaseException:
        while thread.ident is not None and not done.is_set():
            done.wait(0.05)
        raise
    if errors:
        raise errors[0]


def interruptible(highs: Any, deadline: float) -> None:
    """Run HiGHS in a thread and wait for it; the clock and an exception here (Ctrl-C) stop it."""
    done = threading.Event()  # Python 3.11 takes a thread for ended once Ctrl-C has interrupted a join of it

    def run() -> None:
        try:
            highs.run()
        finally:
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        while not done.wait(0.05):
            if time.monotonic() > deadline + PATIENCE_SECONDS:
                highs.cancelSolve()
    except BaseException:
        while thread.ident is not None and not done.is_set():  # one that has not begun does not hear the first call
            highs.cancelSolve()
            done.wait(0.05)
        raise


class Beside(Generic[T]):
    """Work in a thread of its own while the block of the `with` statement does something else.

    Args:
        work: is handed an event that is set once the block has ended: time to come to an end.
    """

    def __init__(self, work: Callable[[threading.Event], T]) -> None:
        self._found: list[T] = []
        self._errors: list[BaseException] = []
        self._stop, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    def _run(self, work: Callable[[threading.Event], T]) -> None:
        try:
            self._found.append(work(self._stop))
        except BaseException as error:  # noqa: BLE001 - raised again
            self._errors.append(error)
        finally:
            self._done.set()

    def __enter__(self) -> Beside[T]:
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C: it may run all the same
            self._stop.set()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._done.wait()

    def result(self) -> T:
        """What the work came to; waits for it.

        Raises:
            Exception: what the work raised.
        """
        self._done.wait()
        if self._errors:
            raise self._errors[0]
        return self._found[0]
