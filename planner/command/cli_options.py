"""What the verbs of the command line share: reading their options, printing their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from passes.printable import brief, printable
from solvers.errors import MIB, PlannerError


def make_session(
    factory: str, *, reserve: str = "", optimizer: str = "", drop_outputs: bool = False,
    regions: Sequence[str] = ("auto",), **options: Any,
) -> Any:
    from planner.session import open_session

    from .factory import load_factory, make

    options["regions"] = regions[0] if len(regions) == 1 else tuple(regions)
    options |= set_aside(reserve, optimizer, drop_outputs)
    build = load_factory(factory)
    model, sample = make(build)
    return open_session(model, sample, **options)


def set_aside(reserve: str, optimizer: str, drop_outputs: bool) -> dict[str, Any]:
    """The options of `auto_checkpoint` that say what else memory is needed for."""
    import torch

    from planner.units import parse_size

    kinds = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"]
    if optimizer and optimizer not in kinds:
        raise PlannerError(f"torch.optim has no optimizer {optimizer!r}: it has {', '.join(kinds)}.")
    return {
        "reserve_mb": parse_size(reserve) / MIB if reserve else 0,
        "optimizer": getattr(torch.optim, optimizer) if optimizer else None,
        "keep_outputs": not drop_outputs,
    }


def parse_budget(text: str, session: Any) -> int:
    from planner.units import parse_size

    return parse_size(text, session.plain_peak_bytes)


def refuse_one_path(**outputs: Path | None) -> None:
    """Refuse two outputs at one path: the second would take the place of the first."""
    seen: dict[Path, str] = {}
    for name, path in outputs.items():
        if path is not None and (other := seen.setdefault(path.resolve(), name)) != name:
            raise PlannerError(f"--{other} and --{name} are both {brief(path)}: give each a path of its own.")


def save_figure(figure: Any, path: Path) -> None:
    from planner.files.atomic import as_path

    try:
        figure.savefig(as_path(path))
    except (OSError, ValueError) as error:
        raise PlannerError(f"cannot write {brief(path)}: {brief(error)}") from error


def make_console() -> Any:
    from planner.show.console import Console

    return Console()


def print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from planner.show.console import Table, Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(Text(printable(column)), justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    make_console().print(table)


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2))
