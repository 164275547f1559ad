"""`planner -> passes -> solvers`: nothing points back, and `solvers` needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {"solvers": {"solvers"}, "passes": {"passes", "solvers"}, "planner": {"planner", "passes", "solvers"}}
LAYERS = tuple(MAY_IMPORT)


def files(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """`(line, top-level module)` of every import statement of a file, at any depth."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(package), f"{path}:{node.lineno} imports from above the package"
            yield node.lineno, package[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_points_back(layer: str) -> None:
    assert files(layer), f"{layer}/ has no modules"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files(layer)
        for line, module in imported(path)
        if module in (*LAYERS, "tests") and module not in MAY_IMPORT[layer]
    ]
    assert not wrong, wrong


def test_solvers_import_no_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files("solvers")
        for line, module in imported(path)
        if module in ("torch", "transformers", "monai")
    ]
    assert not wrong, wrong


def test_importing_solvers_loads_no_torch() -> None:
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in files("solvers")]
    code = f"import sys, {', '.join(modules)}; assert 'torch' not in sys.modules; assert 'passes' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
