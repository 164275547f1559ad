"""Text from outside (names of modules, paths, arguments) on one line of any terminal, file or page."""

from __future__ import annotations

from typing import Any


def printable(text: Any) -> str:
    r"""`text` with everything that does not print escaped: newlines, control codes, lone surrogates (`\ud800`)."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def brief(text: Any, longest: int = 200) -> str:
    """`printable`, with the middle left out of what is longer."""
    shown = printable(text)
    return shown if len(shown) <= longest else f"{shown[: longest // 2]}...{shown[-longest // 2 :]}"
