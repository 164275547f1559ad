"""One thread at a time captures or measures, and signals wait for a moment at which torch is whole.

torch's tracer changes what all threads of a process share (kernels registered for tracing, flags, loggers, patched
methods), and puts it back in code that an exception may cut short: Ctrl-C's, or that of another signal's handler in
Python (the alarm of a test's time limit, a batch system's SIGTERM). Both go on under `exclusive`.

What changes one model for a while (a trace puts other tensors into it, a step by regions other forwards) goes on in
its `turn`.
"""

from __future__ import annotations

import concurrent.futures.thread
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from solvers.errors import PlannerError

from .casts import casts_aside

PATIENCE_SECONDS = 2.0
SIGNALS = sorted(set(signal.Signals) & signal.valid_signals())  # those with names: to ask for each takes time

_lock = threading.RLock()
_turns = WeakKeyDictionary[Any, Any]()  # a `_Turn` per model
_later: dict[int, _Later] = {}  # what hears of each signal in the main thread's block
_cut_short = False  # a block was, since the garbage was last collected


def _renew() -> None:
    """After a fork: whoever held the lock does not run in the child."""
    global _lock
    _lock = threading.RLock()
    _turns.clear()


os.register_at_fork(after_in_child=_renew)


@contextmanager
def exclusive() -> Iterator[None]:
    """Wait until no other thread is in such a block; in the main thread signals then wait for `interrupt_point`.

    Blocks may be nested. A signal (Ctrl-C, or another one with a handler in Python) still works at once while this
    waits, and where a second one of it comes `PATIENCE_SECONDS` after the first.

    What autocast's cache holds of the caller's is out of reach in the block (`casts_aside`).

    Garbage that a block leaves in which something was raised is collected here, too: weak references to fake tensors
    call Python as these go, where an interrupt that comes while the collector runs would be lost.
    """
    global _cut_short
    try:
        with _lock, signals_deferred(), casts_aside():
            yield
    except BaseException:
        _cut_short = True
        raise


class _Turn:
    """A lock, and the thread that has it."""

    def __init__(self) -> None:
        self.lock, self.holder = threading.RLock(), 0


@contextmanager
def turn(model: Any, caller: int = 0, patience: float = -1) -> Iterator[None]:
    """Wait until no other thread is in such a block for this model. Blocks may be nested, and `exclusive` within one.

    Args:
        caller: a thread that this one may work for (autograd's does); where that is in such a block, it waits for this.
        patience: seconds to wait at most; -1 for no limit.

    Raises:
        PlannerError: another thread was in one for longer.
    """
    own = _turns.setdefault(model, _Turn())
    if caller and own.holder == caller:
        yield
        return
    if not own.lock.acquire(timeout=patience):
        raise PlannerError(f"another thread plans or runs this model, and was not done after {patience:.0f} seconds.")
    before, own.holder = own.holder, threading.get_ident()
    try:
        yield
    finally:
        own.holder = before
        own.lock.release()


def alone() -> bool:
    """Whether no other thread of the program runs: then the generators that all threads share move here alone."""
    others = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    return all(_waits_for_work(t) for t in others)


def _waits_for_work(thread: threading.Thread) -> bool:
    """Whether a thread is one of a pool's, with nothing to do: compilers leave such pools behind."""
    frame = sys._current_frames().get(thread.ident or 0)  # not kept: our own frame is in it, a cycle
    return frame is not None and frame.f_code is concurrent.futures.thread._worker.__code__


def interrupt_point() -> None:
    """Raise here what Ctrl-C, or another signal, asked for since the last such point."""
    if _later and _in_main_thread():
        _deliver(iter(_later.values()))


@contextmanager
def interruptible() -> Iterator[None]:
    """Within such a block: signals work at once in here, as nothing is half done."""
    global _later
    if not _in_main_thread():
        yield
        return
    within = _later
    try:
        _later = {}
        _deliver(iter(within.values()))
        yield
    finally:
        _later = within


class _Later:
    """A handler of a signal that remembers it for the handler that it stands in for, while `_later` has it."""

    def __init__(self, number: int, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.number, self.previous = number, previous
        self.asked_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _later.get(number) is not self:
            self.previous(number, frame)
        elif self.asked_at is None:
            self.asked_at = time.monotonic()
        elif time.monotonic() - self.asked_at > PATIENCE_SECONDS:
            self.deliver()

    def deliver(self) -> None:
        if self.asked_at is None:
            return
        self.asked_at = None
        try:
            self.previous(self.number, sys._getframe(1))
        except Exception as error:
            if _later.get(self.number) is not self:
                raise
            raise _Heard([error]) from None


class _Heard(BaseException):
    """Brings an exception of a signal's handler to the end of the block, past code that catches what forward raises."""


def _deliver(each: Iterator[_Later]) -> None:
    """Call the handlers of all signals that came, also where one raises."""
    for later in each:
        try:
            later.deliver()
        finally:
            _deliver(each)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """What `exclusive` does about signals, for a block of which no other thread need keep out."""
    global _later
    if _later or not _in_main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    within = {number: _Later(number, handler) for number, handler in handlers.items() if callable(handler)}
    try:
        _later = within
        for number, later in within.items():
            signal.signal(number, later)
        _collect()
        yield
        _collect()
    except _Heard as heard:
        raise heard.args[0].pop() from None
    finally:
        try:
            for number, later in within.items():
                current: Any = signal.getsignal(number)
                if current is later:
                    signal.signal(number, later.previous)
        finally:
            _later = {}
            _deliver(iter(within.values()))


def _collect() -> None:
    """Free what blocks that were cut short have left, which tracebacks keep until these are handled."""
    global _cut_short
    if _cut_short:
        _cut_short = False
        gc.collect()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
