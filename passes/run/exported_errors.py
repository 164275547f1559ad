"""The error of an exported step. Copied into the folder as `errors.py`, in place of the library's own."""

from __future__ import annotations


class ExportError(RuntimeError):
    """The exported step cannot run on what it was given; the message says what was expected."""


PlannerError = ExportError
