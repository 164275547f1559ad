"""rich, imported without a trace: as it is loaded, it draws from Python's generator."""

from __future__ import annotations

import random

_before = random.getstate()
from rich.console import Console, Group  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

random.setstate(_before)

__all__ = ["Console", "Group", "Table", "Text"]
