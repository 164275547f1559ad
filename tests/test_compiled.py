"""Annealing and local search in C do what they do in Python, move by move, and are left out where C was not built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from ctypes import CDLL
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import solvers
from solvers import Problem, compiled
from solvers.compiled import CompiledWalk, library, library_for
from solvers.descent import cheapest_descent
from solvers.live import Live
from solvers.local import Search, search_from
from solvers.metropolis import Walk, walk_from
from tests.bench.families import FAMILIES
from tests.solvers.strategies import problems

C_FILE = Path(solvers.__file__).with_name("walk.c")
FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-std=c11")


def built(folder: Path, *more: str) -> Path:
    """`walk.c` as it is now, compiled into a folder."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    path = folder / f"_walk{EXTENSION_SUFFIXES[0]}"
    subprocess.run(["cc", *FLAGS, *more, str(C_FILE), "-o", str(path), "-lm"], check=True)
    return path


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    """Of the file beside the tests, not of what was installed."""
    found = compiled.loaded(built(tmp_path_factory.mktemp("walk")))
    assert found is not None
    return found


def walked(lib: CDLL, problem: Problem, room: int, seed: int, moves: int, temperature: float, weight: float) -> None:
    """Both walks, compared after every fifty moves."""
    in_c, in_python = (walk_from(Live(problem), room, seed, by) for by in (lib, None))
    assert isinstance(in_c, CompiledWalk) and isinstance(in_python, Walk)
    for _ in range(0, moves, 50):
        for walk in (in_c, in_python):
            walk.moves(50, temperature, weight)
        for best in (False, True):
            assert in_c.recomputes(best) == in_python.recomputes(best)
        temperature, weight = 0.9 * temperature, 1.1 * weight


@settings(max_examples=80, deadline=None)
@given(problems(), st.floats(0.3, 1.0), st.integers(0, 1 << 40), st.floats(0.1, 10.0))
def test_both_walks_are_the_same_on_small_problems(
    lib: CDLL, problem: Problem, share: float, seed: int, temperature: float
) -> None:
    live = Live(problem)
    if problem.evictable:
        room = int(share * live.peak_bytes) - problem.static_bytes
        walked(lib, problem, room, seed, 500, temperature, 0.5)


@pytest.mark.parametrize("family", ["layered-small", "unit-dag", "transformer-12", "unet-6"])
def test_both_walks_are_the_same_on_steps(lib: CDLL, family: str) -> None:
    problem = FAMILIES[family]()
    walked(lib, problem, Live(problem).peak_bytes * 3 // 10 - problem.static_bytes, 1, 2000, 2.0, 0.1)


def test_a_walk_goes_on_from_a_plan(lib: CDLL) -> None:
    problem = FAMILIES["unet-6"]()
    begun = walk_from(Live(problem), Live(problem).peak_bytes // 2, 0, lib)
    begun.moves(5000, 0.5, 1.0)
    state = begun.recomputes(best=False)
    assert state
    assert set(walk_from(Live(problem, state), 0, 0, lib).recomputes(best=False) or ()) == set(state)


def searched(lib: CDLL, problem: Problem, budget_bytes: int, seed: int, steps: int) -> bool:
    """Both searches, compared after every five steps; whether there was a plan to begin with."""
    if (plan := cheapest_descent(problem, budget_bytes)) is None:
        return False
    begun = [Live(problem, plan.recomputes()) for _ in range(2)]
    in_c, in_python = (search_from(live, budget_bytes, seed, by) for live, by in zip(begun, (lib, None), strict=True))
    assert isinstance(in_c, CompiledWalk) and isinstance(in_python, Search)
    for step in range(0, steps, 5):
        ended = [search.improve(step, 5, steps, target_cost=0) for search in (in_c, in_python)]
        assert ended[0] == ended[1]
        assert sorted(in_c.recomputes(best=True) or ()) == in_python.recomputes(best=True)
    return True


@settings(max_examples=80, deadline=None)
@given(problems(), st.floats(0.3, 1.0), st.integers(0, 1 << 40))
def test_both_searches_are_the_same_on_small_problems(lib: CDLL, problem: Problem, share: float, seed: int) -> None:
    searched(lib, problem, int(share * Live(problem).peak_bytes), seed, 60)


@pytest.mark.parametrize("family", ["layered-small", "unit-dag", "transformer-12", "unet-6", "lstm-20"])
def test_both_searches_are_the_same_on_steps(lib: CDLL, family: str) -> None:
    problem = FAMILIES[family]()
    assert searched(lib, problem, Live(problem).peak_bytes * 45 // 100, 1, 30)


def test_a_library_of_another_version_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "VERSION", compiled.VERSION + 1)
    assert compiled.loaded(built(tmp_path)) is None


def test_what_is_no_library_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "_walk.so").write_bytes(b"not a library")
    assert compiled.loaded(tmp_path / "_walk.so") is None


def test_costs_that_an_integer_of_64_bits_does_not_hold_are_walked_in_python() -> None:
    problem = FAMILIES["unet-6"]()
    dear = Problem(problem.ops, problem.tensors, problem.num_forward, problem.outputs, step_cost=1 << 60)
    assert isinstance(walk_from(Live(dear), 1 << 20, 0, library_for(dear)), Walk)
    assert library_for(problem) is library()


def test_memory_is_neither_lost_nor_overrun(tmp_path: Path) -> None:
    """The same walk under the address sanitizer, in a process of its own."""
    asan = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(asan).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    path = built(tmp_path, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    code = (
        "import sys; from pathlib import Path; from solvers import compiled\n"
        "from solvers.live import Live; from tests.bench.families import FAMILIES\n"
        "problem = FAMILIES['unet-6'](); room = Live(problem).peak_bytes // 3\n"
        "walk = compiled.CompiledWalk(compiled.loaded(Path(sys.argv[1])), Live(problem), room, 1, 1e9, 1e6)\n"
        "walk.moves(4000, 5.0, 0.1); print(len(walk.recomputes(False)), len(walk.recomputes(True) or ()))\n"
        "from solvers.descent import cheapest_descent; from solvers.local import search_from\n"
        "plan = cheapest_descent(problem, Live(problem).peak_bytes // 2)\n"
        "search = search_from(plan, Live(problem).peak_bytes // 2, 1, compiled.loaded(Path(sys.argv[1])))\n"
        "search.improve(0, 200, 200, 0); print(len(search.recomputes(True)))"
    )
    root = C_FILE.parents[1]
    env = {"LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", code, str(path)], env=env, capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[0]) > 0


def test_the_library_that_was_installed_is_found_or_there_is_none() -> None:
    found = library()
    assert found is None or found.walk_version() == compiled.VERSION
