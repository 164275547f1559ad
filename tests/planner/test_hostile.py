"""Names from the model, and paths, that were made to break what is written: nothing runs, nothing fails raw."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import json
import os
import socket
import stat
import sys
import time
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from planner import Plan, PlanFileError, PlannerError
from planner.files.planfile import read
from planner.files.planfile_view import show_file
from planner.show.console import Console
from tests.planner.limits import within_seconds
from tests.planner.steps import batch, linear, plan, tight

RUN = "__import__('builtins').__dict__.__setitem__('HARMED', 1)"
INJECTIONS = [
    f'E"""\n{RUN}\n"""', f"'''\n{RUN}\n'''", f'"\n{RUN}\n"', f"'\n{RUN}\n'", f"\n{RUN}\n", f"\r{RUN}\r", f"\r\n{RUN}",
    f"\x0c{RUN}", f"\x0b{RUN}", f"\x85{RUN}", f"\u2028{RUN}", f"\u2029{RUN}", f"\\\n{RUN}", f'\\"""\n{RUN}',
    f")\n{RUN}",
    f"]\n{RUN}", f"): pass\n{RUN}\n", "{" + RUN + "}", "{{" + RUN + "}}", f"'+{RUN}+'", f'"+{RUN}+"', f"#\n{RUN}",
    f"-*- coding: utf-7 -*-\n+AAo-{RUN}", f"\x1a\n{RUN}", f'\\N{{x}}"""\n{RUN}', f"x = {RUN}; #",
    f"</script><script>{RUN}</script>", f"<!--<script>{RUN}", f"<img src=x onerror={RUN}>", f"\"><svg onload='{RUN}'>",
]  # fmt: skip
ODD = [
    "\\", "\\\\", '"', '"""', "'''", '\\"', "\0", "a\0b", "\x1b[31m", "\u202e", "\ufeff", "\ud800", "a\udfffb",
    "\udcff",
    "\U0001f600", "é", "e\u0301", "²", "ﬁ", "ª", "名前", "{}", "{0}", "{doc}", "%s", "%(x)s", "$x$", "$", "\\x", "\\u",
    "\\N{BULLET}", "[/x]", "[red]", "[bold", "<b>", "&amp;", " ", "  ", "\t", "a b", "-", "/", "//", "../x", "~", "*",
    "?", ":", ";", "#", "`x`", "x" * 300,
]  # fmt: skip
WORDS = [
    "constants", "spec", "halves", "answers", "entries", "load", "torch", "aten", "values", "float", "slice", "lambda",
    "None", "True", "print", "import", "dropout", "add_relu", "run_with_rng_state", "tensors", "value_0", "answer_0",
    "planned_step", "check", "__metadata", "__debug__", "_", "__", "__doc", "0", "1e5", "places", "step", "nan", "inf",
]  # fmt: skip
NAMES = [*INJECTIONS, *ODD, *WORDS]
assert len(set(NAMES)) >= 100


class Named(nn.Module):
    """A product with a parameter and a buffer of a given name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.given = name
        self.register_parameter(name, nn.Parameter(torch.randn(8, 8)))
        self.register_buffer(f"{name}!", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ getattr(self, self.given) + getattr(self, f"{self.given}!")).tanh()


class Hostile(nn.Module):
    """Parts, parameters, buffers, keys of inputs and outputs, and classes of these names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        # What torch itself does not take as a name: dots, and what every module has.
        self.names = [n.replace(".", "_") + "_" * (n == "given" or hasattr(nn.Module(), n)) for n in names]
        for name in self.names:
            part = Named(name)
            with contextlib.suppress(ValueError, UnicodeError):  # Python's own limits: NUL, lone surrogates
                part.__class__ = type(name, (Named,), {})
            self.add_module(name, part)
            if name not in ("names", "forward"):
                self.register_buffer(f"{name}?", torch.ones(8))
        for name in ("constants", "spec", "halves", "answers", "entries", "load", "state", "check", "places"):
            if not hasattr(self, name):
                self.register_buffer(name, torch.ones(8))
        with contextlib.suppress(ValueError, UnicodeError):
            self.__class__ = type(names[0], (Hostile,), {})

    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        y = sum(given.values())
        for name in self.names:
            y = getattr(self, name)(y)
            y = torch.nn.functional.dropout(y, 0.1)
        return {name: y.sum() if i == 0 else y * i for i, name in enumerate(self.names)}


