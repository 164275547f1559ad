"""Makes the notebooks from their readable sources (`0*.py`, cells divided by `# %%`), executes and stores them.

`python notebooks/build.py` writes the `.ipynb` beside each source; `--check` executes without writing, two at a time
(timings that are stored have the machine to themselves); names of sources (`01_quick_start`) limit it to those.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
LARGEST_BYTES = 300_000
CELL_SECONDS = 600
MACHINE_PATH = re.compile(rf"{re.escape(str(ROOT))}\b|/home/|/root/|/Users/|/tmp/|site-packages")
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def sources() -> list[Path]:
    """The notebooks' sources, in order."""
    return sorted(FOLDER.glob("0*.py"))


def read_cells(source: Path) -> Iterator[NotebookNode]:
    """The cells of a source: `# %% [markdown]` begins prose (comment lines), `# %%` code."""
    blocks = re.split(r"^# %%(.*)\n", source.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for i, (kind, body) in enumerate(zip(blocks[::2], blocks[1::2], strict=True)):
        text = body.strip("\n")
        if "[markdown]" in kind:
            cell = new_markdown_cell(re.sub(r"^# ?", "", text, flags=re.MULTILINE))
        else:
            cell = new_code_cell(text)
        cell["id"] = f"cell-{i}"  # nbformat's own are random, and would change with every build
        yield cell


def execute(source: Path) -> NotebookNode:
    """The notebook of `source` with its outputs; a cell that raises ends it with nbclient's CellExecutionError."""
    notebook = new_notebook(cells=list(read_cells(source)), metadata=KERNEL)
    client = NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    )  # fmt: skip
    client.execute()
    notebook.metadata = nbformat.from_dict(KERNEL)  # the kernel adds its version
    return notebook


def faults(notebook: NotebookNode) -> list[str]:
    """What keeps an executed notebook from being stored: too large, machine paths, standard error, nothing to see."""
    text = nbformat.writes(notebook)
    found = [f"{len(text):,} bytes, at most {LARGEST_BYTES:,}"] if len(text) > LARGEST_BYTES else []
    for place in list(MACHINE_PATH.finditer(text))[:3]:
        found.append(f"an output holds a path of this machine: ...{text[max(0, place.start() - 60) :][:160]!r}")
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    found += [f"standard error: {o.text[:200]!r}" for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    silent = [c.source for c in notebook.cells if c.get("outputs") == [] and "print(" in c.source]
    return found + [f"prints nothing: {source[:200]!r}" for source in silent if "def " not in source]


def build(source: Path, writes: bool) -> bool:
    """Execute a notebook, and write it if asked to; whether it can be stored."""
    start = time.perf_counter()
    notebook = execute(source)
    wrong = faults(notebook)
    size = len(nbformat.writes(notebook))
    print(f"{source.stem}: {time.perf_counter() - start:.0f} s, {size:,} bytes", *wrong, sep="\n  ", flush=True)
    if writes and not wrong:
        nbformat.write(notebook, source.with_suffix(".ipynb"))
    return not wrong


def main() -> int:
    """Build what the command line asks for; 1 when a notebook cannot be stored."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="sources to build, all by default")
    parser.add_argument("--check", action="store_true", help="execute, write nothing")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that fight over few cores take far longer
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    chosen = [s for s in sources() if not arguments.names or s.stem in arguments.names]
    with ThreadPoolExecutor(2 if arguments.check else 1) as pool:
        stored = list(pool.map(partial(build, writes=not arguments.check), chosen))
    return int(not all(stored))


if __name__ == "__main__":
    sys.exit(main())
