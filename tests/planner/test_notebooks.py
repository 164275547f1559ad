"""The stored notebooks: made from their sources, executed in order, small, without errors or machine paths.

That they run is `make check-notebooks`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.planner.small import ROOT

FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("0*.py"))


@pytest.fixture(scope="module")
def build() -> Any:
    spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(source: Path) -> Any:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_there_are_four() -> None:
    assert [s.stem for s in SOURCES] == ["01_quick_start", "02_how_it_works", "03_trade_offs", "04_lora_trainer"]
    assert sorted(p.stem for p in FOLDER.glob("*.ipynb")) == [s.stem for s in SOURCES]


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.stem)
def test_stored_notebook_is_its_source_executed(source: Path, build: Any) -> None:
    notebook = read(source)
    nbformat.validate(notebook)
    cells = list(build.read_cells(source))
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in cells]
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert not any(o.output_type == "error" for c in code for o in c.outputs)
    assert build.faults(notebook) == []


def test_figures_are_stored_as_pictures() -> None:
    outputs = [o for c in read(SOURCES[2]).cells if c.cell_type == "code" for o in c.outputs]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 2
    first = [o for c in read(SOURCES[0]).cells if c.cell_type == "code" for o in c.outputs]
    assert any("<svg" in o.data["text/html"] for o in first if "text/html" in o.get("data", {}))


def test_faults_are_found(build: Any) -> None:
    def notebook(**output: Any) -> Any:
        cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output("stream", **output)])
        return nbformat.v4.new_notebook(cells=[cell])

    assert build.faults(notebook(name="stdout", text="fine")) == []
    assert "standard error" in build.faults(notebook(name="stderr", text="warning"))[0]
    assert "path of this machine" in build.faults(notebook(name="stdout", text=f"{ROOT}/planner"))[0]
    assert "at most" in build.faults(notebook(name="stdout", text="x" * 300_001))[0]
    silent = nbformat.v4.new_code_cell("try:\n    run()\nexcept ValueError as error:\n    print(error)")
    assert "prints nothing" in build.faults(nbformat.v4.new_notebook(cells=[silent]))[0]