def built(names: list[str]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Hostile(names), ({name: torch.randn(4, 8) for name in names[:4]},)


def imported(folder: Path) -> ModuleType:
    """An exported folder as a package."""
    name = f"exported_{folder.parent.name}_{folder.name}".replace("-", "_")
    inside = {"submodule_search_locations": [str(folder)]}
    found = importlib.util.spec_from_file_location(name, folder / "__init__.py", **inside)
    assert found is not None and found.loader is not None
    package = importlib.util.module_from_spec(found)
    sys.modules[name] = package
    found.loader.exec_module(package)
    return package


def losses(module: nn.Module, sample: Any) -> list[torch.Tensor | None]:
    torch.manual_seed(3)
    result = module(*sample)
    first = next(iter(result.values()))
    first.backward()
    found = [first.detach(), *(p.grad for p in module.parameters())]
    module.zero_grad()
    return found


def harmless() -> bool:
    return not hasattr(builtins, "HARMED")


class Tags(HTMLParser):
    """Tags of a page, and the content of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


GROUPS = [NAMES[i::6] for i in range(6)]


@pytest.mark.parametrize("names", GROUPS, ids=range(len(GROUPS)))
def test_exports_quote_every_name(names: list[str], tmp_path: Path) -> None:
    usable = [n for n in names if not any("\ud800" <= c <= "\udfff" for c in n)]
    model, sample = built(usable)
    made = tight(model, sample)
    package = imported(made.export(tmp_path / "out"))
    module = package.load()
    assert list(module.state_dict()) == list(model.state_dict())
    for ours, theirs in zip(losses(module, sample), losses(model, sample), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)  # type: ignore[arg-type]
    assert repr(module) and harmless()


@pytest.mark.parametrize("names", GROUPS, ids=range(len(GROUPS)))
def test_files_pages_and_text_quote_every_name(names: list[str], tmp_path: Path) -> None:
    model, sample = built(names)
    made = tight(model, sample)
    page = made.report(tmp_path / "page.html").read_text(encoding="utf-8")
    tags = Tags(page)
    assert tags.found.count("script") == 2 and "img" not in tags.found and not tags.handlers
    assert Tags(made._repr_html_()).found.count("script") == 0
    text = "\n".join([str(made), repr(made), made.explain()])
    text.encode("utf-8")
    assert "\x1b" not in text and "\0" not in text
    with warnings.catch_warnings(action="ignore"):  # glyphs that the font lacks
        made.plot().savefig(tmp_path / "plot.png")
        made.plot_graph().savefig(tmp_path / "graph.png")
    path = made.save(tmp_path / "plan.json")
    Console(file=io.StringIO()).print(show_file(read(path)))
    assert Plan.load(path, *built(names), progress=False).schedule == made.schedule
    assert harmless()


@pytest.mark.parametrize("name", [n for n in NAMES if any("\ud800" <= c <= "\udfff" for c in n)] + ["__metadata__"])
def test_names_that_weights_cannot_have_are_refused(name: str, tmp_path: Path) -> None:
    model = linear()
    model._parameters[name] = model._parameters.pop("weight")
    model.forward = lambda x: x @ model._parameters[name]  # type: ignore[method-assign, operator]
    with pytest.raises(PlannerError, match="safetensors file cannot hold a tensor called"):
        plan(model, batch()).export(tmp_path / "out")
    assert not list(tmp_path.iterdir())


# Paths ----------------------------------------------------------------------------------------------------------------

PATHS: dict[str, Any] = {
    "empty": "", "NUL": "\0", "NUL inside": "a\0b", "NUL in a folder": "a\0/b.json", "bytes": b"plan.json",
    "bytes of no text": b"\xff\xfe.json", "empty bytes": b"", "surrogate": "\ud800.json", "escaped byte": "\udcff.json",
    "number": 3, "negative": -1, "flag": True, "nothing": None, "fraction": 1.5, "list": ["plan.json"],
    "object": object(),
    "long name": "x" * 256, "nearly too long": "x" * 250, "long letters": "é" * 127, "very long": "x" * 5000,
    "long path": "x/" * 3000, "deep": "/".join("ab" * 60), "newline": "a\nb.json", "blank": " ", "dashes": "--help",
    "control": "\x1b[31m.json", "stars": "*?[a-z].json", "here": ".", "above": "..", "root": "/", "slash": "folder/",
    "folder": "folder", "full folder": "full", "below a file": "file/plan.json", "file": "file",
    "nowhere": "no/plan.json",
    "loop": "loop", "below a loop": "loop/plan.json", "dangling": "dangling", "link to a folder": "link",
    "pipe": "pipe", "socket": "socket", "full device": "/dev/full", "null device": "/dev/null", "zeros": "/dev/zero",
    "memory": "/proc/self/mem", "process": "/proc/self", "system": "/sys/plan.json", "tilde": "~nobody/plan.json",
    "no right": "locked/plan.json",
}  # fmt: skip
assert len(PATHS) >= 40


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with something of every kind in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "full/inner", "locked"):
        Path(name).mkdir(parents=True)
    Path("file").write_text("not a plan\n")
    for link, target in (("loop", "loop"), ("dangling", "nothing"), ("link", "folder")):
        Path(link).symlink_to(target)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    Path("locked").chmod(0)
    return tmp_path


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(linear(), batch())


def actions(made: Plan, path: Any) -> list[Callable[[], Any]]:
    load = lambda: Plan.load(path, linear(), batch(), progress=False)  # noqa: E731
    return [lambda: made.save(path), lambda: read(path), load, lambda: made.report(path), lambda: made.export(path)]


@pytest.mark.parametrize("name", PATHS)
def test_any_path_ends_well_or_in_a_sentence(name: str, made: Plan, place: Path) -> None:
    for act in actions(made, PATHS[name]):
        with within_seconds(5):
            said = ""
            try:
                act()
            except PlannerError as error:
                said = str(error)
        assert said.isprintable() and len(said) < 1000, said
    assert not [p for p in place.rglob("*.part") if "locked" not in p.parts]
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    Path("locked").chmod(0o700)


def test_reading_says_what_is_wrong_with_a_path(place: Path) -> None:
    for path, said in (("", "is not a path"), ("\0", "is not a path"), ("pipe", "not a file"), ("folder", "not a file"),
                       ("loop", "symbolic links"), ("x" * 300, "too long"), ("none", "No such file")):  # fmt: skip
        with pytest.raises(PlanFileError, match=said):
            read(path)
    Path("locked").chmod(0o700)


def test_a_full_device_is_said_and_kept(made: Plan) -> None:
    with pytest.raises(PlannerError, match="cannot write /dev/full: No space left on device"):
        made.save("/dev/full")


def test_stale_parts_of_this_name_go_with_the_next_write(made: Plan, tmp_path: Path) -> None:
    digits = "0123456789abcdef" * 2
    names = (f".plan.json.{digits}.part", f".plan.json.{'0' * 32}.part", ".plan.json.x.part")
    stale, fresh, other = (tmp_path / name for name in names)
    folder = tmp_path / f".out.{digits}.part"
    folder.mkdir()
    for path in (stale, fresh, other, folder / "half.py"):
        path.write_text("")
    hours_ago = time.time() - 2 * 3600
    for path in (stale, other, folder):
        os.utime(path, (hours_ago, hours_ago))
    made.save(tmp_path / "plan.json")
    made.export(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["plan.json", "out", fresh.name, other.name])


def test_long_names_that_the_system_allows_are_written(made: Plan, tmp_path: Path) -> None:
    for name in ("x" * 250, "é" * 120):
        assert json.loads(made.save(tmp_path / name).read_text())["version"]
