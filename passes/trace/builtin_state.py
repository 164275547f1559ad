"""State in objects of Python's own types besides containers: arrays, C data, streams, queues, context variables."""

from __future__ import annotations

import ctypes
import gc
import io
import queue
import weakref
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy

from .nodes import MISSING, Node, Walk

_C_DATA = ctypes.c_int.__mro__[-2]  # what all of ctypes' data derives from


def visit_buffer(walk: Walk, value: Any, path: str, name: str) -> None:
    """Whatever lets its bytes be written."""

    def give(content: bytes) -> None:
        if isinstance(value, array):
            value[:] = array(value.typecode, content)
        else:
            numpy.frombuffer(value, numpy.uint8)[:] = numpy.frombuffer(content, numpy.uint8)

    view = memoryview(value)
    if view.nbytes and view.c_contiguous and not view.readonly:
        walk.add(Node(value, path, name, "buffer", lambda: memoryview(value).tobytes(), give))


def visit_stream(walk: Walk, value: Any, path: str, name: str) -> None:
    """A file in memory: what it holds, and where it is read and written next."""
    if value.closed:
        return

    def give(content: tuple[Any, int]) -> None:
        value.seek(0)
        value.truncate()
        value.write(content[0])
        value.seek(content[1])

    walk.add(Node(value, path, name, "buffer", lambda: (value.getvalue(), value.tell()), give))


def visit_queue(walk: Walk, value: Any, path: str, name: str) -> None:
    """A queue of C, which shows what it holds only by giving it out."""

    def take() -> list[Any]:
        items = [value.get_nowait() for _ in range(value.qsize())]
        for item in items:
            value.put(item)
        return items

    def give(content: list[Any]) -> None:
        for _ in range(value.qsize()):
            value.get_nowait()
        for item in content:
            value.put(item)

    node = walk.add(Node(value, path, name, "items", take, give))
    walk.follow((item, path, name) for item in node.content)


def visit_context_variable(walk: Walk, value: Any, path: str, name: str) -> None:
    """What it is set to; lists and dicts in one are `private_contexts`'s."""

    def take() -> dict[str, Any]:
        found = value.get(MISSING)
        return {} if found is MISSING or isinstance(found, (dict, list)) else {value.name: found}

    def give(content: dict[str, Any]) -> None:
        for found in content.values():
            value.set(found)

    node = walk.add(Node(value, path, name, "variable", take, give))
    walk.follow((found, f"{path}.get()", name) for found in node.content.values())


def visit_reference(walk: Walk, value: Any, path: str, name: str) -> None:
    """What shows another object: a weak reference, a read-only view of a dict."""
    shown = [value()] if isinstance(value, weakref.ref) else gc.get_referents(value)
    walk.follow((each, path, name) for each in shown)


BUILTIN: tuple[tuple[Any, Callable[[Walk, Any, str, str], None]], ...] = (
    ((array, memoryview, _C_DATA), visit_buffer),
    ((io.StringIO, io.BytesIO), visit_stream),
    (queue.SimpleQueue, visit_queue),
    (ContextVar, visit_context_variable),
    ((weakref.ref, type(type.__dict__), type({}.keys()), type({}.values()), type({}.items())), visit_reference),
)
