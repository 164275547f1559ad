"""`planner -> passes -> solvers`: nothing points back, nothing goes in a circle, and `solvers` needs no torch."""

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


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for layer in LAYERS for path in files(layer)}


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """`(line, module or module.name)` of every import of a file, at any depth: lazy and type-only ones, too."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(package), f"{path}:{node.lineno} imports from above the package"
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """`(line, top-level module)` of every import of a file, at any depth."""
    yield from ((line, name.split(".")[0]) for line, name in imported_names(path))


def depends_on(module: str) -> set[str]:
    """The modules of this project that `module` names in an import."""
    names = (name for _, name in imported_names(MODULES[module]))
    return {m for name in names for m in [name if name in MODULES else name.rpartition(".")[0]] if m in MODULES}


def circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """The groups of two or more modules that reach each other, and the modules that name themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [*graph[start]]
        while stack:
            module = stack.pop()
            if module not in seen:
                seen.add(module)
                stack += graph[module]
        return seen

    reach = {module: reached(module) for module in graph}
    knots = {tuple(sorted(m for m in reach[n] if n in reach[m])) for n in graph}
    return sorted(k for k in knots if k)


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


def test_no_import_goes_in_a_circle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "b"}}) == [("b", "c")]
    assert circles({module: depends_on(module) for module in MODULES}) == []
