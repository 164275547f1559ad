"""HiGHS called from a thread, so that Ctrl-C and the clock end it at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 0.2


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
