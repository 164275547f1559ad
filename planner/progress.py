"""Progress of the stages that can take longer than a second; silent unless someone can see it."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from passes.exclusive import interrupt_point

# Without its widgets tqdm.auto warns in every notebook that imports this, then prints text as well.
if importlib.util.find_spec("ipywidgets") is None:
    from tqdm import tqdm
else:
    from tqdm.auto import tqdm


class Progress:
    """Times every stage, and shows a bar on a terminal or in a notebook.

    Args:
        show: True or False to force; None shows on a terminal or in a notebook.
    """

    def __init__(self, show: bool | None = None) -> None:
        self.show = _visible() if show is None else show
        self.seconds: dict[str, float] = {}
        self._bar: Any = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`; Ctrl-C that waits is heard before it."""
        interrupt_point()
        start = time.perf_counter()
        if self.show:
            self._bar = tqdm(total=1, desc=name, leave=False, bar_format="{desc} [{elapsed}{postfix}]", delay=0.5)
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def each(self, items: Sequence[Any], name: str) -> Any:
        """Iterate with a bar of its own."""
        return tqdm(items, desc=name, leave=False, delay=0.5) if self.show else items

    def report(self, line: str) -> None:
        """Show a solver's latest news beside the running stage."""
        if self._bar is not None:
            self._bar.set_postfix_str(line)


def _visible() -> bool:
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})
