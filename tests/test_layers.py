"""`planner -> passes -> solvers`: nothing points back, nothing goes in a circle, `solvers` needs no torch, and one door
leads to what torch keeps semi-private."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {"solvers": {"solvers"}, "passes": {"passes", "solvers"}, "planner": {"planner", "passes", "solvers"}}
LAYERS = tuple(MAY_IMPORT)
TOP_LEVEL = {
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml",
}  # fmt: skip
LARGEST = 1 << 20  # bytes of a file


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


def is_private(dotted: str) -> bool:
    """Whether torch makes no promise about this name of its own: `torch._C.x`, `torch.utils._pytree`."""
    first, *parts = dotted.split(".")
    dunder = [part.startswith("__") and part.endswith("__") for part in parts]
    hidden = any(p.startswith("_") and not d for p, d in zip(parts, dunder, strict=True))
    if first != "torch" or dotted.startswith("torch.ops."):  # ops have names in ATen's schemas
        return False
    return hidden or dotted.startswith("torch.utils.weak")


def private_torch(source: str) -> list[tuple[int, str]]:
    """`(line, name)` of every semi-private name that the source imports from torch, or reaches from a name of torch's.

    What an object of torch's carries (`tensor._version`, `module._parameters`) is not looked at.
    """
    tree, known, found = ast.parse(source), {"torch": "torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            known |= {a.asname or a.name: base + a.name for a in node.names if base or a.asname}
            found += [(node.lineno, base + a.name) for a in node.names]

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            return f"{dotted(node.args[0])}.{getattr(node.args[1], 'value', '')}"
        return known.get(node.id, "") if isinstance(node, ast.Name) else ""

    found += [(n.lineno, dotted(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Call)]
    return [(line, name) for line, name in found if is_private(name)]


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


@pytest.mark.parametrize(("source", "is_found"), [
    ("import torch._ops", True), ("from torch._ops import OpOverload", True), ("from torch.utils import _pytree", True),
    ("from torch.utils.weak import WeakIdKeyDictionary", True), ("import torch\ntorch._C._x()", True),
    ("from torch import fx\nfx.node._names", True), ("import torch\ngetattr(torch._C, '_x', None)", True),
    ("import torch\ngetattr(torch, '_x', None)", True), ("import torch\ntorch.__version__", False),
    ("import torch\ntorch.ops.aten._to_copy.default", False),
    ("from torch.overrides import TorchFunctionMode", False), ("from passes._torch import pytree", False),
])  # fmt: skip
def test_what_counts_as_private(source: str, is_found: bool) -> None:
    assert bool(private_torch(source)) is is_found


def test_one_door_leads_to_private_torch() -> None:
    doors = [
        ROOT / "passes" / "_torch.py", ROOT / "passes" / "run" / "_torch.py",
        ROOT / "planner" / "integrations" / "_torch_compile.py",
        ROOT / "planner" / "integrations" / "_torch_inductor.py",
    ]  # fmt: skip
    assert all(private_torch(door.read_text(encoding="utf-8")) for door in doors)
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for layer in LAYERS for path in files(layer) if path not in doors
        for line, name in private_torch(path.read_text(encoding="utf-8"))
    ]  # fmt: skip
    assert not wrong, wrong


def test_the_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:planner|passes|solvers|tests)/[\w/.]+\.py)`", text)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).is_file()] == []
    walk = text.partition("### A new kind of step")[2]
    count = re.search(r"a new kind of step in a schedule \| (\d+)", text)
    assert count and int(count[1]) == len(set(re.findall(r"`((?:planner|passes|solvers)/\S+\.py)`", walk)))


def test_a_torch_that_lacks_what_is_needed_is_named() -> None:
    script = "import torch; del torch._is_functional_tensor; import planner"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr.splitlines()[-1].startswith("ImportError: checkpoint-planner needs torch >= 2.11")
    assert "_is_functional_tensor" in done.stderr.splitlines()[-1]


def test_nothing_is_kept_here_by_accident() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    files = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    assert [name for name in files if (ROOT / name).stat().st_size > LARGEST] == []
    assert {name for name in files if "/" not in name and not name.startswith(".")} == TOP_LEVEL
