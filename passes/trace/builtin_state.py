"""State in objects of Python's own types besides containers: arrays, numbers of C, files in memory, context variables.

What other threads may use meanwhile (queues, locks, events, semaphores) is left alone, and so are C's pointers.
"""

from __future__ import annotations

import ctypes
import gc
import io
import weakref
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy

from .nodes import MISSING, Node, Walk

LARGEST_BUFFER = 1 << 24  # bytes that are copied
_SIMPLE = ctypes.c_int.__mro__[1]
_NUMBERS = frozenset("?bBhHiIlLqQfdgc")  # of ctypes' codes; the others are pointers


def visit_buffer(walk: Walk, value: Any, path: str, name: str) -> None:
    """Whatever lets its bytes be written."""

    def take() -> bytes | None:
        try:
            return memoryview(value).tobytes()
        except ValueError:  # a view that was released
            return None

    def give(content: bytes | None) -> None:
        if isinstance(value, array):
            value[:] = array(value.typecode, content or b"")
        elif content and take() is not None:
            numpy.frombuffer(value, numpy.uint8)[:] = numpy.frombuffer(content, numpy.uint8)

    if isinstance(value, array) or (take() is not None and _is_writable(memoryview(value))):
        walk.add(Node(value, path, name, "buffer", take, give))


def _is_writable(view: memoryview) -> bool:
    return 0 < view.nbytes <= LARGEST_BUFFER and view.c_contiguous and not view.readonly


def visit_c_data(walk: Walk, value: Any, path: str, name: str) -> None:
    """Numbers of C, alone or in arrays and structures."""
    if _holds_numbers(type(value)):
        visit_buffer(walk, value, path, name)


def _holds_numbers(kind: Any) -> bool:
    if issubclass(kind, _SIMPLE):
        return kind._type_ in _NUMBERS
    if issubclass(kind, ctypes.Array):
        return _holds_numbers(kind._type_)
    fields = [field for cls in kind.__mro__ for field in vars(cls).get("_fields_", ())]
    return issubclass(kind, (ctypes.Structure, ctypes.Union)) and all(_holds_numbers(field[1]) for field in fields)


def visit_file(walk: Walk, value: Any, path: str, name: str) -> None:
    """A file in memory: what it holds, and where it is read and written next."""

    def take() -> Any:
        return None if value.closed else value.__getstate__()[:-1]

    def give(content: Any) -> None:
        if content is None or value.closed:
            return
        try:
            value.__setstate__((*content, None))
        except BufferError:  # something views its memory
            value.getbuffer()[: len(content[0])] = content[0]
            value.seek(content[-1])

    if not value.closed and len(value.getvalue()) <= LARGEST_BUFFER:
        walk.add(Node(value, path, name, "buffer", take, give))


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


def visit_view(walk: Walk, value: Any, path: str, name: str) -> None:
    """A view of a dict."""
    walk.follow((each, path, name) for each in gc.get_referents(value))


def visit_reference(walk: Walk, value: Any, path: str, name: str) -> None:
    """A weak reference, whose object may lead anywhere."""
    walk.follow_last([(value(), path, name)])


BUILTIN: tuple[tuple[Any, Callable[[Walk, Any, str, str], None]], ...] = (
    ((array, memoryview), visit_buffer),
    ((_SIMPLE, ctypes.Array, ctypes.Structure, ctypes.Union), visit_c_data),
    ((io.StringIO, io.BytesIO), visit_file),
    (ContextVar, visit_context_variable),
    ((type(type.__dict__), type({}.keys()), type({}.values()), type({}.items())), visit_view),
    (weakref.ref, visit_reference),
)
